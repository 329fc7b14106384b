"""Which form of attention runs: C for CPUs, Triton for GPUs, PyTorch where neither can."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from adaflash_batch.kernels import device_reference, paged_attention

KernelKind = Literal["auto", "native", "triton", "torch"]
"""`native` (C, or PyTorch without a compiler) takes a PackedStep, the others take a DeviceStep."""


class AttentionKernels(NamedTuple):
    """One form of `store_kv` and `paged_attention`; see kernels/paged_attention.py for both.

    takes_device_step: whether their step is a DeviceStep, which may have padding.
    rotate_and_attend: `attend` of projections that are still to be normed and rotated, in a launch
        less or two; None where there is no such form.
    """

    kind: Literal["native", "triton", "torch"]
    store: Callable[..., None]
    attend: Callable[..., torch.Tensor]
    takes_device_step: bool
    rotate_and_attend: Callable[..., torch.Tensor] | None = None


NATIVE = AttentionKernels(
    "native", paged_attention.store_kv, paged_attention.paged_attention, False
)
_TORCH = AttentionKernels(
    "torch", device_reference.store_kv, device_reference.paged_attention, True
)


def attention_kernels(kind: KernelKind, device: torch.device) -> AttentionKernels:
    """The form of this kind; `auto` is the fastest that the device and what is installed allow.

    Raises ImportError where Triton is asked for and not installed.
    """
    if kind == "native" or (kind == "auto" and device.type == "cpu"):
        assert device.type == "cpu", "the C form runs on CPUs"
        return NATIVE
    if kind == "torch" or (kind == "auto" and not has_triton()):
        return _TORCH
    return _triton()


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _triton() -> AttentionKernels:
    module: Any = importlib.import_module("adaflash_batch.kernels.triton_attention")
    forms = module.store_kv, module.paged_attention
    return AttentionKernels("triton", *forms, True, module.rotate_and_attend)
