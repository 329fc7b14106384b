"""Several trainer ranks: the single rank's result, its states, and an end that is reported."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from nets import DFLASH2, DSPARK, TINY, random_drafter
from torch import Tensor
from trajectories import TABLE, repeating, trajectory

from adaflash_batch.adapt.batch_loss import BatchLoss
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer, Trainer, Update
from adaflash_batch.adapt.publishing import MailboxPublisher
from adaflash_batch.adapt.rank_group import RankFailure, RankGroup
from adaflash_batch.adapt.rank_process import RankSetup
from adaflash_batch.adapt.ranks import RankedTrainer, RankPlan
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.scoring import Scorer
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import Trajectory, TrajectoryMailbox, WeightsMailbox

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
CPU = torch.device("cpu")
RATE = 1e-3
# Sums in another order: some 2e-6 after six updates, of weights around 0.15 (AdamW moves a weight
# by RATE however small its gradient is, so one that is nothing but rounding would show as 1e-3).
TOLERANCE = 1e-5

# Five of unequal lengths for two ranks; one of them has no anchor at all.
TEXTS = [trajectory(row, length) for row, length in enumerate((15, 40, 22, 5, 31))]
# Labels 0..59 alone can be drafted, so that ranks have taught positions that they leave out.
HEAD = Head.restricted(TABLE, torch.arange(60))


def options(config: DrafterConfig) -> dict[str, Any]:
    return {
        "net": random_drafter(config, torch.float32),
        "embedding": TABLE,
        "head": HEAD,
        "objective": Objective("opd", clip=0.05),
        "gamma": 4.0,
        "anchors": 8,
        "weight_decay": 0.01,
        "compute": torch.float32,
    }


def single(config: DrafterConfig, state: Mapping[str, Tensor] | None = None) -> DrafterTrainer:
    trainer = DrafterTrainer(**options(config))
    if state is not None:
        trainer.restore(state)
    return trainer


def ranked(config: DrafterConfig, stage: int, num_ranks: int = 2) -> RankedTrainer:
    plan = RankPlan([CPU] * num_ranks, stage=stage, threads=1, timeout=240.0)
    return RankedTrainer(**options(config), plan=plan)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankedTrainer]:
    with ranked(DFLASH2, stage=2) as trainer:
        yield trainer


def begin(trainer: Trainer, config: DrafterConfig) -> None:
    weights = random_drafter(config, torch.float32).named_parameters()
    trainer.restore({f"weight.{name}": each.detach() for name, each in weights})


def learn(
    trainer: Trainer, numbers: Sequence[int], texts: Sequence[Trajectory] = TEXTS
) -> list[Update]:
    seeds = [torch.Generator().manual_seed(number) for number in numbers]
    return [trainer.update(texts, seed, RATE) for seed in seeds]


def assert_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype == torch.float32
        torch.testing.assert_close(tensor, other[name], atol=TOLERANCE, rtol=0.0, msg=name)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def compare_with_single(trainer: RankedTrainer, config: DrafterConfig) -> None:
    alone = single(config)
    before = {name: p.detach().clone() for name, p in alone.net.named_parameters()}
    assert_same(trainer.state(), alone.state())
    # Then one text, of which the second rank has none.
    for numbers, texts in ((range(5), TEXTS), (range(5, 6), TEXTS[1:2])):
        for ours, theirs in zip(
            learn(trainer, numbers, texts), learn(alone, numbers, texts), strict=True
        ):
            assert dataclasses.astuple(ours) == pytest.approx(dataclasses.astuple(theirs), rel=1e-5)
            assert not ours.is_dropped
            assert ours.positions > 0
    assert_close(trainer.state(), alone.state())
    moved = [(p.detach() - before[name]).abs().max() for name, p in trainer.net.named_parameters()]
    assert sum(float(each) > 100 * TOLERANCE for each in moved) > 0.9 * len(moved)


@needs_deepspeed
def test_two_ranks_come_to_what_one_does(two_ranks: RankedTrainer) -> None:
    begin(two_ranks, DFLASH2)
    compare_with_single(two_ranks, DFLASH2)


@needs_deepspeed
def test_a_state_goes_on_as_if_nothing_had_been(two_ranks: RankedTrainer) -> None:
    begin(two_ranks, DFLASH2)
    learn(two_ranks, range(2))
    kept = {name: each.clone() for name, each in two_ranks.state().items()}
    learn(two_ranks, range(2, 4))
    expected = two_ranks.state()
    begin(two_ranks, DFLASH2)
    assert not any(name.startswith("exp_avg") for name in two_ranks.state())
    learn(two_ranks, [77])
    two_ranks.restore(kept)
    assert_same(two_ranks.state(), kept)
    learn(two_ranks, range(2, 4))
    assert_same(two_ranks.state(), expected)


@needs_deepspeed
def test_states_go_from_two_ranks_to_one_and_back(two_ranks: RankedTrainer) -> None:
    expected = single(DFLASH2)
    learn(expected, range(6))
    begin(two_ranks, DFLASH2)
    learn(two_ranks, range(2))
    alone = single(DFLASH2, two_ranks.state())
    learn(alone, range(2, 4))
    two_ranks.restore(alone.state())
    learn(two_ranks, range(4, 6))
    assert_close(two_ranks.state(), expected.state())


@needs_deepspeed
def test_what_is_not_finite_on_one_rank_is_dropped_by_all(two_ranks: RankedTrainer) -> None:
    begin(two_ranks, DFLASH2)
    learn(two_ranks, [0])
    before = {name: each.clone() for name, each in two_ranks.state().items()}
    poisoned = list(TEXTS)
    poisoned[1] = dataclasses.replace(TEXTS[1], features=TEXTS[1].features * math.nan)
    (update,) = learn(two_ranks, [1], poisoned)
    assert update.is_dropped
    assert math.isnan(update.loss)
    assert_same(two_ranks.state(), before)
    alone = single(DFLASH2, before)
    learn(two_ranks, [2])
    learn(alone, [2])
    assert_close(two_ranks.state(), alone.state())


@needs_deepspeed
def test_without_anchors_nothing_is_done(two_ranks: RankedTrainer) -> None:
    begin(two_ranks, DFLASH2)
    before = two_ranks.state()
    (update,) = learn(two_ranks, [0], TEXTS[3:4])
    assert update == learn(single(DFLASH2), [0], TEXTS[3:4])[0]
    assert update.is_dropped
    assert_same(two_ranks.state(), before)


def online(core: Trainer) -> tuple[OnlineTrainer, WeightsMailbox]:
    net = random_drafter(DFLASH2, torch.float32)
    scorer = Scorer(net, embedding=TABLE, head=HEAD, most_anchors=None)
    sizes = dict.fromkeys(("recent_bytes", "replay_bytes", "held_back_bytes"), 2**26)
    pool = ReplayPool(seed=1, held_back_share=0.3, **sizes)
    inbox, outbox = TrajectoryMailbox(2**26), WeightsMailbox()
    plan = RoundPlan(updates=6, batch=3, rate=1e-2, averaging=0.3, pull=5.0)
    for row in range(20):
        inbox.put(repeating(row))
    trainer = OnlineTrainer(core, inbox, pool, scorer, MailboxPublisher(outbox), plan)
    trainer.collect()
    return trainer, outbox


@needs_deepspeed
def test_a_job_learns_by_two_ranks_as_by_one(two_ranks: RankedTrainer) -> None:
    begin(two_ranks, DFLASH2)
    (by_two, ours), (by_one, theirs) = online(two_ranks), online(single(DFLASH2))
    reports = [trainer.run_round() for trainer in (by_two, by_one)]
    found, expected = (dataclasses.replace(each, seconds=0.0) for each in reports)
    assert expected.version == 1
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    assert found.clip_rate == pytest.approx(expected.clip_rate, rel=1e-4)
    found = dataclasses.replace(found, loss=expected.loss, clip_rate=expected.clip_rate)
    assert found == expected
    published, by_single = ours.take(), theirs.take()
    assert published is not None
    assert by_single is not None
    for name, tensor in published.tensors.items():
        # Steps ten times as long as above.
        expected_tensor = by_single.tensors[name]
        torch.testing.assert_close(tensor, expected_tensor, atol=10 * TOLERANCE, rtol=0.0)


@needs_deepspeed
def test_a_rank_that_dies_is_named_and_ends_them_all() -> None:
    with ranked(DSPARK, stage=1) as trainer:
        compare_with_single(trainer, DSPARK)  # the other stage, and the other parts of the loss
        members = list(trainer._group._members)
        pid = members[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailure, match="in `update`: rank 1: was killed by signal 9"):
            learn(trainer, [0])
        assert not any(member.process.is_alive() for member in members)
        with pytest.raises(RankFailure, match="the trainer ranks have ended"):
            trainer.state()


@needs_deepspeed
def test_a_rank_that_fails_says_why() -> None:
    batch = BatchLoss(TABLE, HEAD, Objective(), 4.0)
    nothing = cast(Any, None)
    setup = RankSetup(nothing, batch, torch.float32, weight_decay=0.0, stage=1)
    with pytest.raises(RankFailure, match="in `start`: rank 0: AttributeError") as caught:
        RankGroup(setup, [CPU], threads=1, timeout=240.0)
    assert "rank_process.py" in caught.value.__notes__[0]


DRIVER = """
import os, signal, test_ranks
from nets import TINY
trainer = test_ranks.ranked(TINY, 2)
test_ranks.learn(trainer, [0])
print(*(member.process.pid for member in trainer._group._members), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_deepspeed
def test_ranks_end_with_their_driver_and_leave_stdout_alone(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", DRIVER]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60.0
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank has outlived its driver"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # whose parent is gone and not yet replaced


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RankPlan([CPU])
    with pytest.raises(ConfigError, match="'muon', several trainer ranks have adamw") as caught:
        RankedTrainer(**options(TINY), optimiser="muon", plan=plan)
    assert caught.value.hint == "choose adamw, or one rank"
    with pytest.raises(ConfigError, match="stage is 3"):
        RankPlan([CPU], stage=3)
    with pytest.raises(ConfigError, match="no device"):
        RankPlan([])
    with pytest.raises(ConfigError, match="at once"):
        RankPlan([CPU, torch.device("cuda", 0)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="need DeepSpeed") as caught:
        RankedTrainer(**options(TINY), plan=plan)
    assert caught.value.hint == "pip install 'adaflash-batch[deepspeed]'"


@needs_deepspeed
def test_of_a_state_that_muon_left_the_weights_are_taken(two_ranks: RankedTrainer) -> None:
    begin(two_ranks, DFLASH2)
    state = two_ranks.state()
    two_ranks.restore(state | {"momentum_buffer.fc.weight": torch.zeros(1)})
    taken = two_ranks.state()
    weights = {name for name in state if name.startswith("weight.")}
    assert_same({n: taken[n] for n in weights}, {n: state[n] for n in weights})
    assert not any(taken[n].any() for n in taken if n.startswith("exp_avg"))
