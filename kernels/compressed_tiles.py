"""Weights of tiles in three quarters of their bytes, bit for bit: see compressed_tiles.h.

Products of few rows take as long as reading the weights does, so these are read in less. A product
is the same to the bit: the same numbers are multiplied in the same order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from adaflash_batch.kernels import native

_UPPERS = 16
# A share of blocks kept whole from which nothing is gained.
_MOST_WHOLE = 0.1


class CCompressed(ctypes.Structure):
    """The C struct `CompressedTiles`; empty where there is none."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("blocks", "uppers", "first", "whole_at", "whole")
    )


@dataclass(frozen=True, slots=True)
class CompressedTiles:
    """A weight of tiled_linear.tiled, [tiles, pairs, TILE, 2].

    Attributes:
        blocks: uint8 [tiles, pairs, 3 * TILE]: of each weight the lower byte, then four bits.
        uppers: uint8 [tiles, 16]: the upper bytes that these choose from.
        first: int32 [tiles + 1]: where each tile's blocks begin in `whole`.
        whole_at: int32 [W]: the pair that each of them is.
        whole: bfloat16 [W, TILE, 2].
    """

    blocks: torch.Tensor
    uppers: torch.Tensor
    first: torch.Tensor
    whole_at: torch.Tensor
    whole: torch.Tensor

    def c_struct(self) -> CCompressed:
        """For the call."""
        parts = (self.blocks, self.uppers, self.first, self.whole_at, self.whole)
        return CCompressed(*(each.data_ptr() for each in parts))


@cache
def is_available() -> bool:
    """Whether this machine has the instructions; asked only where tiled_linear.is_available."""
    return "avx512vbmi" in native.processor_flags()


def compressed(weight: torch.Tensor) -> CompressedTiles | None:
    """The same weight; None where its numbers are too different for that to be less."""
    tiles, pairs, width, _ = weight.shape
    assert weight.dtype == torch.bfloat16
    assert weight.is_contiguous()
    blocks = torch.empty(tiles, pairs, 3 * width, dtype=torch.uint8)
    uppers = torch.empty(tiles, _UPPERS, dtype=torch.uint8)
    is_whole = torch.empty(tiles, pairs, dtype=torch.bool)
    parts = (each.data_ptr() for each in (blocks, uppers, is_whole))
    _load()(weight.data_ptr(), tiles, pairs, *parts)
    if is_whole.float().mean() > _MOST_WHOLE:
        return None
    counts = is_whole.sum(1).cumsum(0)
    first = torch.cat((counts.new_zeros(1), counts)).int()
    return CompressedTiles(blocks, uppers, first, is_whole.nonzero()[:, 1].int(), weight[is_whole])


def restored(tiles: CompressedTiles) -> torch.Tensor:
    """What `compressed` was given, by PyTorch."""
    num_tiles, pairs, size = tiles.blocks.shape
    width = size // 3
    lowers, choices = tiles.blocks.long().tensor_split((2 * width,), dim=-1)
    chosen = torch.stack((choices & 15, choices >> 4), dim=-1).flatten(1)
    uppers = tiles.uppers.long().gather(1, chosen).view_as(lowers)
    bits = (lowers | uppers << 8).view(num_tiles, pairs, width // 8, 2, 8)
    # The halves of a block lie side by side in lanes: eight weights of one, eight of the other.
    bits = bits.transpose(2, 3).reshape(num_tiles, pairs, width, 2)
    weight = torch.where(bits < 1 << 15, bits, bits - (1 << 16)).short().view(torch.bfloat16)
    of_tile = torch.arange(num_tiles).repeat_interleave(tiles.first.diff())
    weight[of_tile, tiles.whole_at.long()] = tiles.whole
    return weight


@cache
def _load() -> ctypes._NamedFuncPointer:
    function = native.load("tiled_linear.c", "-DELEMENT=1").compress
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3]
    function.restype = None
    return function
