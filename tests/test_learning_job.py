"""A whole job that learns: the same text, no target pass for it, and nothing lost on the way."""

from __future__ import annotations

import functools
import math
import resource
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from folders import Listener
from learning_jobs import NUM_ROWS, QUICK, UPDATES, Workplace
from transformers.models.llama.modeling_llama import LlamaModel

from adaflash_batch.adapt.batch_loss import BatchLoss
from adaflash_batch.adapt.publishing import TrainerState
from adaflash_batch.adapt.trainer import OnlineTrainer
from adaflash_batch.drafter import versions
from adaflash_batch.drafter.store import find_versions
from adaflash_batch.drafter.versions import TRAINING, VersionStore
from adaflash_batch.durable import locked
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.exchange import Trajectory, TrajectoryMailbox
from adaflash_batch.summary import Summary


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """With the text of plain decoding, and a job that learnt."""
    found = Workplace.make(tmp_path_factory.mktemp("place"))
    found.run("plain", {"speculation.drafter": None})
    return found


@pytest.fixture(scope="module")
def learnt(place: Workplace) -> tuple[Summary, list[str]]:
    """A job that learnt, what it said in the end and on the way."""
    return learn(place, "learnt")


def learn(
    place: Workplace, name: str, keys: Mapping[str, object] | None = None
) -> tuple[Summary, list[str]]:
    """Run a job that learns; its text is that of plain decoding. Also what it told."""
    listener = Listener()
    summary = place.run(name, {**QUICK, **(keys or {})}, listener)
    assert summary.exit_code == 0
    assert place.texts(name) == place.texts("plain")
    return summary, listener.lines


def num_published(lines: list[str]) -> int:
    return sum(": published as version" in line for line in lines)


def test_a_job_learns_and_its_text_stays(
    place: Workplace, learnt: tuple[Summary, list[str]]
) -> None:
    summary, lines = learnt
    place.run("frozen", {"adapt.when": "off", "speculation.when": "always"})
    assert place.texts("frozen") == place.texts("plain")
    published = num_published(lines)
    assert summary.fields["versions_published"] == published >= 2
    assert summary.fields["drafter_version"] in (published, published - 1)
    updates, seconds = summary.fields["updates"], summary.fields["learning_s"]
    assert isinstance(updates, int)
    assert isinstance(seconds, float)
    assert updates == UPDATES * sum(line.startswith("learning, round") for line in lines)
    assert seconds > 0.0
    footers = place.footers("learnt")
    assert [footer.sequence for footer in footers] == [*range(len(footers))]
    committed = [footer.drafter_version or 0 for footer in footers]
    assert committed == sorted(committed)
    assert committed[0] == 0
    assert committed[-1] == summary.fields["drafter_version"]
    rows = [each for footer in footers for each in place.drafted("learnt", footer)]
    assert {version for row in rows for version in row} == {*range(committed[-1] + 1)}
    assert any(first < last for first, last in rows), "nothing was adopted on the way"
    for footer in footers:
        for first, last in place.drafted("learnt", footer):
            assert first <= last <= (footer.drafter_version or 0)


@pytest.mark.usefixtures("learnt")
def test_versions_say_what_they_came_from(place: Workplace) -> None:
    store = place.store("learnt")
    made = [store.read(number) for number in store.numbers()]
    assert len(made) >= 3
    assert [version.parent for version in made] == [None, *range(len(made) - 1)]
    assert made[0].learnt.why == "imported"
    for version in made[1:]:
        learnt = version.learnt
        assert learnt.tau_before is not None
        assert learnt.tau_after is not None
        assert learnt.tau_after > learnt.tau_before
        assert learnt.job == str(place.out("learnt"))
        assert learnt.updates % UPDATES == 0
        assert learnt.rows >= 8
        assert learnt.updates > 0
        assert learnt.tokens > 0
    texts = 2 * NUM_ROWS
    assert sum(version.learnt.rows for version in made) <= texts


