"""Attention of a DeviceStep in PyTorch, on any device: what kernels are compared with.

It reads the step back to the host, so it runs where no kernel does, and slowly.

# T packed tokens, S segments, H query heads, G kv heads, D head dim
"""

from __future__ import annotations

import numpy as np
import torch

from adaflash_batch.kernels.device_step import DeviceStep
from adaflash_batch.kernels.paged_attention import (
    Attention,
    KVLayer,
    PackedStep,
    paged_attention_reference,
    store_kv_reference,
)


def store_kv(step: DeviceStep, kv: KVLayer, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write keys and values [T, G, D] of the step's tokens into their pages."""
    store_kv_reference(_without_padding(step), kv, k, v)


def paged_attention(
    step: DeviceStep, kv: KVLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention
) -> torch.Tensor:
    """Store the step's keys and values, then attend: [T, H * D], 0 where there is padding."""
    packed = _without_padding(step)
    store_kv_reference(packed, kv, k, v)
    out = paged_attention_reference(packed, kv, q, how)
    return out.masked_fill((step.segment_of < 0).unsqueeze(1), 0.0)


def _without_padding(step: DeviceStep) -> PackedStep:
    columns = (step.start, step.length, step.context, step.table)
    start, length, context, table = (column.cpu().numpy() for column in columns)
    used = length > 0
    return PackedStep(start[used], length[used], context[used], np.ascontiguousarray(table[used]))
