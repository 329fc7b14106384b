"""A scalar whose gradients by its inputs were made before, for autograd to pass on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_gradient(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The value, attached to inputs whose gradients are known already: (input, its gradient)."""
    flat = [tensor for pair in pairs for tensor in pair]
    return cast(Tensor, _WithGradient.apply(value, *flat))  # type: ignore[no-untyped-call]


class _WithGradient(torch.autograd.Function):
    """A value whose gradients by its inputs are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *pairs: Tensor) -> Tensor:
        """pairs: an input, its gradient, the next input, ..."""
        ctx.save_for_backward(*pairs[1::2])
        ctx.dtypes = [tensor.dtype for tensor in pairs[::2]]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None]
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            found += [(gradient * by_value.to(gradient.dtype)).to(dtype), None]
        return tuple(found)
