"""The drafter written out densely from the papers' formulas: the tests' yardstick.

C context tokens, H hidden, D head_dim, N rows of a block, K taps, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from adaflash_batch.drafter.model import DFlash


def reference_block(
    model: DFlash, context: Tensor, embeddings: Tensor, first_position: int = 0
) -> Tensor:
    """`DFlash.block` for one request.

    Args:
        model: its weights are used, not its methods (`rotary` excepted).
        context: [C, H] as `DFlash.context` returns it, at positions first_position, +1, ...
        embeddings: [block, H], at the positions after the context.
        first_position: absolute position of the first context token.
    """
    config, weights = model.config, dict(model.named_parameters())
    positions = first_position + torch.arange(len(context) + len(embeddings))
    hidden = embeddings * config.input_embedding_scale
    for index in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"layers.{index}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        attend = partial(_reference_attention, model, layer, index, context, positions)
        x = _reference_norm(hidden, layer["input_layernorm.weight"], config.rms_norm_eps)
        hidden = hidden + _reference_around(model, layer, "attention_conv", attend, x)
        x = _reference_norm(hidden, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        hidden = hidden + _reference_around(
            model, layer, "mlp_conv", partial(_reference_mlp, layer), x
        )
    return _reference_norm(hidden, weights["norm.weight"], config.rms_norm_eps)


def _reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _reference_mlp(layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate = x @ layer["mlp.gate_proj.weight"].T
    up = x @ layer["mlp.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T


def _reference_around(
    model: DFlash,
    layer: Mapping[str, Tensor],
    name: str,
    sublayer: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    if not model.config.conv_kernel_size:
        return sublayer(x)
    base = layer[f"{name}.base_kernel"]
    projected = x @ layer[f"{name}.kernel_projection.weight"].T
    delta = projected.reshape(len(x), *base.shape[:2], -1)  # [N, side, K, G]

    def convolved(z: Tensor, side: int) -> Tensor:
        rows = []
        for slot in range(len(z)):
            row = torch.zeros_like(z[slot])
            for tap in range(min(base.shape[1], slot + 1)):
                own = delta[slot, side, tap].repeat_interleave(model.config.conv_group_size)
                row = row + (base[side, tap] + own) * z[slot - tap]
            rows.append(row)
        return torch.stack(rows)

    return convolved(sublayer(convolved(x, 0)), 1)


def _reference_attention(
    model: DFlash,
    layer: Mapping[str, Tensor],
    index: int,
    context: Tensor,
    positions: Tensor,
    x: Tensor,
) -> Tensor:
    config, window = model.config, model.config.windows[index]
    both = torch.cat((context, x))
    q = (x @ layer["self_attn.q_proj.weight"].T).reshape(len(x), -1, config.head_dim)
    k = (both @ layer["self_attn.k_proj.weight"].T).reshape(len(both), -1, config.head_dim)
    v = (both @ layer["self_attn.v_proj.weight"].T).reshape(len(both), -1, config.head_dim)
    q = _reference_norm(q, layer["self_attn.q_norm.weight"], config.rms_norm_eps)
    k = _reference_norm(k, layer["self_attn.k_norm.weight"], config.rms_norm_eps)
    cos, sin = (part.to(x.dtype).unsqueeze(1) for part in model.rotary(positions))

    def rotated(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * cos[-len(y) :] + torch.cat((-second, first), dim=-1) * sin[-len(y) :]

    group = config.num_attention_heads // config.num_key_value_heads
    k, v = rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / config.head_dim**0.5
    distance = positions[-len(x) :, None] - positions
    if window is not None:
        scores = scores.masked_fill(distance >= window, float("-inf"))
    if config.causal[index]:
        scores = scores.masked_fill(distance < 0, float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return attended @ layer["self_attn.o_proj.weight"].T
