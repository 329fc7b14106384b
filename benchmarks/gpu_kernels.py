"""Each kernel against its floor and against PyTorch, for benchmarks/gpu.py.

Floors: bytes that must move over the memory's rate, or operations over the peak of bf16, whichever
is more. Shapes are Qwen3-8B's: 32 query heads, 8 kv heads of 128, 151,936 tokens.

# T packed tokens, S segments, H query heads, G kv heads, D head dim, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gpu_rows
import numpy as np
import torch
import torch.nn.functional as F
from gpu_notes import Notes, floor_s, timed

from adaflash_batch.engine.upload import upload_to
from adaflash_batch.kernels.attention_kernels import AttentionKernels, attention_kernels
from adaflash_batch.kernels.device_step import DeviceStep, on_device
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import Attention, KVLayer, PackedStep

_NEEDED_S = 6.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a step's attention: `num_segments` requests of `length` tokens behind `context` others."""

    num_segments: int
    length: int
    context: int
    causal: bool = True
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_segments * self.length

    @property
    def num_bytes(self) -> int:
        """Of keys and values, of the step's own tokens and of what comes out, in bf16."""
        kept = self.num_segments * (self.context + 2 * self.length) * 2 * self.kv_heads
        return 2 * self.dim * (kept + 2 * self.num_tokens * self.heads)

    @property
    def num_operations(self) -> int:
        """Of both products."""
        own = self.length * (self.length + 1) // 2 if self.causal else self.length**2
        keys = self.num_segments * (self.length * self.context + own)
        return 4 * self.heads * self.dim * keys


SHAPES = {
    "decode, 1 request, 4k": Shape(1, 1, 4096),
    "decode, 128 requests, 1k": Shape(128, 1, 1024),
    "verify 8, 1 request, 4k": Shape(1, 8, 4096),
    "verify 8, 128 requests, 1k": Shape(128, 8, 1024),
    "decode, 1 request, 32k": Shape(1, 1, 32768),
    "prefill 1024 behind 1k": Shape(1, 1024, 1024),
    "drafter block 16, 128 requests, 1k": Shape(128, 16, 1024, causal=False),
}
TINY = {
    "decode": Shape(2, 1, 33, heads=4, kv_heads=2, dim=16),
    "verify": Shape(2, 3, 40, heads=4, kv_heads=2, dim=16),
    "drafter block": Shape(1, 4, 20, causal=False, heads=4, kv_heads=2, dim=16),
}


def run(notes: Notes, device_name: str, *, is_tiny: bool) -> None:
    """All of them."""
    device = torch.device(device_name)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    kernels = attention_kernels("triton" if _has_kernels(device) else "torch", device)
    notes.put("attention kernels", kernels.kind)
    for name, shape in (TINY if is_tiny else SHAPES).items():
        work = partial(_attention, shape, kernels, device, dtype)
        notes.attempt(f"paged_attention: {name}", _NEEDED_S, work)
    storing = TINY["verify"] if is_tiny else Shape(128, 8, 1024)
    notes.attempt("store_kv", _NEEDED_S, partial(_store, storing, kernels, device, dtype))
    gpu_rows.run(notes, device, dtype, is_tiny=is_tiny)
    if device.type == "cuda":
        flex = partial(_flex, SHAPES["verify 8, 128 requests, 1k"], device, dtype)
        notes.attempt("flex_attention: verify 8, 128 requests, 1k", 40.0, flex)


def _has_kernels(device: torch.device) -> bool:
    try:
        attention_kernels("triton", device)
    except ImportError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Inputs:
    step: DeviceStep
    kv: KVLayer
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> _Inputs:
    """Pages in random order, full of random numbers."""
    count, length = shape.num_segments, shape.length
    pages_each = -(-(shape.context + length) // PAGE)
    pages = np.random.default_rng(0).permutation(count * pages_each).astype(np.int32)
    packed = PackedStep(
        np.arange(0, count * length, length, dtype=np.int32),
        np.full(count, length, dtype=np.int32),
        np.full(count, shape.context, dtype=np.int32),
        pages.reshape(count, pages_each),
    )
    kv = KVLayer.empty(len(pages), shape.kv_heads, shape.dim, dtype, device)
    for tensor in (kv.k_pages, kv.v_pages):
        tensor.normal_()
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        torch.randn(shape.num_tokens, each, shape.dim, dtype=dtype, device=device) for each in heads
    )
    return _Inputs(on_device(packed, upload_to(device)), kv, q, k, v)


def _attention(
    shape: Shape, kernels: AttentionKernels, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    each, how = _inputs(shape, device, dtype), Attention(shape.dim**-0.5, causal=shape.causal)
    ours = timed(lambda: kernels.attend(each.step, each.kv, each.q, each.k, each.v, how), device)
    figures = _figures(ours, shape.num_bytes, shape.num_operations)
    return figures | {"sdpa_s": timed(_sdpa(shape, device, dtype), device)}


def _store(
    shape: Shape, kernels: AttentionKernels, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    each = _inputs(shape, device, dtype)
    ours = timed(lambda: kernels.store(each.step, each.kv, each.k, each.v), device)
    moved = 2 * 2 * shape.num_tokens * shape.kv_heads * shape.dim * each.k.element_size()
    copies = timed(lambda: (each.k.clone(), each.v.clone()), device)
    return _figures(ours, moved, 0) | {"clone_s": copies}


def _figures(seconds: float, num_bytes: int, num_operations: int) -> dict[str, Any]:
    floor = floor_s(num_bytes, num_operations)
    return {
        "seconds": seconds,
        "bytes": num_bytes,
        "operations": num_operations,
        "floor_s": floor,
        "share_of_floor": None if floor is None else floor / seconds,
    }


def _dense(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [S, H, length, D], k and v [S, G, context + length, D]: nothing has to be gathered."""
    total, count = shape.context + shape.length, shape.num_segments
    sizes = ((shape.heads, shape.length), (shape.kv_heads, total), (shape.kv_heads, total))
    q, k, v = (
        torch.randn(count, heads, tokens, shape.dim, dtype=dtype, device=device)
        for heads, tokens in sizes
    )
    return q, k, v


def _sdpa(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    """PyTorch's own attention over dense keys and values."""
    q, k, v = _dense(shape, device, dtype)
    mask = None
    if shape.causal and shape.length > 1:
        rows = torch.arange(shape.length, device=device).unsqueeze(1) + shape.context
        mask = torch.arange(shape.context + shape.length, device=device) <= rows
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _flex(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The same by flex_attention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _dense(shape, device, dtype)

    def sees(b: Any, h: Any, q_index: Any, k_index: Any) -> Any:
        return k_index <= q_index + shape.context

    total = shape.context + shape.length
    mask = create_block_mask(sees, None, None, shape.length, total, device=str(device))
    compiled: Any = torch.compile(flex_attention)
    return {"flex_s": timed(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True), device)}
