"""A block drafter on a device: its pass from a graph, its drafts left where the target reads them.

# B requests, N drafts of a block, M numbers that drafts leave
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from adaflash_batch.drafter.length import Proposal
from adaflash_batch.engine.buckets import pages_of, tokens_of
from adaflash_batch.engine.device_context import moved, staying
from adaflash_batch.engine.drafting import (
    BlockDrafter,
    Draft,
    DraftBatch,
    block_arrays,
    drafts_of,
)
from adaflash_batch.engine.graphs import Capturer, Graphs, graph_memory
from adaflash_batch.engine.marks import Marks
from adaflash_batch.engine.packing import Int32
from adaflash_batch.engine.sizes import Sizes
from adaflash_batch.engine.step_buffers import ALL_KNOWN, Bucket, StepBuffers, StepInputs
from adaflash_batch.exchange import DrafterWeights
from adaflash_batch.kernels.accept import Emitted
from adaflash_batch.kernels.device_step import power_of_two
from adaflash_batch.kernels.paged_attention import PackedStep


class LateDrafter(Protocol):
    """A drafter whose drafts the host learns with the target's choices (`Draft.place`)."""

    def settle(self, drafted: list[int]) -> None:
        """The host knows now what was left on the device: write it into the drafts."""

    def take_seconds(self) -> list[tuple[int, float]]:
        """(requests, seconds) of drafts since it was last asked, for what became of them is known.

        Waits for the last. Of those that were made ahead, requests that took theirs count.
        """


@dataclass(frozen=True, slots=True)
class Made:
    """A batch of drafts that was begun.

    Attributes:
        num_requests: that it is for.
        began, ended: marks.
        left: drafts that stay on the device; None where a head judges them.
        said: what such a head said, on its way to the host; None where none does.
    """

    num_requests: int
    began: Any
    ended: Any
    left: list[Draft] | None
    said: Said | None


class Said(NamedTuple):
    """Drafts, survivals and lengths side by side, as far as there are any; and of which width."""

    numbers: torch.Tensor
    num_drafts: int
    has_survival: bool

    @staticmethod
    def by(proposal: Proposal, num_requests: int) -> Said:
        """On its way to the host in one copy: there when the device has come so far."""
        survival, length = proposal.survival, proposal.length
        parts = [proposal.drafts] if survival is None else [proposal.drafts, survival]
        parts += [] if length is None else [length[:, None]]
        # float64 has room for every token id.
        there = torch.cat([part.double() for part in parts], dim=1)[:num_requests]
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
        here.copy_(there, non_blocking=True)
        return Said(here, proposal.drafts.shape[1], survival is not None)

    @property
    def proposal(self) -> Proposal:
        """Once it is there."""
        count = self.num_drafts
        drafts, survival, length = self.numbers.tensor_split((count, 2 * count), dim=1)
        if not self.has_survival:
            survival, length = survival[:, :0], survival
        return Proposal(
            drafts=drafts.long(),
            survival=survival.float() if self.has_survival else None,
            length=length[:, -1].float() if length.shape[1] else None,
        )


