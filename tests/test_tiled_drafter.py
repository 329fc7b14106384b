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
from adaflash_batch.kernels import markov_walk, tiled_linear
from adaflash_batch.kernels.paged_attention import (
    Attention,
    KVLayer,
    PackedStep,
    paged_attention,
    store_kv,
)
from adaflash_batch.kernels.tiled_linear import TiledProduct

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


WALKED = dataclasses.replace(DSPARK, length_head="hazard")


@needs_tiles
@pytest.mark.parametrize("chosen", [None, 19], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("num_blocks", [1, 9])
@torch.inference_mode()
def test_a_markov_head_is_walked_as_the_net_walks(num_blocks: int, chosen: int | None) -> None:
    """Drafts, and what its head says of them; also after other weights came."""
    net = random_drafter(WALKED, torch.bfloat16).eval()
    assert net.markov_head is not None
    for parameter in net.markov_head.parameters():  # so that the token before decides
        parameter.mul_(8.0)
    token_ids = None if chosen is None else torch.arange(3, 3 + 2 * chosen, 2)
    tiled = TiledDrafter.of(net, pages(WALKED), token_ids)
    assert tiled is not None
    assert tiled.walk is not None
    table = normal(WALKED.vocab_size, WALKED.hidden_size, seed=4)
    table = table if token_ids is None else table[token_ids]
    hidden = normal(num_blocks * WALKED.block_size, WALKED.hidden_size, seed=5)
    anchors = torch.arange(num_blocks) * 2
    for turn in range(2):
        asked = (hidden, anchors, lambda rows: rows @ table.T, token_ids)
        ours, theirs = net.propose_judged(*asked, tiled.walk), net.propose_judged(*asked)
        assert torch.equal(ours.drafts, theirs.drafts)
        assert len({*ours.drafts.flatten().tolist()}) > 3
        assert ours.survival is not None
        torch.testing.assert_close(ours.survival, theirs.survival, rtol=1e-3, atol=1e-4)
        if turn == 0:
            before = ours.drafts
            for parameter in net.parameters():
                parameter.copy_(parameter.flip(0))
            tiled.refresh()
    assert not torch.equal(before, ours.drafts)


@needs_tiles
@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_other_markov_heads_are_walked_by_the_net(kind: str) -> None:
    config = dataclasses.replace(DSPARK, markov_head_type=kind)
    tiled = TiledDrafter.of(random_drafter(config, torch.bfloat16), pages(config))
    assert tiled is not None
    assert tiled.walk is None


@needs_tiles
@torch.inference_mode()
def test_the_walk_takes_the_first_of_equals_and_bears_what_is_no_number() -> None:
    rows = TiledProduct(tiled_linear.tiled(torch.zeros(40, 4).bfloat16()), None, 40)
    logits, embedded = torch.zeros(2, 2, 40).bfloat16(), torch.zeros(40, 4).bfloat16()
    logits[0, 0, [7, 33]] = 2.0
    logits[0, 1, 39] = 1.0
    logits[1] = torch.nan
    drafts, top, second = markov_walk.markov_walk(
        logits, torch.tensor([1, 2]), embedded, rows, None
    )
    assert drafts.tolist() == [[7, 39], [0, 0]]
    assert top[0, 0] == second[0, 0]
    expected = logits[0].float().log_softmax(-1).max(-1).values
    torch.testing.assert_close(top[0], expected)
