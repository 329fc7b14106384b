"""A block drafter on a device: its pass from a graph, its drafts left where the target reads them.

# B requests, N drafts of a block, M numbers that drafts leave
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from adaflash_batch.drafter.length import Proposal
from adaflash_batch.engine.buckets import pages_of, tokens_of
from adaflash_batch.engine.drafting import (
    BlockDrafter,
    Draft,
    DraftBatch,
    block_arrays,
    drafts_of,
)
from adaflash_batch.engine.graphs import Capturer, Graphs, graph_memory
from adaflash_batch.engine.marks import Marks
from adaflash_batch.engine.sizes import Sizes
from adaflash_batch.engine.step_buffers import Bucket, StepBuffers, StepInputs
from adaflash_batch.exchange import DrafterWeights
from adaflash_batch.kernels.device_step import power_of_two
from adaflash_batch.kernels.paged_attention import PackedStep


class LateDrafter(Protocol):
    """A drafter whose drafts the host learns with the target's choices (`Draft.place`)."""

    def settle(self, drafted: list[int]) -> None:
        """The host knows now what was left on the device: write it into the drafts."""

    def take_seconds(self) -> list[tuple[int, float]]:
        """(requests, seconds) of drafts made since it was last asked; waits for the last."""


def _on_host(proposal: Proposal, num_requests: int) -> Proposal:
    """That of the first requests, in one copy."""
    survival, length = proposal.survival, proposal.length
    parts = [proposal.drafts] if survival is None else [proposal.drafts, survival]
    # float64 has room for every token id.
    columns = [part.double() for part in (*parts, *([] if length is None else [length[:, None]]))]
    there = torch.cat(columns, dim=1)[:num_requests].cpu()
    num_drafts = proposal.drafts.shape[1]
    return Proposal(
        drafts=there[:, :num_drafts].long(),
        survival=None if survival is None else there[:, num_drafts : 2 * num_drafts].float(),
        length=None if length is None else there[:, -1].float(),
    )


class DeviceDrafter:
    """See Drafter and LateDrafter.

    Where the net has a head that says how far its drafts are right, the host waits for what it
    says; where it has none, drafts go straight to the target's pass.

    Args:
        blocks: the drafter, on the device.
        sizes: of the decoder.
        drafted: int32 [M], M = max_running * N: where drafts are left.
        marks: of the device.
        capturer: of graphs; None makes none.
    """

    def __init__(
        self,
        blocks: BlockDrafter,
        sizes: Sizes,
        drafted: torch.Tensor,
        marks: Marks,
        capturer: Capturer | None,
    ) -> None:
        self.version, self.block_size = blocks.version, blocks.block_size
        self.tapped_layers = blocks.tapped_layers
        self._blocks, self._sizes = blocks, sizes
        self._drafted, self._marks = drafted, marks
        self._is_late = not blocks.config.length_head and not blocks.config.enable_confidence_head
        self._graphs: Graphs[Proposal] = Graphs(
            capturer, max_bytes=graph_memory(blocks.target.device)
        )
        self._buffers = StepBuffers(
            blocks.target.device, self._bucket(sizes.max_running, sizes.max_pages)
        )
        self._unknown: list[Draft] = []
        self._timed: list[tuple[int, Any, Any]] = []

    def draft(self, batch: DraftBatch) -> list[Draft]:
        """See Drafter."""
        assert len(batch.anchors) <= self._sizes.max_running
        began, num_requests = self._marks.mark(), len(batch.anchors)
        packed = block_arrays(batch, self._blocks.config)
        bucket = self._bucket(tokens_of(num_requests), batch.table.shape[1])
        inputs = self._buffers.fill(bucket, packed, batch.table)
        proposal = self._graphs.run(bucket, lambda: self._run(inputs))
        self._timed.append((num_requests, began, self._marks.mark()))
        if not self._is_late:
            return drafts_of(_on_host(proposal, num_requests))
        num_drafts = self.block_size - 1
        self._unknown = [
            Draft([0] * num_drafts, place=index * num_drafts) for index in range(num_requests)
        ]
        return list(self._unknown)

    def _bucket(self, num_requests: int, num_pages: int) -> Bucket:
        rows, count = self._blocks.config.block_size, min(num_requests, self._sizes.max_running)
        pages = pages_of(num_pages, self._sizes.max_pages)
        return Bucket(count * rows, count, count, power_of_two(rows), pages)

    def _run(self, inputs: StepInputs) -> Proposal:
        proposal = self._blocks.propose(
            inputs.token_ids.long(), inputs.positions.long(), inputs.step, inputs.rows.long()
        )
        if self._is_late:
            self._drafted[: proposal.drafts.numel()].copy_(proposal.drafts.flatten())
        return proposal

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
