"""Steps of a decoder on a device: one copy there, one launch, one small copy back.

# T packed tokens, R rows that choose, V vocabulary, M numbers that a drafter leaves
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from adaflash_batch.engine.buckets import MOST_TOKENS, Buckets
from adaflash_batch.engine.graphs import Capturer, CudaCapturer, Graphs, graph_memory
from adaflash_batch.engine.marks import Marks, marks_of
from adaflash_batch.engine.packing import Int32, Packed
from adaflash_batch.engine.row_rules import choose_rows, is_drawn
from adaflash_batch.engine.sampling import ChoiceBlock, choose_others
from adaflash_batch.engine.step_buffers import StepBuffers, StepInputs
from adaflash_batch.engine.target import Seen, Target
from adaflash_batch.kernels.paged_attention import KVLayer

UNSOUND = -1
"""In place of a choice: the logits were not finite."""


class _Outcome(NamedTuple):
    """What a pass leaves on the device. A graph's logits are in memory that all graphs share."""

    logits: torch.Tensor
    seen: Seen


class DevicePasses:
    """On tensors of a device that works while the host goes on.

    Args:
        target: whose kernels take a DeviceStep.
        kv: its memory.
        max_running: requests in a step.
        token_budget: tokens in a step.
        max_pages: of a request.
        widest: tokens of a request that decodes, its drafts included.
        num_drafted: M; 0 where no drafter leaves anything.
        clock: seconds, for devices that have no events.
        capturer: of graphs; None makes none.

    Attributes:
        drafted: int32 [M], where a drafter leaves what the host is to know with the choices.
        graphs: kept passes.
        marks: of the device.
        capturer: a drafter's graphs share its memory.
    """

    runs_ahead = True

    def __init__(
        self,
        target: Target,
        kv: list[KVLayer],
        *,
        max_running: int,
        token_budget: int,
        max_pages: int,
        widest: int,
        num_drafted: int = 0,
        clock: Callable[[], float],
        capturer: Capturer | None,
    ) -> None:
        assert target.kernels.takes_device_step
        self._target, self._kv, self._device = target, kv, target.device
        self._buckets = Buckets(max_running, max_pages, widest)
        largest = self._buckets.largest(token_budget)
        self._buffers = StepBuffers(self._device, largest)
        self.graphs: Graphs[_Outcome] = Graphs(capturer, max_bytes=graph_memory(self._device))
        self.marks: Marks = marks_of(self._device, clock)
        self._back = _WayBack(self._device, num_drafted, largest.num_rows)
        self.drafted = self._back.drafted
        self._logits: torch.Tensor | None = None
        self.capturer = capturer

    def begin(
        self, packed: Packed, table: Int32, blocks: Sequence[ChoiceBlock], sources: Int32
    ) -> _OnItsWay:
        """See Passes."""
        bucket, comes_again = self._buckets.of(packed, table)
        has_room = self._buffers.holds(bucket)
        buffers = self._buffers if has_room else StepBuffers(self._device, bucket)
        began = self.marks.mark()
        inputs = buffers.fill(bucket, packed, table, sources)
        if comes_again and has_room:
            key = (bucket, self._target.num_watched)
            outcome = self.graphs.run(key, lambda: self._run(inputs, keeps=True))
        else:
            outcome = self._run(inputs, keeps=False)
        self._target.show(outcome.seen)
        self._target.num_forward_tokens += len(packed.token_ids)
        logits = outcome.logits[: len(packed.rows)]
        if any(map(is_drawn, blocks)):
            chosen = choose_rows(logits, blocks, self._target.upload)
            self._back.chosen[: len(chosen)].copy_(chosen)
        numbers = self._back.send(len(packed.rows))
        return _OnItsWay(numbers, logits, blocks, self.marks, began, self.marks.mark())

    def _run(self, inputs: StepInputs, *, keeps: bool) -> _Outcome:
        """The pass and the likeliest tokens; `keeps` the logits where all graphs may write."""
        ids = inputs.token_ids
        if len(self.drafted):
            known = inputs.sources < 0
            ids = torch.where(known, ids, self.drafted[inputs.sources.clamp(min=0)])
        logits = self._target.run(
            ids.long(), inputs.positions.long(), inputs.step, self._kv, inputs.rows.long()
        )
        highest, indices = logits.max(-1)  # NaN wins, so it shows
        best = torch.where(torch.isfinite(highest), indices, UNSOUND)
        self._back.chosen[: len(best)].copy_(best)
        if keeps:
            shared = self._shared(logits)
            shared.copy_(logits)
            logits = shared
        return _Outcome(logits, self._target.seen())

    def _shared(self, logits: torch.Tensor) -> torch.Tensor:
        """Memory for logits of this shape, the same for all; made in the first pass, as it is."""
        if self._logits is None:
            self._logits = logits.new_empty(MOST_TOKENS, logits.shape[1])
        return self._logits[: len(logits)]


class _WayBack:
    """What the host wants of a step, side by side on the device, and the pinned memory it goes to.

    Two of the latter: the host may read one while the other is written.
    """

    def __init__(self, device: torch.device, num_drafted: int, num_rows: int) -> None:
        size = num_drafted + num_rows
        numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._numbers, self._num_drafted = numbers, num_drafted
        self.drafted, self.chosen = numbers[:num_drafted], numbers[num_drafted:]
        is_pinned = device.type == "cuda"
        self._pinned = [
            torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned) for _ in range(2)
        ]
        self._turn = 0

    def send(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(drafted, chosen) of the host: there when the device has come so far."""
        self._turn = 1 - self._turn
        pinned, end = self._pinned[self._turn], self._num_drafted + num_rows
        pinned[:end].copy_(self._numbers[:end], non_blocking=True)
        return pinned[: self._num_drafted], pinned[self._num_drafted : end]


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
        self._drafted, self._chosen = numbers
        self._logits, self._blocks = logits, blocks
        self._marks, self._began, self._ended = marks, began, ended

    def drafted(self) -> list[int]:
        """What a drafter left before the pass; waits for it."""
        self._marks.wait(self._ended)
        numbers: list[int] = self._drafted.tolist()
        return numbers

    def land(self) -> tuple[list[int], list[bool]]:
        """See Pass."""
        self._marks.wait(self._ended)
        choices: list[int] = self._chosen.tolist()
        sound = [choice != UNSOUND for choice in choices]
        choose_others(self._logits, self._blocks, choices, _is_left)
        return choices, sound

    @property
    def seconds(self) -> float:
        """See Pass."""
        return self._marks.seconds(self._began, self._ended)


def _is_left(block: ChoiceBlock) -> bool:
    """Whether the host must see to it: its logits depend on what the text has so far."""
    return block.sampling.reshapes_logits


def device_capturer(device: torch.device) -> Capturer | None:
    """What makes graphs there; None where there are none."""
    return CudaCapturer(device) if device.type == "cuda" else None
