"""Where the packed tokens of one step belong, as tensors of static size on a device.

# T packed tokens (a bucket), S segments (a bucket), P pages a request
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from adaflash_batch.kernels.paged_attention import Int32, PackedStep

NO_SEGMENT = -1
"""In `segment_of`: the token is padding."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What `paged_attention.PackedStep` says, for kernels whose launch must not depend on it.

    Segment s is `length[s]` consecutive tokens of one request: rows start[s].. of the packed
    tensors, positions context[s].. of the request, whose pages are table[s]. The sizes are those of
    buckets: what lies behind the step's own segments and tokens is padding. So the same launch
    serves every step of a bucket, also from a CUDA graph, while the tensors are written anew.

    A segment of length 0 is padding, whatever its other numbers. A token whose `segment_of` is
    NO_SEGMENT is padding: its keys and values go nowhere, its output may be anything, NaN included,
    and is never read.

    Attributes:
        start, length, context: int32 [S].
        table: int32 [S, P] page numbers, contiguous.
        segment_of: int32 [T], the segment of each packed token.
        num_tokens: T, the packed tensors' rows.
        max_length: no segment is longer; of a bucket, for it chooses the kernel.
        max_context: no segment's context + length is larger; it only sizes the grid.
    """

    start: torch.Tensor
    length: torch.Tensor
    context: torch.Tensor
    table: torch.Tensor
    segment_of: torch.Tensor
    num_tokens: int
    max_length: int
    max_context: int


def on_device(step: PackedStep, upload: Callable[[Int32], torch.Tensor]) -> DeviceStep:
    """The same step on a device, without padding.

    Args:
        step: whose segments are one behind the other.
        upload: takes an array there.
    """
    num_segments, num_tokens = len(step.start), int(step.length.sum())
    segment_of = np.repeat(np.arange(num_segments, dtype=np.int32), step.length)
    columns = (step.start, step.length, step.context, step.table, segment_of)
    start, length, context, table, segments = map(upload, columns)
    return DeviceStep(
        *(start, length, context, table, segments),
        num_tokens=num_tokens,
        max_length=power_of_two(int(step.length.max())),
        max_context=int((step.context + step.length).max()),
    )


def power_of_two(count: int) -> int:
    """The first that is not below `count`, which is above 0."""
    return 1 << (count - 1).bit_length()
