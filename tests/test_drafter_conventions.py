"""A wrong convention leaves the text right and ruins the acceptance: only decoding finds it.

The target's next token is a fixed function of the last one. Drafters of each member learn it, are
saved and loaded, and draft for real; then the same tensors are read in each wrong way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny import as_requests, decode, texts, tiny_llama
from torch import Tensor

from adaflash_batch.drafter.checkpoint import TargetFacts, load, save
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.drafter.vocabulary import VOCABULARY, load_vocabulary
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Sampling

V = H = 32
MASK = V - 1
BLOCK = 5
KV_TOKENS = 2048
RIGHT, WRONG = 0.9, 0.3  # bounds of the acceptance rate; seen: 1.0, and at most 0.13

_ORDER = torch.randperm(MASK, generator=torch.Generator().manual_seed(0))
FOLLOWER = torch.full((V,), MASK)  # one cycle through all tokens but the mask
FOLLOWER[_ORDER] = _ORDER.roll(-1)
LEADER = torch.empty(V, dtype=torch.long).scatter_(0, FOLLOWER, torch.arange(V))

DFLASH = DrafterConfig(
    hidden_size=H,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=V,
    block_size=BLOCK,
    mask_token_id=MASK,
    target_layer_ids=(0, 1),
    num_target_layers=3,
)
DSPARK = dataclasses.replace(DFLASH, from_anchor=True)
MARKOV = dataclasses.replace(DSPARK, markov_rank=V)
# So small a multiplier leaves the choice among the candidates to the selector.
DFLASH2 = dataclasses.replace(
    DFLASH,
    conv_kernel_size=2,
    conv_group_size=4,
    selector_rank=12,
    selector_top_k=16,
    output_multiplier=0.01,
)
PROJECTED = dataclasses.replace(DFLASH, has_input_projection=True)
FACTS = TargetFacts(vocab_size=V, hidden_size=H, num_hidden_layers=3, name="cycle")

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> Target:
    """A Llama whose layers add nothing: what follows depends on the last token alone."""
    model = tiny_llama(0, vocab_size=V, hidden_size=H)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(V))
        model.get_output_embeddings().weight.copy_(torch.eye(V)[LEADER])
    return Target.of(model, "cycle")


def chain(start: Tensor, length: int, step: Tensor) -> Tensor:
    """[.., length]: the tokens after `start`, or before it when `step` is LEADER."""
    tokens = []
    for _ in range(length):
        start = step[start]
        tokens.append(start)
    return torch.stack(tokens, dim=-1)


@cache
def trained(config: DrafterConfig, steps: int = 220) -> DFlash:
    """A drafter that knows the cycle; every token is an anchor of every batch."""
    generator = torch.Generator().manual_seed(0)
    net = initialise(config, generator)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "conv" in name or "selector" in name or "markov" in name:
                parameter.normal_(0.0, 0.5, generator=generator)
            elif parameter.dim() > 1:
                parameter.mul_(5.0)
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    anchors = torch.arange(MASK)
    for _ in range(steps):
        length = int(torch.randint(1, 36, (), generator=generator))
        loss = loss_of(net, anchors, length)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    return net.requires_grad_(False)


def loss_of(net: DFlash, anchors: Tensor, length: int) -> Tensor:
    """Cross-entropy of all drafts behind `length` tokens of context."""
    wanted = chain(anchors, net.config.num_drafts, FOLLOWER)
    previous = torch.cat((anchors[:, None], wanted[:, :-1]), dim=1)
    rows = net.drafting_rows(block(net, anchors, length))
    logits = rows @ torch.eye(V)[LEADER].T
    if net.markov_head is not None:
        logits = logits + net.markov_head.bias(rows, previous)
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    if net.candidate_selector is not None:
        every = torch.arange(V).expand(*wanted.shape, -1)
        scores = net.scaled(logits) + net.candidate_selector.edges(rows, previous, every)
        loss = loss + F.cross_entropy(scores.flatten(0, 1), wanted.flatten())
    return loss


def block(net: DFlash, anchors: Tensor, length: int) -> Tensor:
    """The net's output for blocks behind the chain that led to each anchor."""
    config, count = net.config, len(anchors)
    before = chain(anchors, length, LEADER).flip(-1)
    context = net.context(torch.eye(V)[before.flatten()].repeat(1, 2))
    positions = torch.arange(length).repeat(count)
    k_context, v_context = net.context_kv(0, context, *net.rotary(positions))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat((k_context.view(count, length, 2, 8), k.view(count, -1, 2, 8)), dim=1)
        values = torch.cat((v_context.view(count, length, 2, 8), v.view(count, -1, 2, 8)), dim=1)
        out = F.scaled_dot_product_attention(
            q.view(count, -1, 4, 8).transpose(1, 2),
            keys.repeat_interleave(2, 2).transpose(1, 2),
            values.repeat_interleave(2, 2).transpose(1, 2),
        )
        return out.transpose(1, 2).reshape(-1, 32)

    ids = torch.full((count, config.block_size), MASK)
    ids[:, 0] = anchors
    positions = (length + torch.arange(config.block_size)).repeat(count)
    rows = net.rows(torch.eye(V)[ids.flatten()], torch.eye(V)[before[:, -1]])
    return net.block(rows, *net.rotary(positions), attend)


