"""Where drafts come from: the interface the decoder speaks, and the block drafter behind it.

# B requests, K block (anchor and K - 1 drafts), T packed tokens, H hidden size of the drafter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.length import Proposal
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.engine.device_context import page_before
from adaflash_batch.engine.packing import Int32, Int64, Packed
from adaflash_batch.engine.target import Target
from adaflash_batch.engine.tiled_drafter import TiledDrafter
from adaflash_batch.engine.upload import Upload
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import DrafterWeights
from adaflash_batch.kernels.device_step import DeviceStep, on_device
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import Attention, KVLayer, PackedStep
from adaflash_batch.request import RowKey


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The requests to draft for.

    Attributes:
        keys: who they are.
        anchors: last known token of each.
        positions: its position, int32 [B]; everything before it is in KV memory.
        table: their pages, int32 [B, P]; positions .. positions + K - 1 have pages too.
    """

    keys: Sequence[RowKey]
    anchors: Sequence[int]
    positions: Int32
    table: Int32


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes behind an anchor.

    Attributes:
        token_ids: K - 1 tokens.
        survival: for each of them how likely it and all before it are right; None where the drafter
            cannot say.
        length: of the scalar head (AdaFlash), the share of the block that is worth verifying, its
            anchor counted; None without that head.
        place: where on the device the tokens are until the host knows them, which then writes them
            into `token_ids`; None where they are known.
    """

    token_ids: list[int]
    survival: list[float] | None = None
    length: float | None = None
    place: int | None = None


class Drafter(Protocol):
    """Proposes tokens; deterministic given what it has seen.

    Attributes:
        version: number of its weights.
        block_size: K; it proposes K - 1 tokens. The net's own block may have fewer rows: where the
            anchor's row drafts too, K - 1 rows are enough.
        tapped_layers: target layers whose outputs `absorb` wants.
    """

    version: int
    block_size: int
    tapped_layers: tuple[int, ...]

    def draft(self, batch: DraftBatch) -> list[Draft]:
        """A block for each request."""

    def absorb(self, step: PackedStep, positions: torch.Tensor, features: torch.Tensor) -> None:
        """Take in what the target saw of committed tokens.

        Args:
            step: to which requests the T tokens belong.
            positions: int64 [T].
            features: [T, len(tapped_layers) * target hidden size].
        """

    def adopt(self, weights: DrafterWeights) -> None:
        """Draft with other weights from now on; what was absorbed stays as it was.

        Raises ConfigError, and changes nothing, where they do not fit.
        """


class BlockDrafter:
    """A drafter net over the decoder's pages: context K/V of each layer lie beside the target's.

    The block's own K/V are written behind the context and overwritten by the next step's.
    With a draft vocabulary (`token_ids`, see vocabulary.py) only its rows of the lm_head are run.
    """

    def __init__(
        self,
        net: DFlash,
        target: Target,
        num_pages: int,
        version: int = 0,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        config = net.config
        self.version = version
        self.block_size = config.num_drafts + 1
        self.tapped_layers = config.target_layer_ids
        self._net = net
        self._target = target
        self._token_ids = None if token_ids is None else token_ids.to(target.device)
        self._head = target.head if token_ids is None else target.head_of(token_ids)
        self._kv = [
            KVLayer.empty(
                num_pages, config.num_key_value_heads, config.head_dim, target.dtype, target.device
            )
            for _ in range(config.num_hidden_layers)
        ]
        self._tiled = None
        if target.kernels.kind == "native":
            self._tiled = TiledDrafter.of(net, self._kv, self._token_ids)
        if net.markov_head is not None:
            net.markov_head.keep_rows(self._token_ids)
        # The state before a request's anchor, in the row of the page that the state's token is in.
        self._states: torch.Tensor | None = None
        if config.has_input_projection:
            shape = (num_pages + 1, config.hidden_size)  # the last is nobody's
            self._states = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self._how = [
            Attention(scale=config.head_dim**-0.5, window=window or 0, causal=causal)
            for window, causal in zip(config.windows, config.causal, strict=True)
        ]

    @staticmethod
    def bytes_per_token(net: DFlash, *, keeps_states: bool = False) -> int:
        """KV memory that one token takes in all layers; see `numbers_per_token`."""
        numbers = BlockDrafter.numbers_per_token(net.config, keeps_states=keeps_states)
        return numbers * net.fc.weight.element_size()

    @staticmethod
    def numbers_per_token(config: DrafterConfig, *, keeps_states: bool = False) -> int:
        """Numbers that KV memory holds of one token in all layers.

        Args:
            keeps_states: with the target's states that `absorb` wants.
        """
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        if config.has_input_projection:
            numbers += -(-config.hidden_size // PAGE)  # one state a page
        if keeps_states:
            numbers += len(config.target_layer_ids) * config.hidden_size
        return numbers

    @property
    def config(self) -> DrafterConfig:
        """Of the net."""
        return self._net.config

    @property
    def target(self) -> Target:
        """That it drafts for."""
        return self._target

    def draft(self, batch: DraftBatch) -> list[Draft]:
        """See Drafter: one pass over anchors and masks, then what the net proposes from it."""
        packed, upload = block_arrays(batch, self.config), self._target.upload
        step = PackedStep(packed.start, packed.length, packed.context, batch.table)
        proposal = self.propose(
            upload(packed.token_ids),
            upload(packed.positions),
            on_device(step, upload) if self._target.kernels.takes_device_step else step,
            upload(packed.rows),
        )
        return drafts_of(proposal)

    def propose(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: PackedStep | DeviceStep,
        pages: torch.Tensor,
    ) -> Proposal:
        """The pass alone. Reads nothing back from the device, so a graph can hold it.

        Args:
            ids: int64 [B * rows], of whole blocks.
            positions: int64 [B * rows].
            step: to which requests they belong.
            pages: int64 [B], the page of each request's token before its anchor.
        """
        embeddings = self._target.embed(ids)
        states = None if self._states is None else self._states[pages]
        hidden = self._block(embeddings, states, positions, step)
        anchors = ids.view(-1, self.config.block_size)[:, 0]
        walk = None if self._tiled is None else self._tiled.walk
        return self._net.propose_judged(hidden, anchors, self._head, self._token_ids, walk)

    def _block(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor | None,
        positions: torch.Tensor,
        step: PackedStep | DeviceStep,
    ) -> torch.Tensor:
        if self._tiled is not None:
            assert isinstance(step, PackedStep)
            return self._tiled.block(embeddings, states, positions, step)
        attends = self._target.kernels.attend

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attends(step, self._kv[layer], q, k, v, self._how[layer])

        rows = embeddings if states is None else self._net.rows(embeddings, states)
        return self._net.block(rows, *self._net.rotary(positions), attend)

    def absorb(
        self, step: PackedStep | DeviceStep, positions: torch.Tensor, features: torch.Tensor
    ) -> None:
        """See Drafter: the context K/V of every layer, from one fused feature per token."""
        kernels, upload = self._target.kernels, self._target.upload
        if kernels.takes_device_step and isinstance(step, PackedStep):
            step = on_device(step, upload)
        if self._states is not None:
            rows, pages = _last(step, upload, nobody=len(self._states) - 1)
            self._states[pages] = features[rows, -self.config.hidden_size :]
        if self._tiled is not None:
            assert isinstance(step, PackedStep)
            self._tiled.absorb(features, positions, step)
            return
        context = self._net.context(features)
        cos, sin = self._net.rotary(positions)
        for layer, kv in enumerate(self._kv):
            kernels.store(step, kv, *self._net.context_kv(layer, context, cos, sin))

    @torch.no_grad()
    def adopt(self, weights: DrafterWeights) -> None:
        """See Drafter. Written in place: projections that lie packed in memory stay so."""
        own = dict(self._net.named_parameters())
        problem = _misfit(own, weights.tensors)
        if problem is not None:
            raise ConfigError(f"version {weights.version} is not this drafter's: {problem}")
        for name, parameter in own.items():
            parameter.copy_(weights.tensors[name])
        if self._tiled is not None:
            self._tiled.refresh()
        if self._net.markov_head is not None:
            self._net.markov_head.keep_rows(self._token_ids)
        if self._target.device.type == "cuda":
            # Their memory may be given up as soon as this returns, by a thread with its own stream.
            torch.cuda.current_stream(self._target.device).synchronize()
        self.version = weights.version


def block_arrays(batch: DraftBatch, config: DrafterConfig) -> Packed:
    """The blocks of a batch, one behind the other; `rows` are pages, see `BlockDrafter.propose`."""
    num_requests, rows = len(batch.anchors), config.block_size
    ids = np.full((num_requests, rows), config.mask_token_id, dtype=np.int64)
    ids[:, 0] = batch.anchors
    lengths = np.full(num_requests, rows, dtype=np.int32)
    return Packed(
        token_ids=ids.reshape(-1),
        positions=(batch.positions.astype(np.int64)[:, None] + np.arange(rows)).reshape(-1),
        start=np.arange(0, num_requests * rows, rows, dtype=np.int32),
        length=lengths,
        context=batch.positions,
        rows=_pages(batch.table, batch.positions),
    )


def drafts_of(proposal: Proposal) -> list[Draft]:
    """Taken to the host."""
    token_ids = proposal.drafts.tolist()
    nothing = [None] * len(token_ids)
    survival = nothing if proposal.survival is None else proposal.survival.tolist()
    lengths = nothing if proposal.length is None else proposal.length.tolist()
    return [Draft(*each) for each in zip(token_ids, survival, lengths, strict=True)]


def _misfit(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> str | None:
    """How given weights differ in names or shapes, None if they do not."""
    if own.keys() != given.keys():
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        return f"it lacks {missing[0]}" if missing else f"it has {unknown[0]}, which is not known"
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            return f"{name} is {list(given[name].shape)} there, {list(tensor.shape)} here"
    return None


def _pages(table: Int32, ends: Int32) -> Int64:
    """The page of each request's token before position `ends` [B], which is above 0."""
    return table[np.arange(len(ends)), (ends - 1) // PAGE].astype(np.int64)


def _last(
    step: PackedStep | DeviceStep, upload: Upload, nobody: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each segment's last token, and its page; `nobody` for segments without tokens."""
    if isinstance(step, PackedStep):
        last = (step.start + step.length - 1).astype(np.int64)
        return upload(last), upload(_pages(step.table, step.context + step.length))
    is_there = step.length > 0
    pages = page_before(step.table, step.context + step.length)
    rows = (step.start + step.length - 1).long()
    return rows.where(is_there, 0), pages.where(is_there, nobody)
