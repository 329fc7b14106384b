"""Splits of the keys that a row of queries sees, and how what they add up to is joined, in Triton.

# T packed tokens, H query heads, G kv heads, D head dim, Z splits
# R rows of a tile: consecutive tokens of one segment times the query heads of one kv head
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adaflash_batch.kernels.device_step import DeviceStep
from adaflash_batch.kernels.paged_attention import Attention
from adaflash_batch.kernels.variant import LAUNCH, Variant

SPLIT = 512
"""Keys of a split. Fixed: a row's text may not depend on who else is in the batch."""


@triton.jit
def span(
    context: tl.tensor,
    length: tl.tensor,
    tile: tl.tensor,
    TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Positions begin, end of the keys that some row of a segment's tile sees."""
    first = context + tile * TOKENS
    end = context + length
    if CAUSAL:
        end = tl.minimum(end, first + TOKENS)
    begin = first * 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0)
    return begin, end


@triton.jit
def join(
    total: tl.tensor,
    total_sum: tl.tensor,
    total_top: tl.tensor,
    part: tl.tensor,
    part_sum: tl.tensor,
    part_top: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Two ranges of keys become one: sums [R, D] and [R] in units of 2 ** top [R].

    A range that a row does not see has top -inf and changes nothing, to the bit.
    """
    top = tl.maximum(total_top, part_top)
    finite = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(total_top - finite), tl.exp2(part_top - finite)
    total = tl.fma(total, old[:, None], part * new[:, None])
    return total, tl.fma(total_sum, old, part_sum * new), top


@triton.jit(do_not_specialize=["num_tokens"])
def join_splits_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    start_ptr: tl.tensor,
    length_ptr: tl.tensor,
    context_ptr: tl.tensor,
    segment_of_ptr: tl.tensor,
    num_tokens: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """One program a token and kv head."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    segment = tl.load(segment_of_ptr + token)
    if segment < 0:
        return
    tile = (token - tl.load(start_ptr + segment)) // TOKENS
    context, length = tl.load(context_ptr + segment), tl.load(length_ptr + segment)
    begin, end = span(context, length, tile, TOKENS, CAUSAL, WINDOW)
    first, last = begin // SPLIT, (end - 1) // SPLIT
    if first == last:
        return
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIMS)
    num_heads = tl.num_programs(1) * GROUP
    is_head = heads < GROUP
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    row = token.to(tl.int64) * num_heads + kv_head * GROUP + heads
    stride = num_tokens.to(tl.int64) * num_heads
    at = row + first * stride
    total = tl.full([HEADS, DIMS], 0.0, tl.float32)
    total_sum = tl.full([HEADS], 0.0, tl.float32)
    total_top = tl.full([HEADS], float("-inf"), tl.float32)
    for _ in range(first, last + 1):
        part = tl.load(partial_ptr + (at * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0.0)
        part_sum = tl.load(sums_ptr + at * 2, mask=is_head, other=1.0)
        part_top = tl.load(sums_ptr + at * 2 + 1, mask=is_head, other=0.0)
        total, total_sum, total_top = join(total, total_sum, total_top, part, part_sum, part_top)
        at += stride
    out = (total / total_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * HEAD_DIM)[:, None] + dims[None, :], out, mask=mask)


def join_splits(
    step: DeviceStep,
    how: Attention,
    tokens: int,
    out: torch.Tensor,
    partial: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Write the rows whose keys are in several splits.

    Args:
        tokens: of a tile; all of its rows have the same splits.
        out: [T, G, H / G, D], written to.
        partial: float32 [Z, T, H, D], weighted values of each split, in units of 2 ** top.
        sums: float32 [Z, T, H, 2], the weights' sum and top.
    """
    num_kv_heads, group, head_dim = out.shape[1:]
    join_splits_kernel[(step.num_tokens, num_kv_heads)](
        *(out, partial, sums),
        *(step.start, step.length, step.context, step.segment_of, step.num_tokens),
        **_constants(group, head_dim, tokens, how),
        num_warps=_NUM_WARPS,
        **LAUNCH,
    )


_NUM_WARPS = 4


def _constants(group: int, head_dim: int, tokens: int, how: Attention) -> dict[str, int | bool]:
    heads, dims = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    sizes = {"GROUP": group, "HEADS": heads, "HEAD_DIM": head_dim, "DIMS": dims}
    return sizes | {"TOKENS": tokens, "SPLIT": SPLIT, "CAUSAL": how.causal, "WINDOW": how.window}


def _variant(group: int, head_dim: int) -> Variant:
    tensors = {"out_ptr": "*bf16", "partial_ptr": "*fp32", "sums_ptr": "*fp32"}
    places = ("start_ptr", "length_ptr", "context_ptr", "segment_of_ptr")
    return Variant(
        name=f"join_splits {group} x {head_dim}",
        kernel=join_splits_kernel,
        signature=tensors | dict.fromkeys(places, "*i32") | {"num_tokens": "i32"},
        constexprs=_constants(group, head_dim, 64 // group, Attention(1.0)),
        num_warps=_NUM_WARPS,
        num_stages=3,
    )


VARIANTS = [_variant(4, 128), _variant(7, 64)]