def acceptance(folder: Path, target: Target) -> float:
    """Of real decoding with the drafter in a folder; its text must be that of plain decoding."""
    starts = torch.tensor([3, 7, 12, 19, 25, 30])
    prompts = [chain(start, 2 + index, FOLLOWER).tolist() for index, start in enumerate(starts)]
    requests = as_requests(prompts, Sampling(max_new_tokens=26))
    net = load(folder, FACTS, dtype=torch.float32).requires_grad_(False).fuse()
    tokens = load_vocabulary(folder, net.config)
    drafter = BlockDrafter(net, target, KV_TOKENS // PAGE, token_ids=tokens)
    done = decode(target, requests, drafter=drafter, kv_tokens=KV_TOKENS, max_running=4)
    assert texts(done) == texts(decode(target, requests))
    widest = max(len(completion.counts.accepted_hist) for completion in done.values())
    assert widest <= net.config.num_drafts + 1
    verified = sum(completion.counts.verified for completion in done.values())
    return sum(completion.counts.accepted for completion in done.values()) / verified


def rewrite(
    folder: Path,
    *,
    tensors: Callable[[Tensors], Tensors] = lambda found: found,
    config: Callable[[dict[str, Any]], dict[str, Any]] = lambda found: found,
) -> None:
    """Change a checkpoint on disk."""
    path = folder / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text()))))
    changed = tensors(load_file(folder / "model.safetensors"))
    changed = {name: tensor.contiguous() for name, tensor in changed.items()}
    save_file(changed, folder / "model.safetensors")


MEMBERS = pytest.mark.parametrize(
    "config",
    [DFLASH, DSPARK, MARKOV, DFLASH2, PROJECTED],
    ids=["dflash", "dspark", "markov", "dflash2", "projected"],
)


@MEMBERS
def test_each_member_is_accepted_when_it_is_read_as_it_was_written(
    tmp_path: Path, target: Target, config: DrafterConfig
) -> None:
    save(trained(config), tmp_path / "drafter")
    assert acceptance(tmp_path / "drafter", target) > RIGHT


@MEMBERS
def test_each_member_is_accepted_from_a_vocabulary(
    tmp_path: Path, target: Target, config: DrafterConfig
) -> None:
    """All tokens but the first: every row of the head stands for another token than its own."""
    save(trained(config), tmp_path / "drafter")
    save_file({"token_ids": torch.arange(1, V)}, tmp_path / "drafter" / VOCABULARY)
    # Drafts behind the missing token are lost.
    assert acceptance(tmp_path / "drafter", target) > 0.7


def _as_dspark(config: dict[str, Any]) -> dict[str, Any]:
    extra = {"markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512}
    own = config.pop("dflash_config")
    return {**config, **own, **extra, "architectures": ["Qwen3DSparkModel"]}


def _as_dflash(config: dict[str, Any]) -> dict[str, Any]:
    own = {name: config["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    return {**config, "architectures": ["DFlashDraftModel"], "dflash_config": own}


def test_an_anchor_off_by_one_is_not_accepted(tmp_path: Path, target: Target) -> None:
    """One tensor layout, two conventions: the architecture alone tells them apart."""
    save(trained(DFLASH), tmp_path / "dflash")
    rewrite(tmp_path / "dflash", config=_as_dspark)
    assert acceptance(tmp_path / "dflash", target) < WRONG
    save(trained(DSPARK), tmp_path / "dspark")
    rewrite(tmp_path / "dspark", config=_as_dflash)
    assert acceptance(tmp_path / "dspark", target) < WRONG


def test_deepspecs_dflash_drafts_from_the_anchor(tmp_path: Path, target: Target) -> None:
    """Published as "dflash", it is DSpark with markov_rank 0; with the target's matrices in it."""
    save(trained(DSPARK), tmp_path / "drafter")
    copies = {"embed_tokens.weight": torch.ones(V, H), "lm_head.weight": torch.ones(V, H)}
    rewrite(tmp_path / "drafter", config=_as_dspark, tensors=lambda found: found | copies)
    assert acceptance(tmp_path / "drafter", target) > RIGHT


def _kernels(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    """Read the convolutions' tensors, as [2, K, G, H / G or H], in another order."""

    def apply(tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            if "_conv." in name:
                viewed = tensor.view(2, 2, 8, -1)
                tensors[name] = change(viewed).reshape(tensor.shape)
        return tensors

    return apply


def _swap(first: str, second: str) -> Callable[[Tensors], Tensors]:
    return lambda found: {**found, first: found[second], second: found[first]}


@pytest.mark.parametrize(
    "change",
    [
        _kernels(lambda kernel: kernel.flip(1)),
        _kernels(lambda kernel: kernel.flip(0)),
        _kernels(lambda kernel: kernel.transpose(0, 1)),
        _kernels(lambda kernel: kernel.permute(2, 0, 1, 3)),
        _swap("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"),
    ],
    ids=["taps", "sides", "taps-for-sides", "groups-first", "codebooks"],
)
def test_dflash2_read_in_another_order_is_not_accepted(
    tmp_path: Path, target: Target, change: Callable[[Tensors], Tensors]
) -> None:
    save(trained(DFLASH2), tmp_path / "drafter")
    rewrite(tmp_path / "drafter", tensors=change)
    assert acceptance(tmp_path / "drafter", target) < WRONG


def test_the_markov_matrices_the_other_way_round_are_not_accepted(
    tmp_path: Path, target: Target
) -> None:
    """A head that knows the cycle by itself, over a backbone that knows nothing."""
    net = initialise(MARKOV, torch.Generator().manual_seed(1))
    assert net.markov_head is not None
    with torch.no_grad():
        net.markov_head.markov_w1.weight.copy_(9 * torch.eye(V))
        net.markov_head.markov_w2.weight.copy_(torch.eye(V)[LEADER])
    save(net, tmp_path / "drafter")
    assert acceptance(tmp_path / "drafter", target) == 1.0
    swap = _swap("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    rewrite(tmp_path / "drafter", tensors=swap)
    assert acceptance(tmp_path / "drafter", target) < WRONG
