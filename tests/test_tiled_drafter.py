"""A drafter by the target's kernels computes what its net does, also after other weights came."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from nets import CAUSAL, DSPARK, PROJECTED, TINY, WINDOWED, random_drafter
from test_decoder_stack import needs_tiles
from torch import Tensor

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.engine.tiled_drafter import TiledDrafter
from adaflash_batch.kernels.paged_attention import (
    Attention,
    KVLayer,
    PackedStep,
    paged_attention,
    store_kv,
)

SCALED = dataclasses.replace(TINY, input_embedding_scale=1.7)
CONFIGS = {
    "dflash": TINY,
    "windows": WINDOWED,
    "dspark": DSPARK,
    "projection": PROJECTED,
    "scaled": SCALED,
}
CONTEXT = (37, 5)


def pages(config: DrafterConfig) -> list[KVLayer]:
    sizes = (4, config.num_key_value_heads, config.head_dim)
    layers = range(config.num_hidden_layers)
    return [KVLayer.empty(*sizes, torch.bfloat16, torch.device("cpu")) for _ in layers]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def steps(config: DrafterConfig) -> tuple[PackedStep, PackedStep]:
    """Two requests' context, then a block of each behind it."""
    table = np.array([[3, 0], [1, 2]], dtype=np.int32)
    length = np.array(CONTEXT, dtype=np.int32)
    context = PackedStep(np.array([0, length[0]], dtype=np.int32), length, 0 * length, table)
    block = np.full(2, config.block_size, dtype=np.int32)
    start = np.array([0, config.block_size], dtype=np.int32)
    return context, PackedStep(start, block, length, table)


def by_net(net: DFlash, features: Tensor, embeddings: Tensor, states: Tensor) -> Tensor:
    config, kv = net.config, pages(net.config)
    context, block = steps(config)
    fused = net.context(features)
    rotary = net.rotary(torch.cat([torch.arange(count) for count in CONTEXT]))
    for layer, each in enumerate(kv):
        store_kv(context, each, *net.context_kv(layer, fused, *rotary))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = config.windows[layer] or 0
        how = Attention(config.head_dim**-0.5, window=window, causal=config.causal[layer])
        return paged_attention(block, kv[layer], q, k, v, how)

    return net.block(net.rows(embeddings, states), *net.rotary(block_positions(config)), attend)


def block_positions(config: DrafterConfig) -> Tensor:
    return torch.cat([torch.arange(count, count + config.block_size) for count in CONTEXT])


@needs_tiles
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_it_computes_what_the_net_does(name: str) -> None:
    config = CONFIGS[name]
    net = random_drafter(config, torch.bfloat16).eval()
    tiled = TiledDrafter.of(net, pages(config))
    assert tiled is not None
    context, block = steps(config)
    features = normal(sum(CONTEXT), config.num_features, seed=1)
    embeddings = normal(2 * config.block_size, config.hidden_size, seed=2)
    before, states = embeddings.clone(), normal(2, config.hidden_size, seed=3)
    for turn in range(2):
        tiled.absorb(features, torch.cat([torch.arange(n) for n in CONTEXT]), context)
        given = states if config.has_input_projection else None
        ours = tiled.block(embeddings, given, block_positions(config), block).float()
        theirs = by_net(net, features, embeddings, states).float()
        assert (ours - theirs).pow(2).mean().sqrt() < 0.02 * theirs.pow(2).mean().sqrt()
        assert torch.equal(embeddings, before)
        if turn == 0:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.7)
                    parameter.add_(0.1)
            tiled.refresh()


@needs_tiles
def test_nets_with_convolutions_and_nets_in_float32_are_run_as_they_are() -> None:
    assert TiledDrafter.of(random_drafter(CAUSAL, torch.bfloat16), pages(CAUSAL)) is None
    assert TiledDrafter.of(random_drafter(TINY, torch.float32), pages(TINY)) is None
