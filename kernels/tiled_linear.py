"""Linear layers on CPUs with AVX-512 BF16, weights in tiles: see tiled_linear.h.

oneDNN's matrix kernels are made for many rows; decoding has few. Products of SmolLM2-135M's shapes,
one thread of a Zen 4 core, oneDNN's time over this one's: 2.1 at 1 row, 1.5 at 8, 1.3 at 32, 1.0
from 128 on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from adaflash_batch.kernels import native
from adaflash_batch.kernels.compressed_tiles import CCompressed, CompressedTiles
from adaflash_batch.kernels.native import NativeUnavailable

TILE = 32
"""Outputs of a tile."""


class CLinear(ctypes.Structure):
    """The C struct `Linear`."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("compressed", CCompressed),
    )


@dataclass(frozen=True)
class TiledProduct:
    """x @ weight.T + bias.

    Attributes:
        weight: from `tiled`.
        bias: [outputs].
        compressed: the same weight, for few rows.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    compressed: CompressedTiles | None = None

    @cached_property
    def c_struct(self) -> CLinear:
        """For calls; it points to the tensors."""
        bias = None if self.bias is None else self.bias.data_ptr()
        compressed = CCompressed() if self.compressed is None else self.compressed.c_struct()
        return CLinear(self.weight.data_ptr(), bias, self.inputs, self.outputs, compressed)

    @property
    def inputs(self) -> int:
        """Of a row."""
        return self.weight.shape[1] * 2


@cache
def is_available() -> bool:
    """Whether this machine has the instructions, no better ones (AMX), and a compiler."""
    flags = native.processor_flags()
    if "avx512_bf16" not in flags or "amx_bf16" in flags:
        return False
    try:
        _load()
    except NativeUnavailable:
        return False
    return True


def tiled(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs], inputs even, as [tiles, inputs / 2, TILE, 2], filled up with 0."""
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % TILE))
    return filled.view(-1, TILE, inputs // 2, 2).permute(0, 2, 1, 3).contiguous()


def untiled(weight: torch.Tensor, outputs: int) -> torch.Tensor:
    """What `tiled` was given."""
    return weight.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)[:outputs].contiguous()


def tiled_linear(x: torch.Tensor, linear: TiledProduct) -> torch.Tensor:
    """[.., inputs] to [.., outputs], bfloat16, sums in float32, each in the order of the inputs."""
    assert x.shape[-1] == linear.inputs
    assert x.dtype == linear.weight.dtype == torch.bfloat16
    rows = x.contiguous()
    out = torch.empty(*x.shape[:-1], linear.outputs, dtype=x.dtype)
    num_rows = rows.numel() // linear.inputs
    _load()(ctypes.byref(linear.c_struct), rows.data_ptr(), out.data_ptr(), num_rows)
    return out


def tiled_linear_reference(x: torch.Tensor, linear: TiledProduct) -> torch.Tensor:
    """`tiled_linear` in PyTorch, on any device."""
    wide = x.float() @ untiled(linear.weight, linear.outputs).float().T
    return (wide if linear.bias is None else wide + linear.bias.float()).to(x.dtype)


@cache
def _load() -> ctypes._NamedFuncPointer:
    function = native.load("tiled_linear.c", "-DELEMENT=1").tiled_linear
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]
    function.restype = None
    return function
