"""Where the packed tokens of one step belong, as tensors of static size on a device.

# T packed tokens (a bucket), S segments (a bucket), P pages a request
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
