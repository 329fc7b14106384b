"""A drafter that learns between the steps of the very decode that it drafts for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters import DFLASH2, DSPARK
from nets import TINY
from tiny import VOCABULARY, as_requests, decode, random_prompts, texts
from torch import Tensor
from trajectories import TABLE, repeating

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.adapt.control import LearningControl, Rules
from adaflash_batch.adapt.inline import InlineLearning
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.publishing import MailboxPublisher
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.scoring import Scorer
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import TrajectoryMailbox, WeightsMailbox
from adaflash_batch.request import Completion, Request, Sampling
from adaflash_batch.stats import SpeculationCounts

PLENTY = 2**26
PLAN = RoundPlan(updates=20, batch=6, rate=1e-2, least_new=12, least_held_back=2)
ALWAYS = Rules(share=1.0, most_saved=1e9, aim="most")


@dataclasses.dataclass
class Clock:
    """Time passes only where a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def learning(
    net: DFlash,
    table: Tensor,
    head: Tensor,
    notify: Callable[[str], None],
    clock: Clock,
    *,
    rules: Rules = ALWAYS,
    plan: RoundPlan = PLAN,
    held_back_bytes: int = PLENTY,
) -> tuple[InlineLearning, OnlineTrainer, TrajectoryMailbox, WeightsMailbox]:
    core = DrafterTrainer(
        net,
        embedding=table,
        head=Head(head),
        objective=Objective("opd", clip=0.5),
        gamma=4.0,
        anchors=12,
        weight_decay=0.0,
        compute=torch.float32,
    )
    scorer = Scorer(net, embedding=table, head=Head(head), most_anchors=None)
    pool = ReplayPool(
        seed=0,
        recent_bytes=PLENTY,
        replay_bytes=PLENTY,
        held_back_bytes=held_back_bytes,
        held_back_share=0.2,
    )
    inbox, outbox = TrajectoryMailbox(PLENTY), WeightsMailbox()
    trainer = OnlineTrainer(core, inbox, pool, scorer, MailboxPublisher(outbox), plan, clock=clock)
    control = LearningControl(rules)
    return InlineLearning(trainer, control, notify=notify, clock=clock), trainer, inbox, outbox


@torch.no_grad()
def parts_of(target: Target) -> tuple[Tensor, Tensor]:
    """The target's embedding and lm_head."""
    table = target.embed(torch.arange(VOCABULARY)).clone()
    return table, target.head(torch.eye(target.hidden_size)).T.clone()


def following(
    target: Target,
    serving: DFlash,
    requests: list[Request],
    inbox: TrajectoryMailbox,
    outbox: WeightsMailbox,
) -> Decoder:
    """A decoder of these requests, whose trainer is behind the mailboxes."""
    decoder = Decoder(
        target,
        drafter=lambda num_pages: BlockDrafter(serving, target, num_pages),
        kv_tokens=16384,
        max_running=8,
    )
    decoder.capture(serving.config.target_layer_ids, inbox.put)
    decoder.follow(outbox.take)
    for request in requests:
        decoder.add(request)
    return decoder


def run_learning(
    target: Target, requests: list[Request], config: DrafterConfig, lines: list[str]
) -> list[Completion]:
    """As a job would: add, step, learn, until nothing is left; ordered as they end."""
    net = initialise(config, torch.Generator().manual_seed(0))
    serving = initialise(config, torch.Generator().manual_seed(0)).requires_grad_(False).fuse()
    clock = Clock()
    learner, _, inbox, outbox = learning(net, *parts_of(target), lines.append, clock)
    decoder = following(target, serving, requests, inbox, outbox)
    done: list[Completion] = []
    while decoder.has_work:
        finished = decoder.step()
        done += finished
        for completion in finished:
            learner.observe(completion.counts)
        before, clock.now = target.num_forward_tokens, clock.now + 1.0
        learner.between_steps(Outlook(1e6, 1.0))
        assert target.num_forward_tokens == before, "learning made a target pass"
    return done


