"""Steps of a decoder on a device: one copy there, one launch, one small copy back.

# T packed tokens, R rows that choose, V vocabulary, M numbers that a drafter leaves
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from adaflash_batch.engine.accept import Emission
from adaflash_batch.engine.buckets import MOST_TOKENS, Buckets
from adaflash_batch.engine.graphs import Capturer, CudaCapturer, Graphs, graph_memory
from adaflash_batch.engine.marks import Marks, marks_of
from adaflash_batch.engine.packing import Int32, Packed
from adaflash_batch.engine.row_rules import MOST_ENDS, deciding, emission_of, is_left, num_ends
from adaflash_batch.engine.sampling import ChoiceBlock, decide
from adaflash_batch.engine.sizes import Sizes
from adaflash_batch.engine.step_buffers import Bucket, StepBuffers, StepInputs
from adaflash_batch.engine.target import Seen, Target
from adaflash_batch.kernels.accept import NUM_COUNTS, Emitted, Rows, accept_beside
from adaflash_batch.kernels.paged_attention import KVLayer


class _Outcome(NamedTuple):
    """What a pass leaves on the device. A graph's logits are in memory that all graphs share."""

    logits: torch.Tensor
    seen: Seen


class DevicePasses:
    """On tensors of a device that works while the host goes on.

    Args:
        target: whose kernels take a DeviceStep.
        kv: its memory.
        sizes: of the decoder.
        num_drafted: M; 0 where no drafter leaves anything.
        clock: seconds, for devices that have no events.
        capturer: of graphs; None makes none.

    Attributes:
        drafted: int32 [M], where a drafter leaves what the host is to know with the choices.
        emitted: by the last step, of requests in the order of its blocks.
        inputs: what the target read in it.
        graphs: kept passes.
        marks: of the device.
    """

    runs_ahead = True

    def __init__(
        self,
        target: Target,
        kv: list[KVLayer],
        sizes: Sizes,
        num_drafted: int,
        clock: Callable[[], float],
        capturer: Capturer | None,
    ) -> None:
        assert target.kernels.takes_device_step
        self._target, self._kv, self._device = target, kv, target.device
        self._buckets = Buckets(sizes.max_running, sizes.max_pages, sizes.widest)
        largest = self._buckets.largest(sizes.token_budget)
        self._buffers = StepBuffers(
            self._device, largest._replace(num_deciding=sizes.max_running, num_ends=MOST_ENDS)
        )
        self.graphs: Graphs[_Outcome] = Graphs(
            "the target's passes", capturer, max_bytes=graph_memory(self._device)
        )
        self.marks: Marks = marks_of(self._device, clock)
        self._back = _WayBack(self._device, num_drafted, largest.num_rows, sizes.widest)
        self.drafted, self.emitted = self._back.drafted, Emitted(self._back.emitted)
        self.inputs: StepInputs | None = None
        self._accept = accept_beside(target.kernels.kind)
        self._logits: torch.Tensor | None = None

    def begin(
        self, packed: Packed, table: Int32, blocks: Sequence[ChoiceBlock], sources: Int32
    ) -> _OnItsWay:
        """See Passes."""
        bucket, comes_again = self._bucket(packed, table, blocks)
        has_room = self._buffers.holds(bucket)
        buffers = self._buffers if has_room else StepBuffers(self._device, bucket)
        began = self.marks.mark()
        inputs = buffers.fill(bucket, packed, table, sources, deciding(blocks) if blocks else None)
        self.inputs = inputs
        if comes_again and has_room:
            key = (bucket, self._target.num_watched)
            outcome = self.graphs.run(key, lambda: self._run(inputs, keeps=True))
        else:
            outcome = self._run(inputs, keeps=False)
        self._target.show(outcome.seen)
        self._target.num_forward_tokens += len(packed.token_ids)
        numbers = self._back.send(len(blocks))
        logits = outcome.logits[: len(packed.rows)]
        return _OnItsWay(numbers, logits, blocks, self.marks, began, self.marks.mark())

    def _bucket(
        self, packed: Packed, table: Int32, blocks: Sequence[ChoiceBlock]
    ) -> tuple[Bucket, bool]:
        """See Buckets.of."""
        bucket, comes_again = self._buckets.of(packed, table)
        if not blocks:
            return bucket, comes_again
        count = bucket.num_segments if comes_again else len(blocks)
        return bucket._replace(num_deciding=count, num_ends=num_ends(blocks)), comes_again

    def _run(self, inputs: StepInputs, *, keeps: bool) -> _Outcome:
        """The pass and what it decides; `keeps` the logits where all graphs may write."""
        ids = inputs.token_ids
        if len(self.drafted):
            known = inputs.sources < 0
            ids = torch.where(known, ids, self.drafted[inputs.sources.clamp(min=0)])
        ids, rows = ids.long(), inputs.rows.long()
        logits = self._target.run(ids, inputs.positions.long(), inputs.step, self._kv, rows)
        if len(inputs.first):
            self._decide(logits, ids[(rows + 1).clamp(max=len(ids) - 1)], inputs)
        if keeps:
            shared = self._shared(logits)
            shared.copy_(logits)
            logits = shared
        return _Outcome(logits, self._target.seen())

    def _decide(self, logits: torch.Tensor, drafts: torch.Tensor, inputs: StepInputs) -> None:
        """Leave what is emitted where it is copied from; `drafts` are the tokens behind rows."""
        emitted = self._back.emitted[: len(inputs.first)]
        most = emitted.shape[1] - NUM_COUNTS
        rows = Rows(inputs.first, inputs.count, inputs.request, drafts, most)
        emitted.copy_(self._accept(logits, rows, inputs.rules).numbers)

    def _shared(self, logits: torch.Tensor) -> torch.Tensor:
        """Memory for logits of this shape, the same for all; made in the first pass, as it is."""
        if self._logits is None:
            self._logits = logits.new_empty(MOST_TOKENS, logits.shape[1])
        return self._logits[: len(logits)]