class DeviceDrafter:
    """See Drafter and LateDrafter.

    Where the net has a head that says how far its drafts are right, the host waits for what it
    says; where it has none, drafts go straight to the target's pass.

    Args:
        blocks: the drafter, on the device.
        sizes: of the decoder.
        drafted: int32 [M], M = 2 * max_running * N: where drafts are left, in its second half those
            that were made ahead.
        emitted: by the last step of the target, wherever the decoder has that.
        marks: of the device.
        capturer: of graphs, which are replayed while the target's results are still wanted: none
            that the target's graphs share memory with. None makes none.

    Attributes:
        graphs: kept passes.
    """

    def __init__(
        self,
        blocks: BlockDrafter,
        sizes: Sizes,
        drafted: torch.Tensor,
        emitted: Emitted,
        marks: Marks,
        capturer: Capturer | None,
    ) -> None:
        self.version, self.block_size = blocks.version, blocks.block_size
        self.tapped_layers = blocks.tapped_layers
        self._blocks, self._sizes = blocks, sizes
        self._drafted, self._emitted, self._marks = drafted, emitted, marks
        self._is_late = not blocks.config.length_head and not blocks.config.enable_confidence_head
        self.graphs: Graphs[Proposal] = Graphs(
            "the drafter's passes", capturer, max_bytes=graph_memory(blocks.target.device)
        )
        # A step's own drafts and those ahead of the next; the step before may not have landed.
        largest = self._bucket(sizes.max_running, sizes.max_pages)
        self._buffers = StepBuffers(blocks.target.device, largest, num_in_flight=4)
        self._unknown: list[Draft] = []
        self._timed: list[tuple[int, Any, Any]] = []

    def draft(self, batch: DraftBatch) -> list[Draft]:
        """See Drafter."""
        made = self._begin(batch, *self._fill(batch, ALL_KNOWN), begins=0)
        self.note(made, made.num_requests)
        drafts = self.known(made)
        self.expect(drafts)
        return drafts

    def draft_ahead(
        self, batch: DraftBatch, whose: Int32, step: StepInputs, features: torch.Tensor
    ) -> Made:
        """Draft behind a step of the target that the host does not know the outcome of.

        What the target saw of tokens that stay is absorbed first.

        Args:
            batch: its anchors are not looked at, its positions are those of the step's anchors.
            whose: segment of each request in that step, which was the last.
            step: what the target read in it.
            features: of its first tokens, those of these requests among them.
        """
        bucket, inputs = self._fill(batch, whose)
        stay = staying(step.step, inputs.sources[: len(whose)], self._emitted, len(features))
        self._blocks.absorb(stay, step.positions[: len(features)].long(), features)
        return self._begin(batch, bucket, inputs, begins=len(self._drafted) // 2)

    def _fill(self, batch: DraftBatch, whose: Int32) -> tuple[Bucket, StepInputs]:
        assert len(batch.anchors) <= self._sizes.max_running
        packed = block_arrays(batch, self._blocks.config)
        bucket = self._bucket(tokens_of(len(batch.anchors)), batch.table.shape[1])
        return bucket, self._buffers.fill(bucket, packed, batch.table, whose)

    def _begin(self, batch: DraftBatch, bucket: Bucket, inputs: StepInputs, begins: int) -> Made:
        """Launch the pass; drafts that stay are left from place `begins` on."""
        began, num_requests = self._marks.mark(), len(batch.anchors)
        proposal = self.graphs.run(bucket, lambda: self._run(inputs))
        if not self._is_late:
            said = Said.by(proposal, num_requests)
            return Made(num_requests, began, self._marks.mark(), None, said)
        drafts = proposal.drafts.flatten()
        self._drafted[begins : begins + len(drafts)].copy_(drafts)
        num_drafts = self.block_size - 1
        left = [Draft([0] * num_drafts, place=begins + i * num_drafts) for i in range(num_requests)]
        return Made(num_requests, began, self._marks.mark(), left, None)

    def known(self, made: Made) -> list[Draft]:
        """A batch's drafts; waits for what a head says of them."""
        if made.said is None:
            assert made.left is not None
            return made.left
        self._marks.wait(made.ended)
        return drafts_of(made.said.proposal)

    def expect(self, drafts: Sequence[Draft]) -> None:
        """These are wanted: the host learns them with what the target says of them."""
        self._unknown += [draft for draft in drafts if draft.place is not None]

    def note(self, made: Made, num_used: int) -> None:
        """What a batch took was taken for so many requests."""
        self._timed.append((num_used, made.began, made.ended))

    def _bucket(self, num_requests: int, num_pages: int) -> Bucket:
        rows, count = self._blocks.config.block_size, min(num_requests, self._sizes.max_running)
        pages = pages_of(num_pages, self._sizes.max_pages)
        return Bucket(count * rows, count, count, power_of_two(rows), pages)

    def _run(self, inputs: StepInputs) -> Proposal:
        blocks = moved(inputs, self._emitted)
        return self._blocks.propose(
            blocks.token_ids.long(), blocks.positions.long(), blocks.step, blocks.rows.long()
        )

    def settle(self, drafted: list[int]) -> None:
        """See LateDrafter."""
        for draft in self._unknown:
            assert draft.place is not None
            draft.token_ids[:] = drafted[draft.place : draft.place + len(draft.token_ids)]
        self._unknown = []

    def take_seconds(self) -> list[tuple[int, float]]:
        """See LateDrafter."""
        timed, self._timed = self._timed, []
        for *_, end in timed[-1:]:
            self._marks.wait(end)
        return [(count, self._marks.seconds(*both)) for count, *both in timed]

    def absorb(self, step: PackedStep, positions: torch.Tensor, features: torch.Tensor) -> None:
        """See Drafter."""
        self._blocks.absorb(step, positions, features)

    def adopt(self, weights: DrafterWeights) -> None:
        """See Drafter. In place, behind what was launched and before what will be."""
        self._blocks.adopt(weights)
        self.version = weights.version
