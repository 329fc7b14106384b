"""Weights that change while requests run: no text changes, and nobody drafts with half of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drafters import DFLASH, DFLASH2, DSPARK, net_of
from tiny import VOCABULARY, as_requests, decode, guessing, random_prompts, texts
from torch import Tensor

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import BlockDrafter, Draft, DraftBatch
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import DrafterWeights, WeightsMailbox
from adaflash_batch.kernels.paged_attention import PackedStep
from adaflash_batch.request import Completion, Request, RowKey, Sampling

MEMBERS = {"dflash": DFLASH, "dspark": DSPARK, "dflash2": DFLASH2}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_running": 3, "token_budget": 16},
    {"max_running": 8, "kv_tokens": 160},
]
GREEDY = Sampling(max_new_tokens=24)
SAMPLED = Sampling(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=7)


def weights_of(net: DFlash) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in net.named_parameters()}


class Recorded:
    """A drafter that notes what it is asked and what it proposes."""

    def __init__(self, inner: BlockDrafter) -> None:
        self.inner = inner
        self.block_size, self.tapped_layers = inner.block_size, inner.tapped_layers
        self.events: list[tuple[Any, ...]] = []

    @property
    def version(self) -> int:
        return self.inner.version

    @version.setter
    def version(self, value: int) -> None:
        raise AssertionError("a drafter numbers itself")

    def draft(self, batch: DraftBatch) -> list[Draft]:
        drafts = self.inner.draft(batch)
        token_ids = [draft.token_ids for draft in drafts]
        self.events.append(("draft", self.version, tuple(batch.keys), token_ids))
        return drafts

    def absorb(self, step: PackedStep, positions: Tensor, features: Tensor) -> None:
        self.events.append(("absorb",))
        self.inner.absorb(step, positions, features)

    def adopt(self, weights: DrafterWeights) -> None:
        self.inner.adopt(weights)
        self.events.append(("adopt", weights.version))

    @property
    def drafts(self) -> list[Any]:
        return [event[3] for event in self.events if event[0] == "draft"]


def run(
    target: Target,
    requests: list[Request],
    net: DFlash,
    newest: Callable[[], DrafterWeights | None] | None = None,
    *,
    token_ids: Tensor | None = None,
    kv_tokens: int = 16384,
    **options: Any,
) -> tuple[Recorded, dict[RowKey, Completion]]:
    made: list[Recorded] = []

    def build(num_pages: int) -> Recorded:
        made.append(Recorded(BlockDrafter(net, target, num_pages, token_ids=token_ids)))
        return made[0]

    ends = frozenset([2])
    decoder = Decoder(target, drafter=build, kv_tokens=kv_tokens, end_token_ids=ends, **options)
    if newest is not None:
        decoder.follow(newest)
    for request in requests:
        decoder.add(request)
    done: dict[RowKey, Completion] = {}
    while decoder.has_work:
        done |= {completion.key: completion for completion in decoder.step()}
    return made[0], done


def changing(config: DrafterConfig, every: int = 2) -> Iterator[DrafterWeights | None]:
    """New weights before every second step, say; three sets of them in turn."""
    sets = [weights_of(net_of(config, seed)) for seed in (1, 2, 3)]
    step = version = 0
    while True:
        is_due = step % every == 0
        version += is_due
        yield DrafterWeights(version, sets[version % 3]) if is_due else None
        step += 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("member", MEMBERS)
def test_weights_that_change_change_no_text(
    llama: Target, member: str, sampling: Sampling, settings: dict[str, Any]
) -> None:
    config = MEMBERS[member]
    requests = as_requests(random_prompts(10), sampling)
    plain = texts(decode(llama, requests, ends=frozenset([2])))
    stream = changing(config)
    drafter, done = run(llama, requests, net_of(config, 0), lambda: next(stream), **settings)
    assert texts(done) == plain
    assert sum(event[0] == "adopt" for event in drafter.events) > 3
    _check_versions(drafter, done)


def _check_versions(drafter: Recorded, done: dict[RowKey, Completion]) -> None:
    """Each row says which version drafted for it first and last."""
    used: dict[RowKey, list[int]] = {}
    for event in drafter.events:
        if event[0] == "draft":
            for key in event[2]:
                used.setdefault(key, []).append(event[1])
    assert len({version for versions in used.values() for version in versions}) > 3
    for key, completion in done.items():
        counts = completion.counts
        if key in used:
            assert (counts.drafter_first, counts.drafter_last) == (used[key][0], used[key][-1])
        else:
            assert counts.drafter_first is None


def test_weights_change_between_steps_only(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never between what the drafter absorbs, its drafts and their verification."""
    order: list[str] = []

    def noting(owner: type, name: str, letter: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            order.append(letter)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noting(Target, "forward", "v")
    for name, letter in (("draft", "d"), ("absorb", "b"), ("adopt", "n")):
        noting(BlockDrafter, name, letter)
    stream = changing(DFLASH, every=1)
    run(llama, as_requests(random_prompts(6), GREEDY), net_of(DFLASH, 0), lambda: next(stream))
    assert re.fullmatch("(n(b?d)?vb?)+", "".join(order))
    assert order.count("d") > 10


@pytest.mark.parametrize("vocabulary", [None, range(1, VOCABULARY, 2)], ids=["all", "some"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize("member", MEMBERS)
def test_adopted_weights_draft_as_those_of_a_new_drafter(
    llama: Target, member: str, is_fused: bool, vocabulary: range | None
) -> None:
    """Packed projections, draft vocabulary, tables of tokens: nothing old is left."""
    config, requests = MEMBERS[member], as_requests(random_prompts(5), GREEDY)
    token_ids = None if vocabulary is None else torch.tensor(list(vocabulary))
    old, new = net_of(config, 0, is_fused), net_of(config, 1)
    mailbox = WeightsMailbox()
    mailbox.put(DrafterWeights(7, weights_of(new)))
    adopting, done = run(llama, requests, old, mailbox.take, token_ids=token_ids)
    fresh, _ = run(llama, requests, new, token_ids=token_ids)
    stale, _ = run(llama, requests, net_of(config, 0), token_ids=token_ids)
    assert adopting.drafts == fresh.drafts
    assert adopting.drafts != stale.drafts
    assert {completion.counts.drafter_first for completion in done.values()} <= {7, None}


def test_bfloat16_takes_float32_weights(llama: Target) -> None:
    drafter = BlockDrafter(net_of(DFLASH, 0).to(torch.bfloat16), llama, 4)
    new = net_of(DFLASH, 1)
    drafter.adopt(DrafterWeights(3, weights_of(new)))
    assert drafter.version == 3
    for ours, theirs in zip(drafter._net.parameters(), new.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


def test_weights_of_another_drafter_are_refused_whole(llama: Target) -> None:
    net = net_of(DFLASH, 0)
    before, new = weights_of(net), weights_of(net_of(DFLASH, 1))
    drafter = BlockDrafter(net, llama, 4, version=2)
    wider = weights_of(
        initialise(dataclasses.replace(DFLASH, intermediate_size=48), torch.Generator())
    )
    wrong = {
        "it lacks norm.weight": {n: t for n, t in new.items() if n != "norm.weight"},
        "it has extra, which is not known": new | {"extra": torch.zeros(1)},
        r"mlp.gate_proj.weight is \[48, 32\] there, \[40, 32\] here": wider,
    }
    for said, tensors in wrong.items():
        with pytest.raises(ConfigError, match=f"version 9 is not this drafter's: .*{said}"):
            drafter.adopt(DrafterWeights(9, tensors))
        assert drafter.version == 2
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, before[name])


def test_a_scripted_drafter_is_told_too(llama: Target) -> None:
    requests = as_requests(random_prompts(4), GREEDY)
    plain = texts(decode(llama, requests))
    drafter, mailbox = guessing(requests, plain), WeightsMailbox()
    decoder = Decoder(llama, drafter=lambda num_pages: drafter, kv_tokens=16384)
    decoder.follow(mailbox.take)
    for request in requests:
        decoder.add(request)
    done: list[Completion] = []
    while decoder.has_work:
        done += decoder.step()
        mailbox.put(DrafterWeights(100 + decoder.num_steps, {}))
    assert {c.key: c.token_ids for c in done} == plain
    assert {c.counts.drafter_last for c in done} <= set(range(100, 100 + decoder.num_steps))