@pytest.mark.parametrize("config", [DSPARK, DFLASH2], ids=["dspark", "dflash2"])
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_a_job_teaches_its_drafter(
    llama: Target, config: DrafterConfig, temperature: float
) -> None:
    """Text as without a drafter, more accepted as it goes on, and not one token more forwarded."""
    # Without top_p, uniforms often lie within rounding of a token of next to no probability.
    sampling = Sampling(max_new_tokens=24, temperature=temperature, top_p=0.9, seed=3)
    prompts = random_prompts(6, longest=12) * 16
    requests = as_requests(prompts, sampling)
    plain = texts(decode(llama, requests))
    before, lines = llama.num_forward_tokens, list[str]()
    done = run_learning(llama, requests, config, lines)
    assert {completion.key: completion.token_ids for completion in done} == plain
    forwarded = sum(
        len(r.token_ids) + c.counts.steps + c.counts.verified
        for r, c in zip(
            sorted(requests, key=lambda r: r.key), sorted(done, key=lambda c: c.key), strict=True
        )
    )
    assert llama.num_forward_tokens - before == forwarded
    taus = [_tau(done[begin : begin + 24]) for begin in range(0, 96, 24)]
    assert taus[-1] > 1.2 * taus[0], taus
    versions = [(c.counts.drafter_first, c.counts.drafter_last) for c in done]
    assert versions[0] == (0, 0)
    assert versions[-1][1] == max(last or 0 for _, last in versions) > 1
    assert all((first or 0) <= (last or 0) for first, last in versions)
    assert any((first or 0) < (last or 0) for first, last in versions)
    assert sum("published as version" in line for line in lines) >= versions[-1][1]


def _tau(done: list[Completion]) -> float:
    total = SpeculationCounts()
    for completion in done:
        total.add(completion.counts)
    assert total.emitted_per_step is not None
    return total.emitted_per_step


def timed(
    rules: Rules, lines: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> tuple[InlineLearning, OnlineTrainer, TrajectoryMailbox]:
    """Every piece takes a second of a clock that stands still otherwise."""
    net = initialise(TINY, torch.Generator().manual_seed(0))
    plan = dataclasses.replace(PLAN, updates=4, batch=2)
    learner, trainer, inbox, _ = learning(
        net, TABLE, TABLE, lines.append, clock, rules=rules, plan=plan, held_back_bytes=80_000
    )
    advance = trainer.advance

    def slowly() -> Any:
        clock.now += 1.0
        return advance()

    monkeypatch.setattr(trainer, "advance", slowly)
    return learner, trainer, inbox


def test_learning_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(), list[str]()
    rules = Rules(share=0.25, most_saved=2.0, first_gain=0.5, risk=1e9)
    learner, trainer, inbox = timed(rules, lines, clock, monkeypatch)
    shares = []
    for step in range(400):
        clock.now += 0.5
        inbox.put(repeating(step))
        learner.between_steps(Outlook(1e9, 1.0))
        assert learner.seconds <= 0.25 * clock.now + 1.0
        shares.append(learner.seconds / clock.now)
    assert 0.2 < shares[-1] <= 0.26
    assert trainer.counters.rounds > 2
    assert len(lines) == trainer.counters.rounds, lines


def test_learning_that_does_not_pay_stops_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, lines = Clock(), list[str]()
    rules = Rules(share=1.0, most_saved=100.0, short=100.0, long=1000.0, risk=1e9)
    learner, trainer, inbox = timed(rules, lines, clock, monkeypatch)
    clock.now = 50.0
    for row in range(40):
        inbox.put(repeating(row))
    for _ in range(5):
        clock.now += 10.0
        learner.between_steps(Outlook(100, 0.001))
    assert len(lines) == 1
    assert lines[0].startswith("learning has stopped: ")
    assert not learner.wants_texts
    # One piece at most was done to learn what a piece takes.
    assert trainer.counters.updates <= 1
    wanted = []
    for tau in (2.0, 1.2):
        for _ in range(40):
            learner.observe(
                SpeculationCounts(steps=10, drafting=10, accepted=round(10 * (tau - 1)))
            )
        wanted.append(learner.wants_texts)
        learner.between_steps(Outlook(100, 0.001))
    assert wanted == [False, True], "not before acceptance fell"
    assert len(lines) == 1, "what is left is still too little"
