"""A model whose decoder layers are run in one call, where all of them are ones that can be.

# T packed tokens, R chosen rows, H hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from adaflash_batch.engine.fused_layer import FusedLayer
from adaflash_batch.kernels import decoder_stack
from adaflash_batch.kernels.decoder_stack import DecoderStack
from adaflash_batch.kernels.paged_attention import KVLayer, PackedStep

# Models of transformers that are an embedding, such layers, a norm and an output layer.
_KNOWN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class StackedModel:
    """Runs the parts of a transformers model without its own forward.

    Args:
        model: whose every layer is a FusedLayer.
        stack: of its layers.
    """

    def __init__(self, model: Any, stack: DecoderStack) -> None:
        self._body, self._stack = model.model, stack
        self._head: nn.Module = model.get_output_embeddings()
        # What the last forward left: layers, ascending, and their outputs [T, layers * H].
        self._layers: tuple[int, ...] = ()
        self._seen = torch.empty(0)

    @staticmethod
    def of(model: Any) -> StackedModel | None:
        """None where the model has to be run by its own forward."""
        kind = type(model)
        if kind.__name__ not in _KNOWN or not kind.__module__.startswith("transformers.models."):
            return None
        layers = list(model.model.layers)
        if not layers or not all(isinstance(layer, FusedLayer) for layer in layers):
            return None
        shapes = {layer.attention_shape for layer in layers}
        parts = [layer.stack_layer() for layer in layers]
        if len(shapes) > 1 or any(part is None for part in parts):
            return None
        shape = shapes.pop()
        if not decoder_stack.is_available(shape[2]):
            return None
        return StackedModel(model, DecoderStack([part for part in parts if part], *shape))

    @property
    def seconds(self) -> dict[str, float]:
        """See DecoderStack."""
        return self._stack.seconds

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PackedStep,
        kv: list[KVLayer],
        rows: torch.Tensor,
        tapped: Collection[int],
    ) -> torch.Tensor:
        """One packed forward, see Target.forward.

        Args:
            tapped: layers whose outputs are wanted.

        Returns:
            logits [R, V].
        """
        x = self._body.embed_tokens(token_ids)
        cos, sin = self._body.rotary_emb(x.unsqueeze(0), positions.unsqueeze(0))
        self._layers = tuple(sorted(tapped))
        self._seen = x.new_empty(x.shape[0], len(tapped) * x.shape[1])
        taps = self._taps()
        self._stack.forward(x, cos[0].contiguous(), sin[0].contiguous(), step, kv, taps)
        logits: torch.Tensor = self._head(self._body.norm(x[rows]))
        return logits

    def _taps(self) -> dict[int, torch.Tensor]:
        if not self._layers:
            return {}
        parts = self._seen.chunk(len(self._layers), dim=1)
        return dict(zip(self._layers, parts, strict=True))

    def tapped(self, layer_ids: tuple[int, ...], rows: torch.Tensor | slice) -> torch.Tensor:
        """See Target.tapped."""
        if layer_ids == self._layers:
            return self._seen[rows]
        taps = self._taps()
        return torch.cat([taps[layer][rows] for layer in layer_ids], dim=1)
