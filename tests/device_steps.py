"""Layouts of packed tokens for kernels on a device: shuffled, padded, on poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adaflash_batch.kernels.device_step import NO_SEGMENT, DeviceStep
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import KVLayer, PackedStep, store_kv_reference

NOWHERE = 10**6
"""A page that is not there."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A step in both forms, and what is attended to.

    Attributes:
        device: with segments of length 0 and tokens of no segment.
        packed: the same without them.
        rows: the packed tokens that are in a segment, in the order of the segments.
        kv: the contexts are stored; every slot that nobody wrote holds NaN.
        q, k, v: [T, H or G, D] of all tokens, NaN where there is padding.
    """

    device: DeviceStep
    packed: PackedStep
    rows: torch.Tensor
    kv: KVLayer
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def layout(
    segments: Sequence[tuple[int, int]],  # context, length
    heads: tuple[int, int] = (2, 1),
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    *,
    padding: int = 0,
    seed: int = 0,
) -> Layout:
    """Segments on shuffled pages and shuffled places among the packed tokens."""
    draw = np.random.default_rng(seed)
    context, length = (np.array(each, dtype=np.int32) for each in zip(*segments, strict=True))
    used = length > 0
    start = np.full(len(segments), NOWHERE, dtype=np.int32)
    segment_of = np.full(int(length.sum()) + padding, NO_SEGMENT, dtype=np.int32)
    end = 0
    for segment in draw.permutation(len(segments)):
        if used[segment]:
            start[segment], end = end, end + length[segment]
            segment_of[start[segment] : end] = segment
    table, num_pages = _table(context + length, used, draw)
    device = DeviceStep(
        start=torch.from_numpy(start),
        length=torch.from_numpy(length),
        context=torch.from_numpy(context),
        table=torch.from_numpy(table),
        segment_of=torch.from_numpy(segment_of),
        num_tokens=len(segment_of),
        max_length=int(length.max()) + int(draw.integers(3)),
        max_context=int((context + length).max()) + int(draw.integers(100)),
    )
    packed = PackedStep(start[used], length[used], context[used], table[used])
    kv = _stored(packed, num_pages, heads[1], dim, dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = [
        torch.randn(len(segment_of), width, dim, generator=generator).to(dtype)
        for width in (heads[0], heads[1], heads[1])
    ]
    for each in tensors:
        each[torch.from_numpy(segment_of) == NO_SEGMENT] = float("nan")
    spans = zip(packed.start, packed.length, strict=True)
    rows = [np.arange(begin, begin + count) for begin, count in spans]
    return Layout(device, packed, torch.from_numpy(np.concatenate(rows)), kv, *tensors)


def _table(ends: np.ndarray, used: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, int]:
    """Pages [S, P] of requests of so many tokens, and how many pages there are."""
    counts = np.where(used, -(-ends // PAGE), 0)
    table = np.full((len(ends), max(int(counts.max()), 1)), NOWHERE, dtype=np.int32)
    pages = draw.permutation(int(counts.sum()) + 2).astype(np.int32)
    taken = 0
    for row, count in enumerate(counts):
        table[row, :count] = pages[taken : taken + count]
        taken += int(count)
    return table, len(pages)


def _stored(
    packed: PackedStep, num_pages: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int
) -> KVLayer:
    kv = KVLayer.empty(num_pages, kv_heads, dim, dtype, torch.device("cpu"))
    kv.k_pages.fill_(float("nan"))
    kv.v_pages.fill_(float("nan"))
    start = (np.cumsum(packed.context) - packed.context).astype(np.int32)
    before = PackedStep(start, packed.context, np.zeros_like(start), packed.table)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, int(packed.context.sum()), kv_heads, dim)
    store_kv_reference(before, kv, *torch.randn(shape, generator=generator).to(dtype))
    return kv


def rms_ratio(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Size of the difference in units of the reference's."""
    error = (ours.double() - reference.double()).pow(2).mean().sqrt()
    return float(error / reference.double().pow(2).mean().sqrt())