class _WayBack:
    """What the host wants of a step, side by side on the device, and the pinned memory it goes to.

    Two of the latter: the host may read one while the other is written.
    """

    def __init__(
        self, device: torch.device, num_drafted: int, num_requests: int, widest: int
    ) -> None:
        self._num_drafted, self._width = num_drafted, NUM_COUNTS + widest
        size = num_drafted + num_requests * self._width
        numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._numbers = numbers
        self.drafted = numbers[:num_drafted]
        self.emitted = numbers[num_drafted:].view(num_requests, self._width)
        is_pinned = device.type == "cuda"
        self._pinned = [
            torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned) for _ in range(2)
        ]
        self._turn = 0

    def send(self, num_requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(drafted, emitted) of the host: there when the device has come so far."""
        self._turn = 1 - self._turn
        pinned, end = self._pinned[self._turn], self._num_drafted + num_requests * self._width
        pinned[:end].copy_(self._numbers[:end], non_blocking=True)
        emitted = pinned[self._num_drafted : end].view(num_requests, self._width)
        return pinned[: self._num_drafted], emitted


class _OnItsWay:
    """See Pass."""

    def __init__(
        self,
        numbers: tuple[torch.Tensor, torch.Tensor],
        logits: torch.Tensor,
        blocks: Sequence[ChoiceBlock],
        marks: Marks,
        began: Any,
        ended: Any,
    ) -> None:
        self._drafted, self._emitted = numbers
        self._logits, self._blocks = logits, blocks
        self._marks, self._began, self._ended = marks, began, ended

    def drafted(self) -> list[int]:
        """What a drafter left before the pass; waits for it."""
        self._marks.wait(self._ended)
        numbers: list[int] = self._drafted.tolist()
        return numbers

    def land(self) -> list[Emission]:
        """See Pass."""
        self._marks.wait(self._ended)
        emissions, row = [], 0
        for block, numbers in zip(self._blocks, self._emitted.tolist(), strict=True):
            rows = slice(row, row + block.num_rows)
            own = decide(self._logits[rows], [block]) if is_left(block) else [emission_of(numbers)]
            emissions += own
            row += block.num_rows
        return emissions

    @property
    def seconds(self) -> float:
        """See Pass."""
        return self._marks.seconds(self._began, self._ended)


def device_capturer(device: torch.device) -> Capturer | None:
    """What makes graphs there; None where there are none."""
    return CudaCapturer(device) if device.type == "cuda" else None