def count_passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Tokens that the target is called with, by whomever: `all`, and of them those `in steps`.

    Not those that measure what steps take: how many they are depends on how busy the machine is.
    """
    passed, step, forward = Counter[str](), Decoder.step, LlamaModel.forward
    profile = Decoder.profile

    def measured(decoder: Decoder) -> None:
        before = passed["all"]
        profile(decoder)
        passed["all"] = before

    def counted(decoder: Decoder) -> Any:
        before = passed["all"]
        done = step(decoder)
        passed["in steps"] += passed["all"] - before
        return done

    @functools.wraps(forward)
    def counting(model: Any, *arguments: Any, **named: Any) -> Any:
        passed["all"] += named["input_ids"].numel()
        return forward(model, *arguments, **named)

    monkeypatch.setattr(Decoder, "profile", measured)
    monkeypatch.setattr(Decoder, "step", counted)
    monkeypatch.setattr(LlamaModel, "forward", counting)
    return passed


def test_no_target_pass_is_made_for_learning(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in making the trainer and not later: all tokens but those of loading are of steps."""
    passed, loading = count_passes(monkeypatch), []
    for name, keys in (("without", {"adapt.when": "off"}), ("with", {})):
        passed.clear()
        _, lines = learn(place, name, keys)
        loading.append(passed["all"] - passed["in steps"])
        assert passed["in steps"] == sum(
            row["spec"]["steps"] + row["spec"]["verified"] + row["usage"]["prompt_tokens"]
            for row in place.rows(name)
        )
    assert num_published(lines) > 1
    assert loading[0] == loading[1] > 0


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, TrainerState]]:
    """What trainers went on from, and what they had in hand then."""
    seen: list[tuple[int, TrainerState]] = []
    real = OnlineTrainer.restore

    def watched(trainer: OnlineTrainer, state: TrainerState, version: int) -> None:
        real(trainer, state, version)
        seen.append((version, trainer.state()))

    monkeypatch.setattr(OnlineTrainer, "restore", watched)
    return seen


def assert_state_of(store: VersionStore, seen: tuple[int, TrainerState]) -> None:
    """A trainer went on from all that another one left with a version."""
    version, state = seen
    kept = store.training_state(version)
    assert kept is not None
    assert state.counters == kept.facts["counters"]
    assert state.tensors.keys() == kept.tensors.keys()
    assert any(name.startswith("exp_avg.") for name in kept.tensors)
    for name, tensor in kept.tensors.items():
        assert torch.equal(state.tensors[name], tensor), name


def test_the_second_job_goes_on_where_the_first_one_ended(
    place: Workplace, restored: list[tuple[int, TrainerState]]
) -> None:
    stored = {"speculation.drafter_store": str(place.folder / "store")}
    learn(place, "first", stored)
    store = VersionStore(find_versions(place.folder / "store"))
    ended = store.current()
    assert ended is not None
    assert ended >= 2
    assert restored == [], "there was nothing to go on from"
    summary, lines = learn(place, "second", {**stored, "speculation.drafter": None})
    ((version, state),) = restored
    assert version == ended
    assert_state_of(store, (version, state))
    assert place.drafted("second", place.footers("second")[0])[0][0] == ended
    after = store.read(ended + 1)
    assert after.parent == ended
    assert after.learnt.job == str(place.out("second"))
    # What it tells of itself is its own.
    rounds = sum(line.startswith("learning, round") for line in lines)
    assert summary.fields["updates"] == UPDATES * rounds
    assert summary.fields["versions_published"] == num_published(lines)
    # An optimiser of another kind takes what it can.
    learn(place, "third", {**stored, "adapt.optimiser": "adamw"})
    assert len(restored) == 2


