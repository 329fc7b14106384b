"""SIGKILL while a job learns: what goes on goes on from a whole version, and no text changes."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from killing import dies_at, exit_code, in_a_child, in_turns
from learning_jobs import NUM_ROWS, QUICK, UPDATES, Workplace
from safetensors import safe_open
from safetensors.torch import save_file

from adaflash_batch import learning
from adaflash_batch.adapt.optimiser import Optimiser
from adaflash_batch.adapt.publishing import TrainerState
from adaflash_batch.adapt.trainer import OnlineTrainer
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.store import find_versions
from adaflash_batch.drafter.versions import VersionStore
from adaflash_batch.engine.drafting import BlockDrafter

# The drafter that is taken in as version 0 is written and pointed to first, then version 1 with
# the state of its training; the kills come while version 2 is made.
PLACES = {
    "during the first update": dies_at(Optimiser, "step", 0),
    "during a later update": dies_at(Optimiser, "step", 5 * UPDATES, after=True),
    "before the state": dies_at(checkpoint, "write_tensors", 4),
    "before the version has its name": dies_at(checkpoint, "write_tensors", 4, after=True),
    "before the pointer moves": dies_at(VersionStore, "_point", 2),
    "after the pointer moved": dies_at(VersionStore, "_point", 2, after=True),
    "before it is committed": dies_at(BlockDrafter, "adopt", 1, after=True),
    "before a commit is known": dies_at(learning.JobLearning, "keep", 5),
}
NAMES = {place: f"killed {number}" for number, place in enumerate(PLACES)}


def kill_and_resume(folder: Path) -> None:
    """A job for each place, in a process that dies there; then to its end in one nobody touches."""
    place = Workplace(folder)

    def die(where: str) -> None:
        PLACES[where]()
        place.run(NAMES[where], QUICK)

    in_turns([partial(die, where) for where in PLACES], -signal.SIGKILL)
    for name in NAMES.values():
        shutil.copytree(place.out(name), place.out(f"{name}, as it was"))
    in_turns([partial(watched, place, name) for name in NAMES.values()], 0)


def watched(place: Workplace, name: str) -> None:
    """Run a job and keep what its trainer had in hand when it went on from a version."""
    real = OnlineTrainer.restore

    def restore(trainer: OnlineTrainer, state: TrainerState, version: int) -> None:
        real(trainer, state, version)
        kept = {"version": str(version), "updates": str(trainer.counters.updates)}
        save_file(dict(trainer.state().tensors), place.restored(name), kept)

    OnlineTrainer.restore = restore  # type: ignore[method-assign, assignment]
    place.run(name, QUICK)


def kill_at_random(folder: Path) -> None:
    """One job, killed again and again until it comes to its end."""
    place, dice = Workplace(folder), random.Random(int(time.time()))
    for kills in itertools.count():
        child = in_a_child(lambda: place.run("random", QUICK))
        if kills < 6:
            time.sleep(dice.uniform(0.2, 2.0))
            os.kill(child, signal.SIGKILL)
        if exit_code(child) == 0:
            return


def share_a_store(folder: Path) -> None:
    """Two jobs at once on one store."""
    place = Workplace(folder)
    keys = QUICK | {"speculation.drafter_store": str(folder / "store")}
    in_turns([partial(place.run, name, keys) for name in ("left", "right")], 0)


def share_a_job(folder: Path) -> None:
    """Two runs at once that share one job, its output and the versions beside it."""
    place = Workplace(folder)
    shares = [QUICK | {"run.num_shards": 2, "run.shard_index": index} for index in range(2)]
    in_turns([partial(place.run, "shared", keys) for keys in shares], 0)


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
import transformers.models.llama.modeling_llama
import test_learning_kills
torch.set_num_threads(1)
for name in ("kill_and_resume", "kill_at_random", "share_a_store", "share_a_job"):
    getattr(test_learning_kills, name)(Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """With the text of plain decoding, and all the jobs that were killed and went on."""
    found = Workplace.make(tmp_path_factory.mktemp("place"))
    found.run("plain", {"speculation.drafter": None})
    # In a process that never computed anything, so that it can be forked.
    command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parent), str(found.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return found


@pytest.fixture(scope="module")
def killed(place: Workplace) -> dict[str, Left]:
    """What a kill at each place left."""
    return {where: Left(place, f"{name}, as it was") for where, name in NAMES.items()}


class Left:
    """What a killed job had on disk.

    Attributes:
        parts: that it had committed.
        wanted: the version that must draft when it goes on.
        versions: that were there.
    """

    def __init__(self, place: Workplace, name: str) -> None:
        store, footers = place.store(name), place.footers(name)
        self.parts = len(footers)
        self.wanted = footers[-1].drafter_version if footers else store.current()
        self.versions = store.numbers()
        self.current = store.current()
        self.states = {number: store.training_state(number) for number in self.versions}


def assert_is_whole(place: Workplace, name: str) -> None:
    """Every row once, with the text of plain decoding, and all versions sound."""
    assert place.texts(name) == place.texts("plain")
    footers = place.footers(name)
    assert [footer.sequence for footer in footers] == [*range(len(footers))]
    store = place.store(name)
    for footer in footers:
        assert footer.drafter_version in (store.numbers() or [0])
        for first, last in place.drafted(name, footer):
            assert first <= last <= (footer.drafter_version or 0)


@pytest.mark.parametrize("where", PLACES)
def test_a_killed_job_goes_on_from_a_whole_version(
    place: Workplace, killed: dict[str, Left], where: str
) -> None:
    left, name = killed[where], NAMES[where]
    assert_is_whole(place, name)
    footers, store = place.footers(name), place.store(name)
    assert 0 < left.parts < len(footers)
    wanted = left.wanted or 0
    assert place.drafted(name, footers[left.parts])[0][0] == wanted
    assert_restored(place, name, left)
    made = [number for number in store.numbers() if number not in left.versions]
    published = [number for number in made if store.read(number).learnt.why == "published"]
    if published:
        assert_goes_on(store, left, published[0], wanted)
        assert list(store.folder.glob(".*")) == []


def assert_restored(place: Workplace, name: str, left: Left) -> None:
    """The trainer went on with all that another one left with the version, if one did."""
    kept = None if left.wanted is None else left.states.get(left.wanted)
    assert place.restored(name).exists() == (kept is not None)
    if kept is None:
        return
    with safe_open(place.restored(name), framework="pt") as file:
        said = file.metadata()
        assert said["version"] == str(left.wanted)
        assert said["updates"] == str(kept.facts["counters"]["updates"])
        assert {*file.keys()} == kept.tensors.keys()
        assert all(torch.equal(file.get_tensor(key), kept.tensors[key]) for key in kept.tensors)


def assert_goes_on(store: VersionStore, left: Left, number: int, wanted: int) -> None:
    """The version's training state is some updates further than its parent's."""
    state, before = store.training_state(number), left.states.get(wanted)
    learnt = store.read(number).learnt
    assert store.read(number).parent == wanted
    assert state is not None
    step, updates = 0.0, 0
    if before is not None:
        step = float(before.tensors["step.norm.weight"])
        updates = before.facts["counters"]["updates"]
    assert state.facts["counters"]["updates"] == updates + learnt.updates
    # Rounds that were taken back leave no trace in the optimiser.
    assert step + UPDATES <= float(state.tensors["step.norm.weight"]) <= step + learnt.updates


def test_killed_jobs_go_on_learning(place: Workplace, killed: dict[str, Left]) -> None:
    newest = {where: place.store(NAMES[where]).numbers()[-1] for where in killed}
    assert any(newest[where] > max(left.versions, default=0) for where, left in killed.items())
    assert any(left.wanted for left in killed.values()), "nothing was to be restored"


def test_the_kills_hit_what_they_were_meant_for(killed: dict[str, Left]) -> None:
    seen = {where: (left.versions, left.current) for where, left in killed.items()}
    assert seen["during the first update"] == ([], None)
    for where in ("before the state", "before the version has its name"):
        assert seen[where] == ([0, 1], 1), where
    assert seen["before the pointer moves"] == ([0, 1, 2], 1)
    for where in ("after the pointer moved", "before it is committed"):
        assert seen[where] == ([0, 1, 2], 2), where
        assert killed[where].wanted in (0, 1), "it was committed already"
    assert killed["before a commit is known"].parts == 5


def test_kills_at_random_change_no_text(place: Workplace) -> None:
    assert_is_whole(place, "random")


def test_two_jobs_share_a_store(place: Workplace) -> None:
    store = VersionStore(find_versions(place.folder / "store"))
    for name in ("left", "right"):
        assert place.texts(name) == place.texts("plain")
        assert len(place.rows(name)) == 2 * NUM_ROWS
    jobs = {store.read(number).learnt.job for number in store.numbers()}
    assert {str(place.out("left")), str(place.out("right"))} <= jobs
    moves = [(move["from"], move["to"]) for move in store.history()]
    assert [came for _, came in moves] == [*range(len(moves))], "two versions had one number"
    assert [old for old, _ in moves] == [None, *range(len(moves) - 1)]
    assert store.current() == len(moves) - 1
    for number in store.numbers()[1:]:
        assert store.training_state(number) is not None


def test_two_runs_share_a_job_and_what_is_learnt(place: Workplace) -> None:
    assert place.texts("shared") == place.texts("plain")
    store, footers = place.store("shared"), place.footers("shared")
    assert sorted(footer.sequence for footer in footers) == sorted([*range(6)] * 2)
    newest = max(store.numbers())
    assert newest > 0
    for footer in footers:
        assert 0 <= (footer.drafter_version or 0) <= newest
    moves = [(move["from"], move["to"]) for move in store.history()]
    assert [came for _, came in moves] == [*range(len(moves))], "two versions had one number"
