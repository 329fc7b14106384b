"""Attention of packed queries over paged keys and values, in Triton.

A row's result depends on its own request alone, to the bit: keys are added up in blocks that begin
at fixed positions, blocks in splits that begin at fixed positions, and splits are joined in order,
whether one program walks them all or each has a program of its own. Blocks that a row does not see
change nothing.

# T packed tokens, S segments, P pages a request, H query heads, G kv heads, D head dim, Z splits
# R rows of a tile: consecutive tokens of one segment times the query heads of one kv head
# N keys of a block
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from adaflash_batch.kernels.device_step import DeviceStep
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import Attention, KVLayer
from adaflash_batch.kernels.triton_splits import SPLIT, join, join_splits, span
from adaflash_batch.kernels.triton_store import rotate_and_store, store_kv
from adaflash_batch.kernels.variant import LAUNCH, Variant

__all__ = ["VARIANTS", "attend", "paged_attention", "rotate_and_attend", "store_kv"]

_LOG2_E = 1.4426950408889634


@triton.jit
def _tile(
    length_ptr: tl.tensor,
    num_segments: tl.tensor,
    TOKENS: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Segment and tile in it of this program; segment num_segments is none."""
    # The last tiles see most keys: first, so that the device does not wait for them at the end.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    if SEGMENTS == 0:
        segment, tile = index, index * 0
    else:
        segments = tl.arange(0, SEGMENTS)
        length = tl.load(length_ptr + segments, mask=segments < num_segments, other=0)
        num_tiles = (length + TOKENS - 1) // TOKENS
        segment = tl.sum((tl.cumsum(num_tiles, 0) <= index).to(tl.int32), 0)
        tile = index - tl.sum(tl.where(segments < segment, num_tiles, 0), 0)
        segment = tl.minimum(segment, num_segments)
    return segment, tile


