"""Drafters of every member for the tiny Llama."""

from __future__ import annotations

import dataclasses

import torch
from nets import random_drafter
from tiny import VOCABULARY

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash

DFLASH = DrafterConfig(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=VOCABULARY,
    block_size=5,
    mask_token_id=96,
    target_layer_ids=(0, 1),
    num_target_layers=3,
)
DSPARK = dataclasses.replace(
    DFLASH,
    from_anchor=True,
    markov_rank=6,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    has_input_projection=True,
)
DFLASH2 = dataclasses.replace(
    DFLASH, conv_kernel_size=3, conv_group_size=8, selector_rank=6, selector_top_k=7
)


def net_of(config: DrafterConfig, seed: int, is_fused: bool = True) -> DFlash:
    """As the decoder has it: no gradients, projections side by side."""
    net = random_drafter(config, torch.float32)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(
                1.0 + 0.5 * torch.sin(torch.arange(parameter.numel()) + seed).view_as(parameter)
            )
    net.eval().requires_grad_(False)
    return net.fuse() if is_fused else net
