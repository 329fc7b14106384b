"""A drafter's passes by the kernels that run its target: tiles of weights, its layers in one call.

The net holds the weights and is what is trained and scored; this is a copy of them in another
layout, which drafts. It rounds at other places than the net, so that a draft may differ where two
tokens are as likely; no text can.

# T rows of blocks, B blocks, C context tokens, H hidden
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from adaflash_batch.drafter.layers import DrafterLayer
from adaflash_batch.drafter.length import Walk, certainty_of
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.kernels import decoder_stack, markov_walk, tiled_linear
from adaflash_batch.kernels.decoder_stack import DecoderStack, StackLayer
from adaflash_batch.kernels.elementwise import rms_norm, rotate
from adaflash_batch.kernels.paged_attention import KVLayer, PackedStep, store_kv
from adaflash_batch.kernels.tiled_linear import TiledProduct


class TiledDrafter:
    """See above.

    Args:
        net: whose weights are copied; `refresh` follows what is written into them.
        kv: pages of its layers.
        token_ids: the draft vocabulary, where it has one.

    Attributes:
        walk: of its Markov head, where that is of a kind that can be walked so; see
            DFlash.propose_judged.
    """

    def __init__(self, net: DFlash, kv: list[KVLayer], token_ids: Tensor | None = None) -> None:
        self._net, self._kv = net, kv
        self._copies: list[tuple[Tensor, Callable[[], Tensor]]] = []
        layers = [cast(DrafterLayer, layer) for layer in net.layers]
        self._heads = net.config.num_attention_heads, net.config.num_key_value_heads
        parts = [self._layer(layer, index) for index, layer in enumerate(layers)]
        self._stack = DecoderStack(parts, *self._heads, net.config.head_dim)
        self._fc = self._linear(net.fc)
        self._context = [
            self._linear(layer.self_attn.k_proj, layer.self_attn.v_proj) for layer in layers
        ]
        projection = net.input_projection
        self._projection = None if projection is None else self._linear(projection.proj)
        self._ones = torch.ones_like(net.norm.weight)
        self.walk = self._walk(token_ids)

    @staticmethod
    def of(net: DFlash, kv: list[KVLayer], token_ids: Tensor | None = None) -> TiledDrafter | None:
        """None where the net is not one that can be run so, or the machine has no such kernels."""
        config = net.config
        weight = net.fc.weight
        if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
            return None
        if not tiled_linear.is_available() or not decoder_stack.is_available(config.head_dim):
            return None
        sizes = (config.hidden_size, config.num_features, config.intermediate_size)
        if config.conv_kernel_size or any(size % 2 for size in sizes):
            return None
        return TiledDrafter(net, kv, token_ids)

    def _linear(self, *linears: nn.Linear) -> TiledProduct:
        def weight() -> Tensor:
            return tiled_linear.tiled(torch.cat([each.weight.detach() for each in linears]))

        tiles = weight()
        self._copies.append((tiles, weight))
        return TiledProduct(tiles, None, sum(each.out_features for each in linears))

    def _walk(self, token_ids: Tensor | None) -> Walk | None:
        markov = self._net.markov_head
        if self._net.config.markov_head_type != "vanilla" or markov is None:
            return None
        if markov.rank % 2 or not markov_walk.is_available():
            return None
        weight = markov.markov_w2.weight

        def rows() -> Tensor:
            return tiled_linear.tiled((weight if token_ids is None else weight[token_ids]).detach())

        tiles = rows()
        self._copies.append((tiles, rows))
        linear = TiledProduct(tiles, None, len(weight if token_ids is None else token_ids))
        embedded = markov.markov_w1.weight.detach()

        def walk(logits: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
            walked = markov_walk.markov_walk(logits, anchors, embedded, linear, token_ids)
            drafts, top, second = walked
            return drafts, certainty_of(top, second)

        return walk

    def _layer(self, layer: DrafterLayer, index: int) -> StackLayer:
        config, attention, mlp = self._net.config, layer.self_attn, layer.mlp
        return StackLayer(
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj),
            down=self._linear(mlp.down_proj),
            norm=layer.input_layernorm.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            head_norms=(attention.q_norm.weight, attention.k_norm.weight),
            window=config.windows[index] or 0,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
            causal=config.causal[index],
        )

    def refresh(self) -> None:
        """Other weights were written into the net."""
        for tiles, weight in self._copies:
            tiles.copy_(weight())

    def block(
        self, embeddings: Tensor, states: Tensor | None, positions: Tensor, step: PackedStep
    ) -> Tensor:
        """[T, H], ready for lm_head; the block's keys and values are stored.

        Args:
            embeddings: the target's [T, H], of anchors and masks.
            states: [B, H], see DFlash.rows; None without an input projection.
            positions: int64 [T].
            step: to which requests the rows belong.
        """
        x = self._rows(embeddings, states)
        scale = self._net.config.input_embedding_scale
        x = x if scale == 1 else x * scale
        self._stack.forward(x, *self._rotary(positions), step, self._kv, {})
        return rms_norm(x, self._net.norm.weight, self._net.config.rms_norm_eps)

    def _rows(self, embeddings: Tensor, states: Tensor | None) -> Tensor:
        projection, eps = self._net.input_projection, self._net.config.rms_norm_eps
        if projection is None or states is None or self._projection is None:
            return embeddings.clone()
        rows = embeddings.view(len(states), -1, embeddings.shape[-1])
        anchors = rms_norm(rows[:, 0].contiguous(), self._ones, eps)
        states = rms_norm(states.contiguous(), projection.norm.weight, eps)
        added = tiled_linear.tiled_linear(torch.cat((states, anchors), dim=-1), self._projection)
        return (rows + added.unsqueeze(1)).flatten(0, 1)

    def absorb(self, features: Tensor, positions: Tensor, step: PackedStep) -> None:
        """Store the keys and values of context tokens.

        Args:
            features: [C, features * H].
            positions: int64 [C].
            step: to which requests they belong.
        """
        net, eps, kv_heads = self._net, self._net.config.rms_norm_eps, self._heads[1]
        context = rms_norm(
            tiled_linear.tiled_linear(features, self._fc), net.hidden_norm.weight, eps
        )
        rotary = self._rotary(positions)
        for layer, pages, linear in zip(net.layers, self._kv, self._context, strict=True):
            norm = cast(Any, layer).self_attn.k_norm.weight
            joined = tiled_linear.tiled_linear(context, linear)
            keys = rotate(joined, *rotary, kv_heads, 0, (norm, norm), eps)
            values = joined.view(len(joined), 2 * kv_heads, -1)[:, kv_heads:]
            store_kv(step, pages, keys, values)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._net.rotary(positions)
        return cos.bfloat16(), sin.bfloat16()