@triton.jit(do_not_specialize=["num_tokens", "num_segments", "table_stride"])
def paged_attention_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_pages_ptr: tl.tensor,
    v_pages_ptr: tl.tensor,
    start_ptr: tl.tensor,
    length_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_segments: tl.tensor,
    table_stride: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    factor: tl.tensor,
    inner_factor: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WALKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One program a tile, kv head and split; with WALKS it takes all splits of its tile.

    A tile whose keys are in several splits leaves their sums in partial and sums, see
    `triton_splits.join_splits`; otherwise, and with WALKS, the result goes to out. INTERPRETED is
    for Triton's interpreter, which cannot multiply bfloat16 and warns of what GPUs do in silence.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    segment, tile = _tile(length_ptr, num_segments, TOKENS, SEGMENTS)
    if segment >= num_segments:
        return
    length = tl.load(length_ptr + segment)
    if tile * TOKENS >= length:
        return
    context = tl.load(context_ptr + segment)
    begin, end = span(context, length, tile, TOKENS, CAUSAL, WINDOW)
    is_whole = begin // SPLIT == (end - 1) // SPLIT
    split = tl.program_id(2)
    if not WALKS:
        begin, end = tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT)
    if begin >= end:
        return

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    in_tile = rows // GROUP
    in_segment = tile * TOKENS + in_tile
    is_row = (in_tile < TOKENS) & (in_segment < length)
    position = context + tl.minimum(in_segment, length - 1)
    token = (tl.load(start_ptr + segment) + in_segment).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = token * q_token + head.to(tl.int64) * q_head
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=mask, other=0.0)
    if INTERPRETED:
        q = q.to(tl.float32)
    table_row = table_ptr + segment.to(tl.int64) * table_stride

    total = tl.full([ROWS, DIMS], 0.0, tl.float32)
    total_sum = tl.full([ROWS], 0.0, tl.float32)
    total_top = tl.full([ROWS], float("-inf"), tl.float32)
    mixed, weight, top = total, total_sum, total_top
    for begin_of_block in range(begin // KEYS * KEYS, end, KEYS):
        block = tl.multiple_of(begin_of_block, KEYS)
        if WALKS and block % SPLIT == 0:
            total, total_sum, total_top = join(total, total_sum, total_top, mixed, weight, top)
            mixed = tl.full([ROWS, DIMS], 0.0, tl.float32)
            weight = tl.full([ROWS], 0.0, tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
        key = block + tl.arange(0, KEYS)
        page = tl.load(table_row + key // PAGE, mask=key < end, other=0)
        # The compiler cannot see it, and would not load keys of a page in wide pieces.
        page = tl.max_constancy(page, [PAGE])
        at = (page.to(tl.int64) * num_kv_heads + kv_head) * (HEAD_DIM * PAGE)
        is_key = key < end
        # Whole pages, or keys could not be loaded in wide pieces; what is no key is not seen below.
        k_at = (at + key % PAGE)[None, :] + (dims * PAGE)[:, None]
        if DIMS == HEAD_DIM:
            keys = tl.load(k_pages_ptr + k_at)
        else:
            keys = tl.load(k_pages_ptr + k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        # What nobody wrote may be NaN, which a weight of 0 would not hide.
        v_at = (at + key % PAGE * HEAD_DIM)[:, None] + dims[None, :]
        v_mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(v_pages_ptr + v_at, mask=v_mask, other=0.0)
        if INTERPRETED:
            keys = tl.where(is_key[None, :], keys.to(tl.float32), 0.0)

        scores = tl.dot(q, keys, input_precision="ieee")
        if HAS_SOFTCAP:
            # tanh(x) from exp(2 x), which stays finite: there it is 1 already.
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(scores * inner_factor, 126.0)))
        is_seen = is_key[None, :]
        if CAUSAL:
            is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > (position - WINDOW)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        likes = tl.exp2(tl.fma(scores, factor, -finite[:, None]))
        fade = tl.exp2(top - finite)
        weight = tl.fma(weight, fade, tl.sum(likes, 1))
        mixed = mixed * fade[:, None]
        likes = likes.to(values.dtype)
        if INTERPRETED:
            likes, values = likes.to(tl.float32), values.to(tl.float32)
        mixed = tl.dot(likes, values, mixed, input_precision="ieee")
        top = new_top

    if WALKS:
        mixed, weight, top = join(total, total_sum, total_top, mixed, weight, top)
    num_heads = num_kv_heads * GROUP
    row = token * num_heads + head
    if WALKS or is_whole:
        weight = tl.where(is_row, weight, 1.0)
        out = (mixed / weight[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * HEAD_DIM)[:, None] + dims[None, :], out, mask=mask)
    else:
        row += split.to(tl.int64) * num_tokens * num_heads
        tl.store(partial_ptr + (row * HEAD_DIM)[:, None] + dims[None, :], mixed, mask=mask)
        tl.store(sums_ptr + row * 2, weight, mask=is_row)
        tl.store(sums_ptr + row * 2 + 1, top, mask=is_row)


def paged_attention(
    step: DeviceStep, kv: KVLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention
) -> torch.Tensor:
    """Store the step's keys and values, then attend.

    Args:
        q: [T, H, D], any strides with D contiguous; head h reads kv head h // (H / G).
        k, v: [T, G, D], likewise.

    Returns:
        [T, H * D] in q's dtype; sums are float32. Rows of padding are left as memory was.
    """
    store_kv(step, kv, k, v)
    return attend(step, kv, q, how)


def rotate_and_attend(
    step: DeviceStep,
    kv: KVLayer,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    how: Attention,
) -> torch.Tensor:
    """`paged_attention` of projections as they are: see triton_store.rotate_and_store."""
    q = rotate_and_store(step, kv, qkv, cos, sin, num_heads, norms, eps)
    return attend(step, kv, q, how)


def attend(
    step: DeviceStep, kv: KVLayer, q: torch.Tensor, how: Attention, walks: bool | None = None
) -> torch.Tensor:
    """`paged_attention` of what is stored already.

    Args:
        walks: whether one program takes all splits of its rows; None decides by the sizes. No
            result depends on it.
    """
    assert q.stride(2) == 1
    assert q.dtype == kv.k_pages.dtype
    assert how.scale > 0
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.k_pages.shape[1]
    tiling = _tiling(num_heads // num_kv_heads, head_dim, q.dtype, _capability(q.device))
    grid = _grid(step, tiling, num_kv_heads)
    if walks is None:
        walks = _is_crowded(grid, num_tokens * num_heads * head_dim)
    if walks:
        grid = (*grid[:2], 1)
    num_partials = grid[2] if grid[2] > 1 else 0
    partial = torch.empty(num_partials, *q.shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(num_partials, *q.shape[:2], 2, dtype=torch.float32, device=q.device)
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device)
    capped = how.softcap > 0
    paged_attention_kernel[grid](
        *(out, partial, sums, q, kv.k_pages, kv.v_pages),
        *(step.start, step.length, step.context, step.table),
        *(num_tokens, *step.table.shape, q.stride(0), q.stride(1)),
        (how.softcap if capped else how.scale) * _LOG2_E,
        2 * _LOG2_E * how.scale / how.softcap if capped else 0.0,
        **_constants(tiling, head_dim, how, num_segments=_num_searched(step, tiling), walks=walks),
        INTERPRETED=q.device.type == "cpu",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **LAUNCH,
    )
    if num_partials:
        heads = out.view(num_tokens, num_kv_heads, tiling.group, head_dim)
        join_splits(step, how, tiling.tokens, heads, partial, sums)
    return out


@dataclass(frozen=True, slots=True)
class _Tiling:
    """What a program takes. Of the model and the GPU alone: another tile might round otherwise."""

    group: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @property
    def tokens(self) -> int:
        return self.rows // self.group


def _tiling(group: int, head_dim: int, dtype: torch.dtype, capability: int) -> _Tiling:
    """Sizes with which nothing spills; see kernels/README.md."""
    is_wide = head_dim > 128
    if dtype == torch.float32:
        rows, keys = 16, 16 if is_wide else 32  # no tensor cores: exact, and slow
    elif capability >= 90:
        rows, keys = 64, 32 if is_wide else 64  # 64 is what Hopper multiplies at once
    else:
        rows, keys = 32, 32 if is_wide else 64
    rows = max(rows, triton.next_power_of_2(group))
    return _Tiling(group, rows, keys, 8 if is_wide else 4, 3 if capability >= 90 else 2)


@cache
def _capability(device: torch.device) -> int:
    """90 is Hopper, and stands for CPUs too, where Triton interprets."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _num_searched(step: DeviceStep, tiling: _Tiling) -> int:
    """Segments that a program searches for its tile; 0 where each has one tile at the most."""
    if step.max_length <= tiling.tokens:
        return 0
    return int(triton.next_power_of_2(len(step.length)))


def _grid(step: DeviceStep, tiling: _Tiling, num_kv_heads: int) -> tuple[int, int, int]:
    """Tiles, kv heads and splits: no fewer than the step has."""
    num_segments = len(step.length)
    most = num_segments * triton.cdiv(step.max_length, tiling.tokens)
    num_tiles = min(most, step.num_tokens // tiling.tokens + num_segments)
    return num_tiles, num_kv_heads, triton.cdiv(step.max_context, SPLIT)


# Enough to keep an H200 busy without splits: four for each of its processors.
_ENOUGH_PROGRAMS = 4 * 132
_MOST_PARTIAL_BYTES = 256 * 2**20


def _is_crowded(grid: tuple[int, int, int], num_outputs: int) -> bool:
    """Whether splits would only cost: memory, and the time to join them."""
    num_tiles, num_kv_heads, num_splits = grid
    if num_splits == 1:
        return False
    is_busy = num_tiles * num_kv_heads >= _ENOUGH_PROGRAMS
    return is_busy or 4 * num_splits * num_outputs > _MOST_PARTIAL_BYTES


def _constants(
    tiling: _Tiling, head_dim: int, how: Attention, *, num_segments: int, walks: bool
) -> dict[str, int | bool]:
    sizes = {"GROUP": tiling.group, "HEAD_DIM": head_dim, "ROWS": tiling.rows, "KEYS": tiling.keys}
    sizes |= {"DIMS": triton.next_power_of_2(head_dim), "PAGE": PAGE, "SPLIT": SPLIT}
    attention = {"CAUSAL": how.causal, "WINDOW": how.window, "HAS_SOFTCAP": how.softcap > 0}
    return sizes | attention | {"SEGMENTS": num_segments, "WALKS": walks}


def _variant(
    name: str,
    element: torch.dtype,
    heads: tuple[int, int],
    how: Attention,
    capability: int,
    *,
    num_segments: int = 0,
    walks: bool = False,
) -> Variant:
    """Of query heads a kv head and head dim."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[element]
    tiling = _tiling(*heads, element, capability)
    tensors = dict.fromkeys(("out_ptr", "q_ptr", "k_pages_ptr", "v_pages_ptr"), f"*{short}")
    tensors |= dict.fromkeys(("partial_ptr", "sums_ptr"), "*fp32")
    tensors |= dict.fromkeys(("start_ptr", "length_ptr", "context_ptr", "table_ptr"), "*i32")
    sizes = ("num_tokens", "num_segments", "table_stride", "q_token", "q_head")
    numbers = dict.fromkeys(sizes, "i32") | dict.fromkeys(("factor", "inner_factor"), "fp32")
    constants = _constants(tiling, heads[1], how, num_segments=num_segments, walks=walks)
    return Variant(
        name=f"attention {short} {heads[0]} x {heads[1]}, {name}",
        kernel=paged_attention_kernel,
        signature=tensors | numbers,
        constexprs=constants | {"INTERPRETED": False},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        capabilities=(capability,),
    )


def _variants() -> list[Variant]:
    plain, both_ways = Attention(1.0), Attention(1.0, causal=False)
    gemma = Attention(1.0, window=1024, softcap=50.0)
    half, single = torch.float16, torch.float32
    return [
        _variant("a split", torch.bfloat16, (4, 128), plain, 90),
        _variant("a block", torch.bfloat16, (4, 128), both_ways, 90),
        _variant("prefill", half, (3, 64), plain, 90, num_segments=128, walks=True),
        _variant("prefill", single, (4, 128), plain, 90, num_segments=128, walks=True),
        *(
            _variant(name, torch.bfloat16, heads, how, each, num_segments=128, walks=True)
            for name, heads, how in (("prefill", (4, 128), plain), ("Gemma", (2, 256), gemma))
            for each in (80, 90)
        ),
    ]


VARIANTS = _variants()
