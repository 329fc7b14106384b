"""Small drafters of every member of the family, and attention over dense tensors for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import Attend, DFlash, initialise

# Tensors of the small DFlash that the tests of published layouts write by hand.
BACKBONE_SHAPES: dict[str, tuple[int, ...]] = {
    "fc.weight": (64, 192),
    "hidden_norm.weight": (64,),
    "norm.weight": (64,),
}
for _layer in range(2):
    BACKBONE_SHAPES |= {
        f"layers.{_layer}.input_layernorm.weight": (64,),
        f"layers.{_layer}.post_attention_layernorm.weight": (64,),
        f"layers.{_layer}.self_attn.q_proj.weight": (128, 64),
        f"layers.{_layer}.self_attn.k_proj.weight": (64, 64),
        f"layers.{_layer}.self_attn.v_proj.weight": (64, 64),
        f"layers.{_layer}.self_attn.o_proj.weight": (64, 128),
        f"layers.{_layer}.self_attn.q_norm.weight": (16,),
        f"layers.{_layer}.self_attn.k_norm.weight": (16,),
        f"layers.{_layer}.mlp.gate_proj.weight": (96, 64),
        f"layers.{_layer}.mlp.up_proj.weight": (96, 64),
        f"layers.{_layer}.mlp.down_proj.weight": (64, 96),
    }

TINY = DrafterConfig(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=100,
    block_size=5,
    mask_token_id=99,
    target_layer_ids=(1, 3, 4),
    num_target_layers=6,
)
WINDOWED = dataclasses.replace(
    TINY, layer_types=("sliding_attention", "full_attention"), sliding_window=4
)
DSPARK = dataclasses.replace(
    TINY,
    from_anchor=True,
    markov_rank=6,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
DFLASH2 = dataclasses.replace(
    TINY,
    conv_kernel_size=3,
    conv_group_size=8,
    selector_rank=6,
    selector_top_k=7,
    output_multiplier=0.6,
    final_logit_softcapping=9.0,
    input_embedding_scale=1.7,
)
PROJECTED = dataclasses.replace(TINY, has_input_projection=True)
CAUSAL = dataclasses.replace(
    DFLASH2,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=4,
    has_causal_windows=True,
)


def random_drafter(config: DrafterConfig, dtype: torch.dtype = torch.float64) -> DFlash:
    """Weights large enough that no part of the net can be left out unnoticed."""
    generator = torch.Generator().manual_seed(0)
    model = initialise(config, generator).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model


def random_rows(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator, dtype=dtype)


def check_head_gradients(
    head: nn.Module, net: DFlash, plain: DFlash, expected: Tensor, *, atol: float, rtol: float
) -> None:
    """A head of the net has those of the loss by hand, all else those of the net without it."""
    wanted = torch.autograd.grad(expected, list(head.parameters()))
    for parameter, gradient in zip(head.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, atol=atol, rtol=rtol)
    others = dict(net.named_parameters())
    for name, parameter in plain.named_parameters():
        mine = others[name].grad
        assert (mine is None) == (parameter.grad is None), name
        assert mine is None or parameter.grad is None or torch.equal(mine, parameter.grad), name


def packed_block(
    model: DFlash, contexts: Sequence[Tensor], blocks: Sequence[Tensor], starts: Sequence[int]
) -> Tensor:
    """`block` over all requests at once, as an engine with a dense attention would call it."""
    cached = [
        [
            model.context_kv(layer, context, *model.rotary(start + torch.arange(len(context))))
            for context, start in zip(contexts, starts, strict=True)
        ]
        for layer in range(model.config.num_hidden_layers)
    ]
    positions = torch.cat(
        [
            start + len(context) + torch.arange(len(block))
            for context, block, start in zip(contexts, blocks, starts, strict=True)
        ]
    )
    attend = dense_attend(model.config, cached, len(blocks[0]))
    return model.block(torch.cat(list(blocks)), *model.rotary(positions), attend)


def dense_attend(
    config: DrafterConfig, cached: Sequence[Sequence[tuple[Tensor, Tensor]]], rows: int
) -> Attend:
    group = config.num_attention_heads // config.num_key_value_heads

    def heads_first(x: Tensor, repeat: int = 1) -> Tensor:
        return x.repeat_interleave(repeat, 1).transpose(0, 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = config.windows[layer]
        outputs = []
        for request, (context_k, context_v) in enumerate(cached[layer]):
            own = slice(request * rows, (request + 1) * rows)
            keys = torch.cat((context_k, k[own]))
            distance = torch.arange(len(context_k), len(keys))[:, None] - torch.arange(len(keys))
            seen = distance < (window or len(keys) + 1)
            if config.causal[layer]:
                seen &= distance >= 0
            values = torch.cat((context_v, v[own]))
            out = F.scaled_dot_product_attention(
                heads_first(q[own]),
                heads_first(keys, group),
                heads_first(values, group),
                attn_mask=seen,
            )
            outputs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    return attend
