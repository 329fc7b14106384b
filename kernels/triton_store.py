"""Keys and values of packed tokens into their pages, in Triton: as they are, or rotated on the way.

# T packed tokens, S segments, H query heads, G kv heads, D head dim, E = D / 2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adaflash_batch.kernels.device_step import DeviceStep
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import KVLayer
from adaflash_batch.kernels.variant import LAUNCH, Variant

_TOKENS = 16


@triton.jit
def _places(
    token: tl.tensor,
    start_ptr: tl.tensor,
    context_ptr: tl.tensor,
    segment_of_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_tokens: tl.tensor,
    table_stride: tl.tensor,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of each token: whether it is one, its page, and its place within."""
    segment = tl.load(segment_of_ptr + token, mask=token < num_tokens, other=-1)
    is_stored = segment >= 0
    context = tl.load(context_ptr + segment, mask=is_stored, other=0)
    position = context + token - tl.load(start_ptr + segment, mask=is_stored, other=0)
    at = segment.to(tl.int64) * table_stride + position // PAGE
    return is_stored, tl.load(table_ptr + at, mask=is_stored, other=0), position % PAGE


@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def store_kv_kernel(
    k_pages_ptr: tl.tensor,
    v_pages_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    start_ptr: tl.tensor,
    context_ptr: tl.tensor,
    segment_of_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_tokens: tl.tensor,
    table_stride: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """One program a run of tokens and kv head."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kv_head, num_kv_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    is_stored, page, offset = _places(
        token, start_ptr, context_ptr, segment_of_ptr, table_ptr, num_tokens, table_stride, PAGE
    )
    dims = tl.arange(0, DIMS)
    mask = is_stored[:, None] & (dims < HEAD_DIM)[None, :]
    wide = token.to(tl.int64)
    k_at = wide * k_token + kv_head * k_head
    v_at = wide * v_token + kv_head * v_head
    k = tl.load(k_ptr + k_at[:, None] + dims[None, :], mask=mask)
    v = tl.load(v_ptr + v_at[:, None] + dims[None, :], mask=mask)
    at = (page.to(tl.int64) * num_kv_heads + kv_head) * (HEAD_DIM * PAGE)
    tl.store(k_pages_ptr + (at + offset)[:, None] + (dims * PAGE)[None, :], k, mask=mask)
    tl.store(v_pages_ptr + (at + offset * HEAD_DIM)[:, None] + dims[None, :], v, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def rotate_and_store_kernel(
    q_ptr: tl.tensor,
    k_pages_ptr: tl.tensor,
    v_pages_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    start_ptr: tl.tensor,
    context_ptr: tl.tensor,
    segment_of_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_tokens: tl.tensor,
    table_stride: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALVES: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
) -> None:
    """One program a run of tokens and head of queries, keys or values."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    is_stored, page, offset = _places(
        token, start_ptr, context_ptr, segment_of_ptr, table_ptr, num_tokens, table_stride, PAGE
    )
    dims = tl.arange(0, HALVES)
    is_dim = dims < HALF
    mask = is_stored[:, None] & is_dim[None, :]
    wide = token.to(tl.int64)
    low_at = qkv_ptr + ((wide * tl.num_programs(1) + head) * HEAD_DIM)[:, None] + dims[None, :]
    low = tl.load(low_at, mask=mask, other=0.0)
    high = tl.load(low_at + HALF, mask=mask, other=0.0)
    if head < num_heads + num_kv_heads:
        if HAS_NORMS:
            norm_ptr = q_norm_ptr if head < num_heads else k_norm_ptr
            low_norm = tl.load(norm_ptr + dims, mask=is_dim, other=0.0)[None, :].to(tl.float32)
            high_norm = tl.load(norm_ptr + HALF + dims, mask=is_dim, other=0.0)[None, :]
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            square = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)
            scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
            # Rounded twice, as transformers' modules do.
            wide_low = (wide_low * scale).to(low.dtype).to(tl.float32) * low_norm
            wide_high = (wide_high * scale).to(low.dtype).to(tl.float32) * high_norm.to(tl.float32)
            low, high = wide_low.to(low.dtype), wide_high.to(low.dtype)
        turn = (wide * HEAD_DIM)[:, None] + dims[None, :]
        low_cos = tl.load(cos_ptr + turn, mask=mask, other=0.0).to(tl.float32)
        low_sin = tl.load(sin_ptr + turn, mask=mask, other=0.0).to(tl.float32)
        high_cos = tl.load(cos_ptr + turn + HALF, mask=mask, other=0.0).to(tl.float32)
        high_sin = tl.load(sin_ptr + turn + HALF, mask=mask, other=0.0).to(tl.float32)
        turned = low * low_cos - high * low_sin
        high = (high * high_cos + low * high_sin).to(high.dtype)
        low = turned.to(high.dtype)
    if head < num_heads:
        q_at = q_ptr + ((wide * num_heads + head) * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(q_at, low, mask=mask)
        tl.store(q_at + HALF, high, mask=mask)
    else:
        kv_head = (head - num_heads) % num_kv_heads
        at = (page.to(tl.int64) * num_kv_heads + kv_head) * (HEAD_DIM * PAGE)
        if head < num_heads + num_kv_heads:
            k_at = k_pages_ptr + (at + offset)[:, None] + (dims * PAGE)[None, :]
            tl.store(k_at, low, mask=mask)
            tl.store(k_at + HALF * PAGE, high, mask=mask)
        else:
            v_at = v_pages_ptr + (at + offset * HEAD_DIM)[:, None] + dims[None, :]
            tl.store(v_at, low, mask=mask)
            tl.store(v_at + HALF, high, mask=mask)


def store_kv(step: DeviceStep, kv: KVLayer, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write keys and values [T, G, D] of the step's tokens into their pages.

    Any strides with D contiguous. Reference: `paged_attention.store_kv_reference`.
    """
    num_kv_heads, head_dim = k.shape[1:]
    assert k.stride(2) == v.stride(2) == 1
    assert k.dtype == v.dtype == kv.k_pages.dtype
    grid = (triton.cdiv(step.num_tokens, _TOKENS), num_kv_heads)
    store_kv_kernel[grid](
        *(kv.k_pages, kv.v_pages, k, v),
        *(step.start, step.context, step.segment_of, step.table),
        *(step.num_tokens, step.table.shape[1]),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        **_sizes(head_dim, triton.next_power_of_2(head_dim), "DIMS"),
        **LAUNCH,
    )


def rotate_and_store(
    step: DeviceStep,
    kv: KVLayer,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate queries and keys, normed where there are norms, and store keys and values.

    Reference: `paged_attention.rotate_and_store_reference`.

    Args:
        qkv: [T, (H + 2 G) D], contiguous: heads of queries, keys, values; H may be 0.
        cos, sin: [T, D], contiguous.
        norms: weights [D] for queries and for keys.
        eps: added to the mean square.

    Returns:
        Queries [T, H, D].
    """
    num_kv_heads, head_dim = kv.v_pages.shape[1], kv.v_pages.shape[3]
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    q = torch.empty(step.num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    grid = (triton.cdiv(step.num_tokens, _TOKENS), num_heads + 2 * num_kv_heads)
    rotate_and_store_kernel[grid](
        *(q, kv.k_pages, kv.v_pages, qkv, cos, sin),
        *(norms if norms is not None else (qkv, qkv)),
        *(step.start, step.context, step.segment_of, step.table),
        *(step.num_tokens, step.table.shape[1], num_heads, num_kv_heads, eps),
        HAS_NORMS=norms is not None,
        **_sizes(head_dim, triton.next_power_of_2(head_dim // 2), "HALVES"),
        **LAUNCH,
    )
    return q


def _sizes(head_dim: int, padded: int, padded_name: str) -> dict[str, int]:
    return {"HEAD_DIM": head_dim, padded_name: padded, "PAGE": PAGE, "TOKENS": _TOKENS}


_PLACES = dict.fromkeys(("start_ptr", "context_ptr", "segment_of_ptr", "table_ptr"), "*i32")


def _store_variant(head_dim: int) -> Variant:
    tensors = dict.fromkeys(("k_pages_ptr", "v_pages_ptr", "k_ptr", "v_ptr"), "*bf16")
    numbers = ("num_tokens", "table_stride", "k_token", "k_head", "v_token", "v_head")
    return Variant(
        name=f"store_kv bf16 {head_dim}",
        kernel=store_kv_kernel,
        signature=tensors | _PLACES | dict.fromkeys(numbers, "i32"),
        constexprs=_sizes(head_dim, triton.next_power_of_2(head_dim), "DIMS"),
        num_warps=4,
        num_stages=3,
    )


def _rotate_variant(head_dim: int, *, has_norms: bool) -> Variant:
    pages = ("q_ptr", "k_pages_ptr", "v_pages_ptr")
    inputs = ("qkv_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr")
    numbers = ("num_tokens", "table_stride", "num_heads", "num_kv_heads")
    types = dict.fromkeys((*pages, *inputs), "*bf16") | _PLACES | dict.fromkeys(numbers, "i32")
    sizes = _sizes(head_dim, triton.next_power_of_2(head_dim // 2), "HALVES")
    return Variant(
        name=f"rotate_and_store bf16 {head_dim}" + (" normed" if has_norms else ""),
        kernel=rotate_and_store_kernel,
        signature=types | {"eps": "fp32"},
        constexprs=sizes | {"HAS_NORMS": has_norms},
        num_warps=4,
        num_stages=3,
    )


VARIANTS = [
    _store_variant(128),
    *(_rotate_variant(128, has_norms=True), _rotate_variant(64, has_norms=False)),
]
