"""The small operations of a decoder layer on a CPU, one pass each, beside their PyTorch references.

All tensors are contiguous and of one type. The compiled forms raise NativeUnavailable where there
is no compiler; callers ask `is_available` first.

# T tokens, W width, H query heads, G kv heads, D head dim
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from adaflash_batch.kernels import native
from adaflash_batch.kernels.native import NativeUnavailable


def is_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled forms run on these tensors."""
    if device.type != "cpu" or dtype not in native.ELEMENTS:
        return False
    try:
        _load(dtype)
    except NativeUnavailable:
        return False
    return True


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * (x / rms(x)) over the last dimension, the quotient rounded before the product.

    Args:
        x: [.., W].
        weight: [W].
        eps: added to the mean square.
    """
    assert x.is_contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    _load(x.dtype).rms_norm(_at(x), _at(weight), _at(out), rows, width, eps)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in PyTorch, on any device."""
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + residual, rms_norm of that)."""
    assert x.is_contiguous()
    assert residual.is_contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    pointers = (_at(tensor) for tensor in (x, residual, weight, total, out))
    _load(x.dtype).add_rms_norm(*pointers, rows, width, eps)
    return total, out


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in PyTorch, on any device."""
    total = x + residual
    return total, rms_norm_reference(total, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [.., 2 W] with the gates first: [.., W]."""
    assert gate_up.is_contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    _load(gate_up.dtype).silu_mul(_at(gate_up), _at(out), out.numel() // width, width)
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in PyTorch, on any device."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Queries and keys, normed where there are norms, rotated to their positions.

    Args:
        qkv: [T, (H + 2 G) D], heads of queries, keys, values.
        cos, sin: [T, D].
        norms: weights [D] for queries and for keys.

    Returns:
        [T, H + G, D].
    """
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    num_tokens, dim = cos.shape
    out = torch.empty(num_tokens, num_heads + num_kv_heads, dim, dtype=qkv.dtype)
    q_norm, k_norm = (None, None) if norms is None else (_at(norms[0]), _at(norms[1]))
    sizes = (num_tokens, qkv.shape[1], num_heads, num_kv_heads, dim)
    _load(qkv.dtype).rotate(_at(qkv), q_norm, k_norm, _at(cos), _at(sin), _at(out), *sizes, eps)
    return out


def rotate_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """`rotate` in PyTorch, on any device."""
    heads = qkv.view(cos.shape[0], -1, cos.shape[1])[:, : num_heads + num_kv_heads]
    if norms is not None:
        queries = rms_norm_reference(heads[:, :num_heads], norms[0], eps)
        keys = rms_norm_reference(heads[:, num_heads:], norms[1], eps)
        heads = torch.cat([queries, keys], dim=1)
    low, high = heads.chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    return heads * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _at(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


@cache
def _load(dtype: torch.dtype) -> ctypes.CDLL:
    library = native.load("elementwise.c", f"-DELEMENT={native.ELEMENTS[dtype]}")
    pointer, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures: dict[str, list[Any]] = {
        "rms_norm": [pointer] * 3 + [count] * 2 + [real],
        "add_rms_norm": [pointer] * 5 + [count] * 2 + [real],
        "silu_mul": [pointer] * 2 + [count] * 2,
        "rotate": [pointer] * 6 + [count] * 5 + [real],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
