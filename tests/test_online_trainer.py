"""Rounds of learning: only what is better is published, the rest is taken back whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from nets import TINY, random_drafter
from torch import Tensor
from trajectories import TABLE, repeating

from adaflash_batch.adapt import scoring
from adaflash_batch.adapt.evaluate import Acceptance, evaluate
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer, Update
from adaflash_batch.adapt.publishing import MailboxPublisher, TrainerState
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.round_report import RoundReport
from adaflash_batch.adapt.scoring import Comparison, Scorer
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.drafter.model import initialise
from adaflash_batch.exchange import Trajectory, TrajectoryMailbox, WeightsMailbox

PLAN = RoundPlan(updates=20, batch=4, rate=1e-2, least_new=8, least_held_back=3, seed=5)
PLENTY = 2**26


@dataclasses.dataclass
class Made:
    """A trainer with everything around it."""

    trainer: OnlineTrainer
    core: DrafterTrainer
    inbox: TrajectoryMailbox
    outbox: WeightsMailbox
    pool: ReplayPool
    publisher: MailboxPublisher

    def feed(self, trajectories: Iterable[Trajectory]) -> None:
        for each in trajectories:
            self.inbox.put(each)
        self.trainer.collect()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.core.net.named_parameters()}


def make(
    kind: str = "opd",
    dtype: torch.dtype = torch.float32,
    optimiser: str = "adamw",
    **plan: Any,
) -> Made:
    core = DrafterTrainer(
        random_drafter(TINY, torch.float32),
        embedding=TABLE,
        head=Head(TABLE),
        objective=Objective(kind, clip=0.05),  # type: ignore[arg-type]
        gamma=4.0,
        anchors=8,
        weight_decay=0.0,
        compute=dtype,
        optimiser=optimiser,  # type: ignore[arg-type]
    )
    table = TABLE.to(dtype)
    scorer = Scorer(core.working, embedding=table, head=Head(table), most_anchors=None)
    sizes = {"recent_bytes": PLENTY, "replay_bytes": PLENTY, "held_back_bytes": PLENTY}
    pool = ReplayPool(seed=1, held_back_share=0.3, **sizes)
    inbox, outbox = TrajectoryMailbox(PLENTY), WeightsMailbox()
    publisher = MailboxPublisher(outbox)
    trainer = OnlineTrainer(core, inbox, pool, scorer, publisher, dataclasses.replace(PLAN, **plan))
    return Made(trainer, core, inbox, outbox, pool, publisher)


TEXTS = [repeating(row) for row in range(30)]


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["opd", "forward_kl", "ce"])
def test_what_is_learnt_is_published(kind: str, dtype: torch.dtype) -> None:
    made = make(kind, dtype)
    made.feed(TEXTS)
    reports = [made.trainer.run_round() for _ in range(3)]
    assert reports[0].fault is None
    assert reports[0].tau_before is not None
    assert reports[0].tau_before < 1.3
    assert max(report.tau_after or 0.0 for report in reports) > 2.5
    assert reports[0].updates == PLAN.updates
    assert reports[1].loss < reports[0].loss
    assert (reports[0].clip_rate > 0.0) == (kind == "opd")
    # Every round begins where the one before ended: the same texts, the same score.
    for before, after in pairwise(reports):
        assert after.tau_before == (before.tau_before if before.fault else before.tau_after)
    newest = made.outbox.take()
    assert newest is not None
    assert newest.version == reports[-1].version == made.trainer.counters.published > 0
    assert {tensor.dtype for tensor in newest.tensors.values()} == {dtype}


def test_what_all_rounds_came_to_is_measured_against_the_first_weights() -> None:
    """Not summed up from gains that rounds were chosen for."""
    made = make()
    made.feed(TEXTS)
    reports = [made.trainer.run_round() for _ in range(3)]
    for report in reports:
        assert report.tau_first == reports[0].tau_before
        served = report.tau_before if report.fault else report.tau_after
        assert served is not None
        assert report.tau_first is not None
        assert report.gained == served / report.tau_first
    # A process that goes on where another one ended counts from there.
    made.trainer.restore(made.trainer.state(), version=7)
    again = made.trainer.run_round()
    assert again.tau_first == again.tau_before
    assert again.tau_before is not None
    assert again.tau_before > 1.5 * (reports[0].tau_before or 9.0)


def learnt() -> Made:
    made = make()
    made.feed(TEXTS)
    for _ in range(2):
        made.trainer.run_round()
    made.outbox.take()
    return made


def test_what_is_worse_is_taken_back_whole() -> None:
    good, made = learnt(), make(rate=0.5)
    made.feed(TEXTS)
    made.trainer.restore(good.trainer.state(), version=2)
    before = made.weights()
    state = {name: tensor.clone() for name, tensor in made.core.state().items()}
    report = made.trainer.run_round()
    assert (report.fault, report.is_kept) == ("worse", False)
    assert report.tau_before is not None
    assert report.tau_after is not None
    assert report.tau_after < report.tau_before
    assert report.gain == 0.0
    assert (report.version, made.trainer.version) == (2, 2)
    assert made.outbox.take() is None
    counters = good.trainer.counters
    expected = dataclasses.replace(counters, rounds=counters.rounds + 1, updates=60, not_better=1)
    assert made.trainer.counters == expected
    assert_same(made.weights(), before)
    assert_same(made.core.state(), state)


def test_a_first_round_that_is_taken_back_leaves_a_fresh_optimiser() -> None:
    made = make(pull=1e9, tolerance=-1.0)  # every update is undone, so nothing is better
    made.feed(TEXTS)
    before = made.weights()
    report = made.trainer.run_round()
    assert report.fault == "worse"
    assert report.tau_before == report.tau_after
    assert_same(made.weights(), before)
    assert_same(made.core.state(), {f"weight.{name}": each for name, each in before.items()})


def test_what_is_hardly_worse_is_trained_on_but_not_served() -> None:
    made = make(rate=1e-9)
    made.feed(TEXTS)
    before, served = made.weights(), made.trainer.state()
    report = made.trainer.run_round()
    assert (report.fault, report.is_kept, report.gain) == ("not better", True, 0.0)
    assert made.outbox.take() is None
    assert any(not torch.equal(each, before[name]) for name, each in made.weights().items())
    assert_same(made.trainer.state().tensors, served.tensors)


def test_what_is_not_finite_ends_the_round_at_once() -> None:
    made = learnt()
    before, num_rounds = made.weights(), made.trainer.counters.rounds
    for each in map(repeating, range(300, 330)):
        assert each.last_hidden is not None
        huge = torch.full_like(each.last_hidden, 3e38)
        if not made.pool.is_held_back(each.key):
            made.feed([dataclasses.replace(each, last_hidden=huge)])
    report = made.trainer.run_round()
    assert report.fault == f"the loss of update {report.updates + 1} was not finite"
    assert report.updates < PLAN.updates
    assert report.tau_after is None
    assert made.trainer.counters.not_finite == 1
    assert made.trainer.counters.rounds == report.number == num_rounds + 1
    assert_same(made.weights(), before)
    assert made.outbox.take() is None
    assert made.trainer.round_done == 0.0


def test_the_report_says_what_was_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for loss, said in ((1.0, "gradient"), (math.inf, "loss")):
        made = make()
        made.feed(TEXTS)
        dropped = Update(loss, 0.0, 0.0, positions=9, is_dropped=True)
        monkeypatch.setattr(DrafterTrainer, "update", lambda *_, dropped=dropped: dropped)
        report = made.trainer.run_round()
        assert report.fault == f"the {said} of update 1 was not finite"
        assert "published" not in report.describe()
        assert "back to version 0" in report.describe()


def test_updates_without_anything_to_learn_are_no_fault() -> None:
    made = make()
    made.feed(each for each in TEXTS if made.pool.is_held_back(each.key))
    report = made.trainer.run_round()
    assert (report.updates, report.fault) == (0, "not better")
    assert math.isnan(report.loss)
    assert "loss" not in report.describe()


def test_trajectories_that_are_not_finite_are_refused() -> None:
    made = make()
    whole = repeating(0)
    assert whole.last_hidden is not None
    broken = [
        dataclasses.replace(whole, features=whole.features * math.nan),
        dataclasses.replace(whole, last_hidden=whole.last_hidden * math.inf),
    ]
    made.feed([*broken, whole, dataclasses.replace(whole, last_hidden=None)])
    assert made.trainer.counters.refused == 2
    assert made.pool.num_added + len(made.pool.held_back) == 2


@pytest.mark.parametrize(
    ("plan", "optimiser", "dtype"),
    [
        ({}, "adamw", torch.float32),
        ({"averaging": 0.7}, "muon", torch.bfloat16),
        ({"averaging": 0.5, "pull": 5.0}, "adamw", torch.float32),
    ],
    ids=["plain", "averaged, muon, bfloat16", "averaged and pulled"],
)
def test_a_restored_trainer_goes_on_to_the_same_weights(
    plan: dict[str, float], optimiser: str, dtype: torch.dtype
) -> None:
    parts = [TEXTS[:12], TEXTS[12:20], TEXTS[20:]]
    whole, again = (make("opd", dtype, optimiser, **plan) for _ in range(2))
    whole.feed(parts[0])
    whole.trainer.run_round()
    kept = whole.trainer.state()
    kept = TrainerState({name: each.clone() for name, each in kept.tensors.items()}, kept.counters)
    version = whole.trainer.version
    for part in parts[1:]:
        whole.feed(part)
        expected = whole.trainer.run_round()
    again.feed(parts[0])
    again.trainer.restore(kept, version)
    again.publisher.version = version
    for part in parts[1:]:
        again.feed(part)
        found = again.trainer.run_round()
    # Time differs, and what it was at first is counted from where the process began.
    found, expected = (
        dataclasses.replace(each, seconds=0.0, tau_first=None) for each in (found, expected)
    )
    assert found == expected
    assert again.trainer.counters == whole.trainer.counters
    assert again.trainer.counters.updates == 3 * PLAN.updates
    assert_same(again.trainer.state().tensors, whole.trainer.state().tensors)
    ours, theirs = again.outbox.take(), whole.outbox.take()
    assert ours is not None
    assert theirs is not None
    assert_same(ours.tensors, theirs.tensors)


def test_a_round_under_way_is_not_in_the_state() -> None:
    made = make()
    made.feed(TEXTS)
    before = made.weights()
    for _ in range(5):
        assert made.trainer.advance() is None
    assert made.trainer.counters.updates == 5
    state = made.trainer.state()
    assert_same({f"weight.{name}": each for name, each in before.items()}, state.tensors)
    assert state.counters["updates"] == 0
    assert any(not torch.equal(now, before[name]) for name, now in made.weights().items())
    made.trainer.restore(state, 0)
    assert_same(made.weights(), before)
    assert made.trainer.counters.updates == 0


def test_a_piece_is_one_update_or_one_text() -> None:
    made = make()
    made.feed(TEXTS)
    shares, reports = [made.trainer.round_done], list[RoundReport]()
    while not reports:
        before = made.trainer.counters.updates
        report = made.trainer.advance()
        assert made.trainer.counters.updates - before <= 1
        if report is not None:
            reports.append(report)
        else:
            shares.append(made.trainer.round_done)
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert 0.9 < shares[-1] <= 1.0
    assert len(shares) > PLAN.updates + len(made.pool.held_back)
    assert made.trainer.round_done == 0.0


def test_a_round_waits_for_enough_texts() -> None:
    made = make()

    def is_ready() -> bool:
        return made.trainer.is_ready

    train = [each for each in TEXTS if not made.pool.is_held_back(each.key)]
    held = [each for each in TEXTS if made.pool.is_held_back(each.key)]
    made.feed(train[:8] + held[:2])
    assert not is_ready(), "too few to score"
    made.feed(held[2:3])
    assert is_ready()
    made.trainer.run_round()
    made.feed(train[8:15])
    assert not is_ready(), "too few new ones"
    made.feed(train[15:16])
    assert is_ready()
    made.trainer.advance()
    assert is_ready(), "a round is under way"


def test_averaged_weights_are_what_is_published() -> None:
    made = make(averaging=0.75)
    made.feed(TEXTS)
    mean = made.weights()
    for _ in range(PLAN.updates):
        made.trainer.advance()
        mean = {n: 0.75 * mean[n] + 0.25 * each for n, each in made.weights().items()}
    report = made.trainer.run_round()
    assert report.fault is None
    published = made.outbox.take()
    assert published is not None
    for name, tensor in published.tensors.items():
        torch.testing.assert_close(tensor, mean[name], atol=1e-6, rtol=1e-5)
    assert not torch.equal(published.tensors["fc.weight"], made.weights()["fc.weight"])


def test_the_pull_keeps_weights_near_where_the_round_began() -> None:
    def moved(pull: float) -> float:
        made = make(pull=pull)
        made.feed(TEXTS)
        before = made.weights()
        for _ in range(PLAN.updates):
            made.trainer.advance()
        return sum(float((p - before[n]).norm()) for n, p in made.weights().items())

    distances = [moved(pull) for pull in (0.0, 10.0, 50.0)]
    assert distances[0] > 1.1 * distances[1] > 1.1**2 * distances[2]


def test_nobody_writes_to_what_was_published() -> None:
    made = make()
    made.feed(TEXTS)
    made.trainer.run_round()
    first = made.outbox.take()
    assert first is not None
    copies = {name: tensor.clone() for name, tensor in first.tensors.items()}
    made.trainer.run_round()
    assert_same(first.tensors, copies)


def test_both_are_scored_on_the_same_texts_and_the_served_ones_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[float, int]] = []

    def noting(net: Any, text: Trajectory, *others: Any, **options: Any) -> Acceptance:
        calls.append((float(net.fc.weight[0, 0]), text.key.row))
        return evaluate(net, text, *others, **options)

    monkeypatch.setattr(scoring, "evaluate", noting)
    net = initialise(TINY, torch.Generator().manual_seed(0))
    scorer = Scorer(net, embedding=TABLE, head=Head(TABLE), most_anchors=None)
    served, candidate = ({n: p.detach() + c for n, p in net.named_parameters()} for c in (0.0, 1.0))

    def compare(rows: range) -> Comparison | None:
        calls.clear()
        work = scorer.compare(candidate, served, [repeating(row) for row in rows])
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: Comparison | None = end.value
                return result

    def rows_of(weights: Mapping[str, Tensor]) -> list[int]:
        return [row for value, row in calls if value == float(weights["fc.weight"][0, 0])]

    result = compare(range(4))
    assert result is not None
    assert (rows_of(candidate), rows_of(served)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert result == compare(range(4))
    assert (rows_of(candidate), rows_of(served)) == ([0, 1, 2, 3], [])
    compare(range(2, 6))
    assert (rows_of(candidate), rows_of(served)) == ([2, 3, 4, 5], [4, 5])
    scorer.accept()
    served, candidate = candidate, served
    swapped = compare(range(2, 6))
    assert rows_of(served) == []
    scorer.forget()
    assert compare(range(2, 6)) == swapped
    assert rows_of(served) == [2, 3, 4, 5]


def test_a_score_is_that_of_a_net_with_these_weights() -> None:
    made = learnt()
    held = made.pool.held_back
    total = Acceptance()
    for each in held:
        total.add(evaluate(made.core.net, each, TABLE, lambda rows: rows @ TABLE.T))
    report = made.trainer.run_round()
    assert report.tau_before == pytest.approx(total.emitted_per_anchor, abs=1e-6)


def test_reports_read_well() -> None:
    report = RoundReport(3, 48, 21.42, 2.3456, 0.0021, 1.7104, 1.8388, 4, None)
    assert report.describe() == (
        "learning, round 3: 48 updates in 21.4 s, loss 2.346, 0.21% clipped, "
        "τ 1.710 -> 1.839 on held-back rows: published as version 4"
    )
    assert report.gain == pytest.approx(0.0751, abs=1e-3)
    back = dataclasses.replace(report, fault="worse", version=3, clip_rate=0.0)
    assert back.describe().endswith("on held-back rows: worse, back to version 3")
    kept = dataclasses.replace(back, fault="not better", is_kept=True)
    assert kept.describe().endswith(": not better yet, version 3 goes on drafting")
