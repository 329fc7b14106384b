"""Which form of a layer's small operations runs: C for CPUs, Triton for GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adaflash_batch.kernels import elementwise


class RowOperations(NamedTuple):
    """One form of the functions of elementwise.py."""

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[..., torch.Tensor]
    rotate: Callable[..., torch.Tensor]


def _of(module: Any) -> RowOperations:
    return RowOperations(module.rms_norm, module.add_rms_norm, module.silu_mul, module.rotate)


NATIVE = _of(elementwise)


def triton_rows() -> RowOperations:
    """For GPUs. Raises ImportError where Triton is not installed."""
    return _of(importlib.import_module("adaflash_batch.kernels.triton_elementwise"))


def triton_linear() -> Callable[..., torch.Tensor]:
    """A linear layer that rounds every row alike; see triton_linear.py. Raises ImportError."""
    module: Any = importlib.import_module("adaflash_batch.kernels.triton_linear")
    linear: Callable[..., torch.Tensor] = module.linear
    return linear
