"""What travels through a model's forward to every attention layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from adaflash_batch.kernels.attention_kernels import NATIVE
from adaflash_batch.kernels.device_step import DeviceStep
from adaflash_batch.kernels.paged_attention import KVLayer, PackedStep


class CannotAttend(Exception):
    """The model asks for something that paged attention does not do; the message says what."""


@dataclass(slots=True)
class LayerShape:
    """What one layer keeps for each token."""

    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class AttentionCall:
    """The step and its memory, as a keyword of the model's call.

    With `kv` None the call only records what the layers look like (`shapes`, by layer number).
    `attend` is the form of `paged_attention` for this kind of step, `rotate_and_attend` that of
    projections as they are, where there is one.
    """

    step: PackedStep | DeviceStep | None = None
    kv: list[KVLayer] | None = None
    attend: Callable[..., torch.Tensor] = NATIVE.attend
    rotate_and_attend: Callable[..., torch.Tensor] | None = None
    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def record(self, layer: int, shape: LayerShape) -> None:
        """Note a layer's shape. Raises CannotAttend when it attends a second time."""
        if layer in self.shapes:
            raise CannotAttend(f"layer {layer} attends twice")
        self.shapes[layer] = shape
