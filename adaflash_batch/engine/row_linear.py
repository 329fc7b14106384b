"""Linear layers whose results for a token do not depend on the other tokens of the pass."""

from __future__ import annotations

import torch
from torch import nn

from adaflash_batch.engine.attention_call import CannotAttend
from adaflash_batch.engine.fused_layer import FusedLayer
from adaflash_batch.kernels.row_operations import triton_linear


class RowLinear(nn.Linear):
    """A linear layer that rounds every row alike."""

    kind = "RowLinear"

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._product = triton_linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] to [.., out]."""
        return self._product(x, self.weight, self.bias)


def make_rows_independent(model: nn.Module, num_layers: int) -> None:
    """Replace what a library sums up by the size of the pass. Raises CannotAttend where unknown."""
    if sum(isinstance(module, FusedLayer) for module in model.modules()) != num_layers:
        raise CannotAttend(
            "a token's numbers may depend on the others of its pass; the deterministic mode knows "
            "the layers of Llama, Mistral, Qwen2 and Qwen3"
        )
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, RowLinear(child))
