"""A step's numbers in memory that stays where it is, so that a graph of a pass can be run again.

# T packed tokens, R rows that choose, S segments, P pages a request: all of a bucket
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from adaflash_batch.engine.packing import Int32, Int64, Packed
from adaflash_batch.kernels.device_step import NO_SEGMENT, DeviceStep, power_of_two
from adaflash_batch.kernels.page_size import PAGE

# Numbers between the beginnings of two arrays are a multiple of this: 128 bytes.
_ALIGNMENT = 32
# Steps whose numbers may be on their way at once.
_IN_FLIGHT = 2
ALL_KNOWN: Int32 = np.empty(0, dtype=np.int32)
"""The `sources` of a step whose tokens the host knows."""


class Bucket(NamedTuple):
    """The sizes of a step that a pass depends on.

    max_length: as in DeviceStep.
    num_pages: P; no context is longer than its pages.
    """

    num_tokens: int
    num_rows: int
    num_segments: int
    max_length: int
    num_pages: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each array, in the order of `StepInputs.of`."""
        segments = (self.num_segments,) * 3
        tokens = (self.num_tokens,) * 4
        return (*tokens, self.num_rows, *segments, self.num_segments * self.num_pages)


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
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    rows: torch.Tensor
    step: DeviceStep

    @staticmethod
    def of(numbers: torch.Tensor, bucket: Bucket) -> StepInputs:
        """Views of one array of int32."""
        ids, positions, segment_of, sources, rows, start, length, context, table = (
            numbers[begin : begin + size]
            for begin, size in zip(_begins(bucket), bucket.sizes, strict=True)
        )
        step = DeviceStep(
            *(start, length, context, table.view(bucket.num_segments, bucket.num_pages)),
            segment_of=segment_of,
            num_tokens=bucket.num_tokens,
            max_length=bucket.max_length,
            max_context=bucket.num_pages * PAGE,
        )
        return StepInputs(ids, positions, sources, rows, step)


class StepBuffers:
    """One array on the device, and two pinned ones whence it is filled in turns.

    Args:
        device: where passes run.
        most: the largest bucket in every size; a larger one gets memory of its own size.
    """

    def __init__(self, device: torch.device, most: Bucket) -> None:
        self._device_type = device.type
        size = _end(most)
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = [self._pinned(size) for _ in range(_IN_FLIGHT)]
        self._turn = 0
        self._inputs: dict[Bucket, StepInputs] = {}

    def _pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._device_type == "cuda")

    def holds(self, bucket: Bucket) -> bool:
        """Whether there is room."""
        return _end(bucket) <= len(self._on_device)

    def fill(
        self, bucket: Bucket, packed: Packed, table: Int32, sources: Int32 = ALL_KNOWN
    ) -> StepInputs:
        """Write a step and send it on its way; the host does not wait.

        The step before the last must have been read by the device: its memory is used again.

        Args:
            bucket: for which `holds` is true.
            table: int32 [segments of the step, up to P].
            sources: see StepInputs.
        """
        end, self._turn = _end(bucket), (self._turn + 1) % _IN_FLIGHT
        staged = self._staged[self._turn]
        _write(staged.numpy()[:end], bucket, packed, table, sources)
        self._on_device[:end].copy_(staged[:end], non_blocking=True)
        return self.inputs(bucket)

    def inputs(self, bucket: Bucket) -> StepInputs:
        """Where the numbers of such a step are; always the same tensors."""
        found = self._inputs.get(bucket)
        if found is None:
            found = self._inputs[bucket] = StepInputs.of(self._on_device, bucket)
        return found


def _write(numbers: Int32, bucket: Bucket, packed: Packed, table: Int32, sources: Int32) -> None:
    views = [
        numbers[begin : begin + size]
        for begin, size in zip(_begins(bucket), bucket.sizes, strict=True)
    ]
    num_segments = np.arange(len(packed.start), dtype=np.int32)
    columns: list[Int32 | Int64] = [
        *(packed.token_ids, packed.positions, np.repeat(num_segments, packed.length), sources),
        *(packed.rows, packed.start, packed.length, packed.context),
    ]
    fillings = (0, 0, NO_SEGMENT, -1, 0, 0, 0, 0)
    for view, column, filling in zip(views, columns, fillings, strict=False):
        view[: len(column)] = column
        view[len(column) :] = filling
    pages = views[-1].reshape(bucket.num_segments, bucket.num_pages)
    pages[:] = 0
    pages[: len(table), : table.shape[1]] = table


def _begins(bucket: Bucket) -> list[int]:
    ends = [0]
    for size in bucket.sizes:
        ends.append(ends[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return ends[:-1]


def _end(bucket: Bucket) -> int:
    return _begins(bucket)[-1] + bucket.sizes[-1]
