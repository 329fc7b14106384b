"""Linear layers with their weights laid out for the processor's matrix kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from adaflash_batch.kernels import compressed_tiles, tiled_linear
from adaflash_batch.kernels.tiled_linear import TiledProduct

# A layout for few rows is as fast for many (measured at 1 to 256 rows, see fusing.py).
_PACKED_FOR_ROWS = 32
# Fewer rows are filled up to so many for oneDNN, for two reasons (Zen 4, one thread, 2026-11-30): a
# pass of SmolLM2-135M's products takes 29.7 ms with 1 row, 33.3 with 2, 23.5 with 5, 24.0 with 6;
# and a single row is summed up in another order than several, so that its text may differ.
_LEAST_ROWS = 5
_COMPRESSED_SHARE = 0.75


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers of this type gain from a layout of their own here."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return tiled_linear.is_available() or _has_one_dnn()


def _has_one_dnn() -> bool:
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(linears: Sequence[nn.Linear]) -> PackedLinear:
    """Linear layers of one input side by side, where `can_pack`."""
    if tiled_linear.is_available() and linears[0].in_features % 2 == 0:
        return TiledLinear(linears)
    return OneDnnLinear(linears)


def compress(model: nn.Module, most_bytes: float) -> None:
    """Compress its tiled layers for passes of few tokens, if that takes no more memory than this.

    No product changes: what is read is the same weight, in another form.
    """
    layers = [each for each in model.modules() if isinstance(each, TiledLinear)]
    num_bytes = sum(each.product.weight.nbytes for each in layers)
    if compressed_tiles.is_available() and num_bytes * _COMPRESSED_SHARE <= most_bytes:
        for each in layers:
            each.compress()


def side_by_side(linears: Sequence[nn.Linear]) -> nn.Module:
    """One layer that computes all of them from one input: [.., in] to [.., sum of outs]."""
    weight = linears[0].weight
    if can_pack(weight.dtype, weight.device):
        return pack(linears)
    if len(linears) == 1:
        return linears[0]
    num_outputs = sum(linear.out_features for linear in linears)
    wide = nn.Linear(linears[0].in_features, num_outputs, device="meta")
    wide.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]).detach(), False)
    wide.bias = None if linears[0].bias is None else nn.Parameter(_biases(linears), False)
    return wide


def some_outputs(layer: nn.Module, outputs: torch.Tensor) -> nn.Module | None:
    """A layer that computes only these outputs of a linear one; None for another kind."""
    if isinstance(layer, PackedLinear):
        weight, bias = layer.unpacked()
    elif type(layer) is nn.Linear:
        weight, bias = layer.weight.detach(), layer.bias
    else:
        return None
    some = nn.Linear(weight.shape[1], len(outputs), bias=bias is not None, device="meta")
    some.weight = nn.Parameter(weight[outputs], False)
    if bias is not None:
        some.bias = nn.Parameter(bias.detach()[outputs], False)
    return side_by_side([some])


class PackedLinear(nn.Module, ABC):
    """Linear layers side by side, weights laid out for the processor.

    Attributes:
        least_rows: fewer are filled up to so many.
    """

    least_rows = 1

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.bias = _biases(linears) if linears[0].bias is not None else None

    @property
    def kind(self) -> str:
        """What its speed depends on, for people and records."""
        return type(self).__name__

    @abstractmethod
    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight [out, in], bias [out]) as they were given."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] to [.., sum of outs]."""


class TiledLinear(PackedLinear):
    """By our own kernel.

    Attributes:
        product: see kernels.tiled_linear.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        weight = tiled_linear.tiled(_weights(linears))
        self.product = TiledProduct(weight, self.bias, self.out_features)

    @property
    def kind(self) -> str:
        """See PackedLinear."""
        return "TiledLinear" if self.product.compressed is None else "TiledLinear, compressed"

    def compress(self) -> None:
        """Hold the weight a second time, in three quarters of the bytes, for few rows."""
        compressed = compressed_tiles.compressed(self.product.weight)
        self.product = replace(self.product, compressed=compressed)

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See PackedLinear."""
        return tiled_linear.untiled(self.product.weight, self.out_features), self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return tiled_linear.tiled_linear(x, self.product)


class OneDnnLinear(PackedLinear):
    """By oneDNN's."""

    least_rows = _LEAST_ROWS

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        weight = _weights(linears)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See PackedLinear."""
        return self._weight.to_dense(), self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        rows = x.numel() // self.in_features
        if rows >= self.least_rows:
            return self._product(x)
        flat = x.reshape(rows, self.in_features)
        filled = F.pad(flat, (0, 0, 0, self.least_rows - rows))
        return self._product(filled)[:rows].view(*x.shape[:-1], self.out_features)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self.bias, "none", [], ""
        )
        return out


def _weights(linears: Sequence[nn.Linear]) -> torch.Tensor:
    return torch.cat([linear.weight.detach() for linear in linears])


def _biases(linears: Sequence[nn.Linear]) -> torch.Tensor:
    return torch.cat([linear.bias.detach() for linear in linears])