@pytest.mark.usefixtures("learnt")
def test_a_resumed_job_goes_on_from_its_last_commit(
    place: Workplace, restored: list[tuple[int, TrainerState]]
) -> None:
    shutil.copytree(place.out("learnt"), place.out("resumed"))
    store, footers = place.store("resumed"), place.footers("resumed")
    # As if the last parts had never been committed: then a version stands alone.
    for footer in footers[6:]:
        (place.out("resumed") / f"part-00000-{footer.chunk_index:05}.parquet").unlink()
    wanted, newest = footers[5].drafter_version, store.numbers()[-1]
    assert wanted is not None
    assert wanted < newest
    learn(place, "resumed")
    assert_state_of(store, restored[0])
    assert restored[0][0] == wanted
    assert place.drafted("resumed", place.footers("resumed")[6])[0][0] == wanted
    # Its own versions come after those that nobody committed, and from the one it went on with.
    made = [number for number in store.numbers() if number > newest]
    assert not made or store.read(made[0]).parent == wanted


@pytest.mark.usefixtures("learnt")
def test_a_damaged_state_costs_the_optimiser_alone(place: Workplace) -> None:
    shutil.copytree(place.out("learnt"), place.out("damaged"))
    store, last = place.store("damaged"), place.footers("damaged")[-1]
    assert last.drafter_version
    (store.path(last.drafter_version) / TRAINING).write_bytes(b"torn")
    first = place.out("damaged") / "part-00000-00000.parquet"
    first.unlink()
    _, lines = learn(place, "damaged")
    assert any("the optimiser begins anew" in line and TRAINING in line for line in lines)


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file can grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("has_room_for_weights", [False, True])
def test_a_full_disk_ends_learning_and_not_the_job(
    place: Workplace, has_room_for_weights: bool
) -> None:
    name = f"full-{has_room_for_weights}"
    size = (place.drafter / "model.safetensors").stat().st_size
    with full_disk(size * 3 // 2 if has_room_for_weights else size // 2):
        summary, lines = learn(place, name)
    (told,) = [line for line in lines if "learning has ended" in line]
    assert "File too large" in told
    assert summary.fields["versions_published"] == 0
    assert summary.fields["drafter_version"] == 0
    store = place.store(name)
    assert store.numbers() == ([0] if has_room_for_weights else [])
    # With room again the job goes on, and learns.
    for chunk in range(6, 12):
        (place.out(name) / f"part-00000-{chunk:05}.parquet").unlink()
    summary, _ = learn(place, name)
    assert summary.fields["versions_published"]
    assert list(store.folder.glob(".*")) == []


def test_a_store_that_others_hold_ends_learning_and_not_the_job(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_WAIT_S", 0.0)
    with locked(place.store("held").folder):
        _, lines = learn(place, "held")
    (told,) = [line for line in lines if "learning has ended" in line]
    assert "another process is at work" in told
    assert place.store("held").numbers() == []


def test_states_that_are_not_finite_are_not_learnt_from(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrajectoryMailbox.put

    def poisoned(mailbox: TrajectoryMailbox, trajectory: Trajectory) -> None:
        trajectory.features[1, 0] = math.nan
        real(mailbox, trajectory)

    monkeypatch.setattr(TrajectoryMailbox, "put", poisoned)
    summary, lines = learn(place, "poisoned")
    assert (summary.fields["updates"], summary.fields["versions_published"]) == (0, 0)
    assert sum("not finite" in line for line in lines) == 1
    assert place.store("poisoned").numbers() == []


def test_a_loss_that_is_not_finite_is_taken_back(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = BatchLoss.__call__, 0

    def broken(loss: BatchLoss, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(loss, *arguments)
        return replace(result, value=result.value * (math.nan if calls == 2 else 1.0))

    monkeypatch.setattr(BatchLoss, "__call__", broken)
    _, lines = learn(place, "broken")
    rounds = [line for line in lines if line.startswith("learning, round")]
    assert "round 1: 1 updates" in rounds[0]
    assert "the loss of update 2 was not finite, back to version 0" in rounds[0]
    assert num_published(lines) > 0, "it never recovered"
    store = place.store("broken")
    for number in store.numbers()[1:]:
        state = store.training_state(number)
        assert state is not None
        assert all(bool(each.isfinite().all()) for each in state.tensors.values())
