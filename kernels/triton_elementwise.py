"""The small operations of a decoder layer in Triton: what elementwise.py says, in one pass each.

A row is computed by a program of its own, so no result depends on how many rows there are.

# T tokens, W width, H query heads, G kv heads, D head dim
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from adaflash_batch.kernels.device_step import power_of_two
from adaflash_batch.kernels.variant import LAUNCH, Variant

__all__ = ["VARIANTS", "add_rms_norm", "rms_norm", "rotate", "silu_mul"]

_WIDE = 2048
"""Rows from this width on are shared by twice the warps."""
_SILU_BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """A row: the sum with the residual, if there is one, and its norm."""
    at = tl.arange(0, BLOCK)
    is_there = at < width
    begin = tl.program_id(0).to(tl.int64) * width
    x = tl.load(x_ptr + begin + at, mask=is_there, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + begin + at, mask=is_there, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + begin + at, x, mask=is_there)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=is_there, other=0.0)
    rounded = (wide * scale).to(x.dtype)
    out = weight.to(tl.float32) * rounded.to(tl.float32)
    tl.store(out_ptr + begin + at, out.to(x.dtype), mask=is_there)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See elementwise.rms_norm."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    _norm(x, x, weight, out, out, eps, has_residual=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See elementwise.add_rms_norm."""
    assert x.is_contiguous()
    assert residual.is_contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual, weight, total, out, eps, has_residual=True)
    return total, out


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    has_residual: bool,
) -> None:
    width = x.shape[-1]
    rms_norm_kernel[(x.numel() // width,)](
        *(x, residual, weight, total, out, width, eps),
        BLOCK=power_of_two(width),
        HAS_RESIDUAL=has_residual,
        num_warps=_num_warps(width),
        **LAUNCH,
    )


def _num_warps(width: int) -> int:
    return 8 if width >= _WIDE else 4


@triton.jit
def silu_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """A piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=is_there, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=is_there, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    out = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * width + at, out.to(gate.dtype), mask=is_there)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See elementwise.silu_mul."""
    assert gate_up.is_contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    grid = (out.numel() // width, triton.cdiv(width, _SILU_BLOCK))
    silu_mul_kernel[grid](gate_up, out, width, BLOCK=_SILU_BLOCK, num_warps=4, **LAUNCH)
    return out


@triton.jit
def rotate_kernel(
    qkv_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    qkv_token: tl.tensor,
    num_heads: tl.tensor,
    num_rotated: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
) -> None:
    """A head of a token: normed if there are norms, then turned."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    is_there = at < dim
    half = dim // 2
    other = tl.where(at < half, at + half, at - half)
    begin = qkv_ptr + token * qkv_token + head * dim
    x = tl.load(begin + at, mask=is_there, other=0.0)
    turned = tl.load(begin + other, mask=is_there, other=0.0)
    if HAS_NORMS:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)
        norm_ptr = q_norm_ptr if head < num_heads else k_norm_ptr
        weight = tl.load(norm_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        turned_weight = tl.load(norm_ptr + other, mask=is_there, other=0.0).to(tl.float32)
        rounded = (wide * scale).to(x.dtype).to(tl.float32)
        turned_rounded = (turned.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
        x = (weight * rounded).to(x.dtype)
        turned = (turned_weight * turned_rounded).to(x.dtype)
    cos = tl.load(cos_ptr + token * dim + at, mask=is_there, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * dim + at, mask=is_there, other=0.0).to(tl.float32)
    signed = tl.where(at < half, -turned.to(tl.float32), turned.to(tl.float32))
    out = x.to(tl.float32) * cos + signed * sin
    place = (token * num_rotated + head) * dim
    tl.store(out_ptr + place + at, out.to(x.dtype), mask=is_there)


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """See elementwise.rotate."""
    assert qkv.stride(1) == cos.stride(1) == sin.stride(1) == 1
    num_tokens, dim = cos.shape
    num_rotated = num_heads + num_kv_heads
    out = qkv.new_empty(num_tokens, num_rotated, dim)
    rotate_kernel[(num_tokens, num_rotated)](
        *(qkv, *(norms or (qkv, qkv)), cos, sin, out),
        *(qkv.stride(0), num_heads, num_rotated, dim, eps),
        BLOCK=power_of_two(dim),
        HAS_NORMS=norms is not None,
        num_warps=1,
        **LAUNCH,
    )
    return out


_BF16 = "*bf16"
_NORM: dict[str, str] = {
    **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "total_ptr", "out_ptr"), _BF16),
    **{"width": "i32", "eps": "fp32"},
}
_ROTATE: dict[str, str] = {
    **dict.fromkeys(("qkv_ptr", "q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr"), _BF16),
    **{"out_ptr": _BF16, "eps": "fp32"},
    **dict.fromkeys(("qkv_token", "num_heads", "num_rotated", "dim"), "i32"),
}


def _norm_variant(name: str, width: int, *, has_residual: bool) -> Variant:
    values: dict[str, Any] = {"BLOCK": power_of_two(width), "HAS_RESIDUAL": has_residual}
    return Variant(name, rms_norm_kernel, _NORM, values, _num_warps(width), 3)


VARIANTS = [
    _norm_variant("rms_norm bf16 4096", 4096, has_residual=False),
    _norm_variant("add_rms_norm bf16 4096", 4096, has_residual=True),
    _norm_variant("add_rms_norm bf16 576", 576, has_residual=True),
    Variant(
        "silu_mul bf16",
        silu_mul_kernel,
        {"gate_up_ptr": _BF16, "out_ptr": _BF16, "width": "i32"},
        {"BLOCK": _SILU_BLOCK},
        num_warps=4,
        num_stages=3,
    ),
    Variant(
        "rotate bf16 128 normed", rotate_kernel, _ROTATE, {"BLOCK": 128, "HAS_NORMS": True}, 1, 3
    ),
    Variant("rotate bf16 64", rotate_kernel, _ROTATE, {"BLOCK": 64, "HAS_NORMS": False}, 1, 3),
]
