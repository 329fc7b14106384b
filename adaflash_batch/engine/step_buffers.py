"""A step's numbers in memory that stays where it is, so that a graph of a pass can be run again.

# T packed tokens, R rows that choose, S segments, P pages a request, D requests that choose,
# E tokens that end a text: all of a bucket
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from adaflash_batch.engine.packing import Int32, Int64, Packed
from adaflash_batch.engine.row_rules import Deciding
from adaflash_batch.kernels.accept import NOBODY, NUM_FLOATS, NUM_INTEGERS, Rules
from adaflash_batch.kernels.device_step import NO_SEGMENT, DeviceStep, power_of_two
from adaflash_batch.kernels.page_size import PAGE

# Numbers between the beginnings of two arrays are a multiple of this: 128 bytes.
_ALIGNMENT = 32
# Which of a bucket's arrays the page table is.
_TABLE = 8
ALL_KNOWN: Int32 = np.empty(0, dtype=np.int32)
"""The `sources` of a step whose tokens the host knows."""


class Bucket(NamedTuple):
    """The sizes of a step that a pass depends on.

    max_length: as in DeviceStep.
    num_pages: P; no context is longer than its pages.
    num_deciding, num_ends: D and E; none where nothing is decided on the device.
    """

    num_tokens: int
    num_rows: int
    num_segments: int
    max_length: int
    num_pages: int
    num_deciding: int = 0
    num_ends: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of four bytes in each array, in the order of `StepInputs.of`."""
        segments = (self.num_segments,) * 3
        tokens = (self.num_tokens,) * 4
        table = self.num_segments * self.num_pages
        return (*tokens, self.num_rows, *segments, table, *self._deciding_sizes)

    @property
    def _deciding_sizes(self) -> tuple[int, ...]:
        count = self.num_deciding
        rows = self.num_rows if count else 0
        return (
            count,
            count,
            rows,
            2 * count * NUM_FLOATS,
            2 * count * (NUM_INTEGERS + self.num_ends),
        )


def exact_bucket(packed: Packed, num_pages: int) -> Bucket:
    """Sizes without padding."""
    return Bucket(
        num_tokens=len(packed.token_ids),
        num_rows=len(packed.rows),
        num_segments=len(packed.start),
        max_length=power_of_two(int(packed.length.max())),
        num_pages=num_pages,
    )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a pass reads, on the device.

    Attributes:
        token_ids, positions: int32 [T]; padding has 0.
        sources: int32 [T], where in the last drafts a token comes from; -1 for the token itself.
        rows: int32 [R]; padding has 0.
        step: how the tokens belong to requests.
        first, count, request, rules: see kernels.accept.Rows and Rules; of D requests and R rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    rows: torch.Tensor
    step: DeviceStep
    first: torch.Tensor
    count: torch.Tensor
    request: torch.Tensor
    rules: Rules

    @staticmethod
    def of(numbers: torch.Tensor, bucket: Bucket) -> StepInputs:
        """Views of one array of int32."""
        ids, positions, segment_of, sources, rows, start, length, context, table, *more = (
            numbers[begin : begin + size]
            for begin, size in zip(_begins(bucket), bucket.sizes, strict=True)
        )
        first, count, request, floats, integers = more
        step = DeviceStep(
            *(start, length, context, table.view(bucket.num_segments, bucket.num_pages)),
            segment_of=segment_of,
            num_tokens=bucket.num_tokens,
            max_length=bucket.max_length,
            max_context=bucket.num_pages * PAGE,
        )
        rules = Rules(
            floats.view(torch.float64).view(-1, NUM_FLOATS),
            integers.view(torch.int64).view(-1, NUM_INTEGERS + bucket.num_ends),
        )
        return StepInputs(ids, positions, sources, rows, step, first, count, request, rules)


class StepBuffers:
    """One array on the device, and pinned ones whence it is filled in turns.

    Args:
        device: where passes run.
        most: the largest bucket in every size; a larger one gets memory of its own size.
        num_in_flight: the latter, of which so many may be on their way at once.
    """

    def __init__(self, device: torch.device, most: Bucket, num_in_flight: int = 2) -> None:
        self._device_type = device.type
        size = _end(most)
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = [self._pinned(size) for _ in range(num_in_flight)]
        self._turn = 0
        self._inputs: dict[Bucket, StepInputs] = {}

    def _pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._device_type == "cuda")

    def holds(self, bucket: Bucket) -> bool:
        """Whether there is room."""
        return _end(bucket) <= len(self._on_device)

    def fill(
        self,
        bucket: Bucket,
        packed: Packed,
        table: Int32,
        sources: Int32 = ALL_KNOWN,
        deciding: Deciding | None = None,
    ) -> StepInputs:
        """Write a step and send it on its way; the host does not wait.

        What was filled `num_in_flight` calls ago must have been read by the device: its memory is
        used again.

        Args:
            bucket: for which `holds` is true.
            table: int32 [segments of the step, up to P].
            sources: see StepInputs.
            deciding: of up to D requests; None where there are none.
        """
        end, self._turn = _end(bucket), (self._turn + 1) % len(self._staged)
        staged = self._staged[self._turn]
        _write(staged.numpy()[:end], bucket, packed, table, sources, deciding)
        self._on_device[:end].copy_(staged[:end], non_blocking=True)
        return self.inputs(bucket)

    def inputs(self, bucket: Bucket) -> StepInputs:
        """Where the numbers of such a step are; always the same tensors."""
        found = self._inputs.get(bucket)
        if found is None:
            found = self._inputs[bucket] = StepInputs.of(self._on_device, bucket)
        return found


def _write(
    numbers: Int32,
    bucket: Bucket,
    packed: Packed,
    table: Int32,
    sources: Int32,
    deciding: Deciding | None,
) -> None:
    views = [
        numbers[begin : begin + size]
        for begin, size in zip(_begins(bucket), bucket.sizes, strict=True)
    ]
    pages = views.pop(_TABLE).reshape(bucket.num_segments, bucket.num_pages)
    pages[:] = 0
    pages[: len(table), : table.shape[1]] = table
    num_segments = np.arange(len(packed.start), dtype=np.int32)
    columns: list[Int32 | Int64] = [
        *(packed.token_ids, packed.positions, np.repeat(num_segments, packed.length), sources),
        *(packed.rows, packed.start, packed.length, packed.context),
    ]
    fillings = [0, 0, NO_SEGMENT, -1, 0, 0, 0, 0]
    if deciding is not None:
        columns += [deciding.first, deciding.count, deciding.request]
        bits = (deciding.floats.view(np.int32), deciding.integers.view(np.int32))
        columns += [each.reshape(-1) for each in bits]
        fillings += [0, 0, NOBODY, 0, 0]
    for view, column, filling in zip(views, columns, fillings, strict=False):
        view[: len(column)] = column
        view[len(column) :] = filling


def _begins(bucket: Bucket) -> list[int]:
    ends = [0]
    for size in bucket.sizes:
        ends.append(ends[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return ends[:-1]


def _end(bucket: Bucket) -> int:
    return _begins(bucket)[-1] + bucket.sizes[-1]
