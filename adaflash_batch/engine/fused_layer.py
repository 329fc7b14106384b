"""A Llama-like decoder layer with nothing between its matrix products but single passes.

# T tokens, H hidden, D head dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adaflash_batch.engine.attention_call import AttentionCall, LayerShape
from adaflash_batch.engine.packed_linear import TiledLinear, side_by_side
from adaflash_batch.kernels.decoder_stack import StackLayer
from adaflash_batch.kernels.paged_attention import Attention
from adaflash_batch.kernels.row_operations import NATIVE, RowOperations
from adaflash_batch.kernels.tiled_linear import TiledProduct

# Layers of transformers that are one and the same network: RMSNorm, attention with rotary halves
# (and per-head norms in Qwen3), residual, RMSNorm, gated SiLU, residual.
_KNOWN = {
    *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
}


def is_known(layer: nn.Module) -> bool:
    """Whether `FusedLayer` can stand for the layer."""
    return (
        type(layer).__name__ in _KNOWN
        and type(layer).__module__.startswith("transformers.models.")
        and isinstance(layer.mlp.act_fn, nn.SiLU | _silu_class())  # type: ignore[union-attr]
        and layer.self_attn.o_proj.bias is None  # type: ignore[union-attr]
        and layer.mlp.down_proj.bias is None  # type: ignore[union-attr]
    )


def _silu_class() -> type[nn.Module]:
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


class FusedLayer(nn.Module):
    """Computes what the layer it is made from computes, on contiguous tensors."""

    def __init__(self, layer: Any, operations: RowOperations = NATIVE) -> None:
        super().__init__()
        self._rms_norm, self._add_rms_norm, self._silu_mul, self._rotate = operations
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = side_by_side([attention.o_proj])
        self._gate_up = side_by_side([mlp.gate_proj, mlp.up_proj])
        self._down = side_by_side([mlp.down_proj])
        self._norm = layer.input_layernorm.weight
        self._mlp_norm = layer.post_attention_layernorm.weight
        self._eps = float(layer.input_layernorm.variance_epsilon)
        self._layer = int(attention.layer_idx)
        self._head_dim = int(attention.head_dim)
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._head_norms = None
        if hasattr(attention, "q_norm"):
            self._head_norms = (attention.q_norm.weight, attention.k_norm.weight)
        window = getattr(attention, "sliding_window", None)
        if type(layer).__name__ == "MistralDecoderLayer":
            window = attention.config.sliding_window
        self._how = Attention(scale=float(attention.scaling), window=window or 0)

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        """Heads of queries, heads of keys, size of a head."""
        return self._num_heads, self._num_kv_heads, self._head_dim

    def stack_layer(self) -> StackLayer | None:
        """The same for DecoderStack; None where a product is not in tiles."""
        qkv, out, gate_up, down = map(_product, (self._qkv, self._out, self._gate_up, self._down))
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        return StackLayer(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            norm=self._norm,
            mlp_norm=self._mlp_norm,
            head_norms=self._head_norms,
            window=self._how.window,
            scale=self._how.scale,
            eps=self._eps,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, H]
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # [1, T, D] each
        adaflash_call: AttentionCall,
        **unused: Any,
    ) -> torch.Tensor:
        """See the class; called by transformers with the layer's own keywords."""
        if adaflash_call.kv is None:
            adaflash_call.record(self._layer, LayerShape(self._num_kv_heads, self._head_dim))
            return hidden_states
        residual = hidden_states[0].contiguous()
        mixed = self._attend(
            self._rms_norm(residual, self._norm, self._eps), position_embeddings, adaflash_call
        )
        residual, normed = self._add_rms_norm(mixed, residual, self._mlp_norm, self._eps)
        residual = residual + self._down(self._silu_mul(self._gate_up(normed)))
        out: torch.Tensor = residual.unsqueeze(0)
        return out

    def _attend(
        self,
        normed: torch.Tensor,  # [T, H]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        call: AttentionCall,
    ) -> torch.Tensor:
        assert call.step is not None
        assert call.kv is not None
        qkv = self._qkv(normed)
        cos, sin = (table.view(-1, self._head_dim) for table in position_embeddings)
        heads, kv_heads = self._num_heads, self._num_kv_heads
        kv = call.kv[self._layer]
        if call.rotate_and_attend is not None:
            rotation = (cos, sin, heads, self._head_norms, self._eps)
            attended = call.rotate_and_attend(call.step, kv, qkv, *rotation, self._how)
            fused: torch.Tensor = self._out(attended)
            return fused
        rotated = self._rotate(qkv, cos, sin, heads, kv_heads, self._head_norms, self._eps)
        values = qkv.view(qkv.shape[0], -1, self._head_dim)[:, heads + kv_heads :]
        queries, keys = rotated[:, :heads], rotated[:, heads:]
        mixed = call.attend(call.step, kv, queries, keys, values, self._how)
        out: torch.Tensor = self._out(mixed)
        return out


def _product(layer: nn.Module) -> TiledProduct | None:
    return layer.product if isinstance(layer, TiledLinear) else None
