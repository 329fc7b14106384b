"""Versions of a drafter: whole whenever the process dies, there for as long as they are needed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_bytes
from test_drafter_save import TARGET, small_drafter

from adaflash_batch.drafter import checkpoint, versions
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.versions import Learnt, TrainingState, VersionStore
from adaflash_batch.drafter.vocabulary import VOCABULARY, load_vocabulary
from adaflash_batch.errors import ConfigError, LockedError

OWN = {"tokenizer_sha256": "aaaa", "target": "tiny", "summary": {"updates": 5}, "origin": {"a": 1}}
STATE = TrainingState({"net.fc": torch.arange(6.0).view(2, 3), "m": torch.ones(2)}, {"step": 7})
LEARNT = Learnt(job="out/x", rows=10, tokens=900, updates=4, tau_before=1.5, tau_after=1.75)


def filled(folder: Path, count: int = 1, keep: int = 8) -> VersionStore:
    """A store with a chain of versions; version n has the weights of seed n."""
    store = VersionStore(folder, keep=keep)
    store.begin(small_drafter(seed=0), Learnt("imported"), OWN, {})
    for seed in range(1, count):
        store.publish(small_drafter(seed=seed), LEARNT)
    return store


def publish_one(folder: Path) -> None:
    VersionStore(folder).publish(small_drafter(seed=1), LEARNT, STATE)


def assert_has_seed(store: VersionStore, number: int, seed: int) -> None:
    loaded = store.load(number, TARGET, dtype=torch.float32)
    _assert_same(loaded, small_drafter(seed=seed))


def _assert_same(ours: DFlash, theirs: DFlash) -> None:
    assert ours.config == theirs.config
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_a_version_is_what_was_published(tmp_path: Path) -> None:
    store, tokens = VersionStore(tmp_path / "deep" / "store"), torch.arange(3, 90, 2)
    files = {VOCABULARY: to_bytes({"token_ids": tokens})}
    assert store.begin(small_drafter(seed=0), Learnt("imported"), OWN, files) == 0
    first = checkpoint.identity(store.path(0))
    assert store.publish(small_drafter(seed=1), LEARNT, STATE) == 1
    assert store.current() == 1
    assert store.numbers() == [0, 1]
    for number in (0, 1):
        assert_has_seed(store, number, number)
        found = load_vocabulary(store.path(number), small_drafter().config)
        assert found is not None
        assert torch.equal(found, tokens)
    version = store.read(1)
    assert (version.number, version.parent, version.learnt) == (1, 0, LEARNT)
    assert version.created.endswith("+00:00")
    assert (store.read(0).parent, store.read(0).learnt.why) == (None, "imported")
    assert checkpoint.identity(store.path(0)) == first
    # What the first one was trained for is not true of the second.
    assert checkpoint.inspect(store.path(0)).own == OWN
    carried = {name: OWN[name] for name in ("tokenizer_sha256", "target", "origin")}
    assert checkpoint.inspect(store.path(1)).own == carried
    state = store.training_state(1)
    assert store.training_state(0) is None
    assert state is not None
    assert state.facts == STATE.facts
    assert state.tensors.keys() == STATE.tensors.keys()
    for name, tensor in STATE.tensors.items():
        assert torch.equal(state.tensors[name], tensor)


def test_reading_makes_nothing(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "store")
    assert (store.current(), store.numbers(), store.history()) == (None, [], [])
    with pytest.raises(ConfigError, match="no version 0"):
        store.read(0)
    assert not (tmp_path / "store").exists()
    with pytest.raises(ConfigError, match="no version to go on from"):
        store.publish(small_drafter(), LEARNT)


def test_the_first_version_is_made_once(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    assert store.begin(small_drafter(seed=9), Learnt("imported"), OWN, {}) == 1
    assert store.numbers() == [0, 1]


def calls_of(work: Callable[[], None], before: Callable[[int], None], folder: Path) -> list[str]:
    """What a piece of work flushes and renames, in order; `before` hears of each call's number."""
    done: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def call(name: str, *arguments: Any) -> None:
        before(len(done))
        at = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else arguments[1]
        done.append(f"{name} {os.path.relpath(at, folder)}")
        real[name](*arguments)

    for name in real:
        setattr(os, name, lambda *arguments, name=name: call(name, *arguments))
    try:
        work()
    finally:
        for name, function in real.items():
            setattr(os, name, function)
    return done


def test_order_of_a_publication(tmp_path: Path) -> None:
    filled(tmp_path)
    done = calls_of(lambda: publish_one(tmp_path), lambda number: None, tmp_path)
    scratch = f".v000001.{os.getpid()}.partial"
    names = ("config.json", "model.safetensors", "training.safetensors", "version.json")
    assert sorted(done[:4]) == [f"fsync {scratch}/{name}" for name in names]
    assert done[4:] == [
        f"fsync {scratch}",
        "rename v000001",
        "fsync .",
        "fsync history.jsonl",
        "fsync .current.partial",
        "replace current",
        "fsync .",
    ]


_PROGRAM = """
import os, shutil, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_versions import calls_of, publish_one

def die_at(point):
    def before(number):
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)
    return before

for point in range(int(sys.argv[3])):
    store = Path(sys.argv[2]) / str(point)
    child = os.fork()
    if child == 0:
        calls_of(lambda: publish_one(store), die_at(point), store)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, point
"""


def test_a_kill_at_any_place_leaves_the_old_version_or_the_new_one(tmp_path: Path) -> None:
    filled(tmp_path / "base")
    trial = shutil.copytree(tmp_path / "base", tmp_path / "trial")
    points = calls_of(lambda: publish_one(trial), lambda number: None, trial)
    for point in range(len(points)):
        shutil.copytree(tmp_path / "base", tmp_path / str(point))
    arguments = [str(Path(__file__).parent), str(tmp_path), str(len(points))]
    subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], check=True)
    moved, renamed = points.index("replace current"), points.index("rename v000001")
    for point, name in enumerate(points):
        store = VersionStore(tmp_path / str(point))
        current, whole = store.current(), [0] if point <= renamed else [0, 1]
        assert current == (1 if point > moved else 0), name
        assert store.numbers() == whole, name
        for number in whole:
            assert_has_seed(store, number, number)
        assert store.publish(small_drafter(seed=5), LEARNT) == len(whole), name
        assert_has_seed(store, len(whole), 5)
        assert store.read(len(whole)).parent == current
        assert list(store.folder.glob(".*")) == []
        assert store.history()[-1]["from"] == current


def test_leftovers_go_with_the_next_write_and_not_before(tmp_path: Path) -> None:
    store = filled(tmp_path)
    torn = tmp_path / ".v000001.77.partial"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".current.partial").write_text("v0000")
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"when": "2026-')
    assert (store.current(), store.numbers(), len(store.history())) == (0, [0], 1)
    assert torn.exists()
    store.publish(small_drafter(seed=1), LEARNT)
    assert list(tmp_path.glob(".*")) == []
    assert [move["to"] for move in store.history()] == [0, 1]


_HOLDER = """
import sys
from pathlib import Path
from adaflash_batch.durable import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_writes_and_all_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path)
    monkeypatch.setattr(versions, "_WAIT_S", 0.0)
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        writes: list[Callable[[], object]] = [
            lambda: publish_one(tmp_path),
            lambda: store.roll_back(0),
        ]
        for write in writes:
            with pytest.raises(LockedError, match="another process is at work"):
                write()
        assert_has_seed(store, 0, 0)
        holder.kill()
        holder.wait()
    publish_one(tmp_path)
    assert store.current() == 1


def test_writers_take_turns(tmp_path: Path) -> None:
    filled(tmp_path)
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(3):
                publish_one(tmp_path)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failed == []
    store = VersionStore(tmp_path)
    assert store.numbers() == [*range(7)]
    assert [store.read(number).parent for number in range(7)] == [None, *range(6)]
    moves = [(move["from"], move["to"]) for move in store.history()]
    assert moves == [*zip([None, *range(6)], range(7), strict=True)]


def test_rolling_back_loses_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    assert store.roll_back(0) == 2
    assert (store.current(), store.numbers()) == (0, [0, 1, 2])
    assert store.publish(small_drafter(seed=3), LEARNT) == 3
    assert store.read(3).parent == 0
    assert store.publish(small_drafter(seed=4), LEARNT, parent=1) == 4
    assert store.read(4).parent == 1
    assert [*store.ancestors(4)] == [1, 0]
    with pytest.raises(ConfigError, match="no version 9") as error:
        store.roll_back(9)
    assert error.value.hint == "it has 0, 1, 2, 3, 4"
    assert store.current() == 4
    moves = [(move["why"], move["from"], move["to"]) for move in store.history()]
    assert moves[2:] == [
        ("published", 1, 2),
        ("rolled_back", 2, 0),
        ("published", 0, 3),
        ("published", 3, 4),
    ]
    assert all(move["when"] and str(os.getpid()) in move["who"] for move in store.history())


def test_a_damaged_file_is_named_and_a_damaged_pointer_mended(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    (tmp_path / "current").write_text("version one\n")
    calls: list[Callable[[], object]] = [store.current, lambda: publish_one(tmp_path)]
    for call in calls:
        with pytest.raises(ConfigError, match="names no version: 'version one'"):
            call()
    store.roll_back(1)
    assert store.current() == 1
    (store.path(1) / "version.json").write_text(json.dumps({"number": 1}))
    with pytest.raises(ConfigError, match=r"v000001/version\.json is damaged"):
        store.read(1)
    (store.path(1) / "training.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"training\.safetensors is damaged"):
        store.training_state(1)


def test_old_versions_go(tmp_path: Path) -> None:
    store = filled(tmp_path, 6, keep=2)
    assert store.numbers() == [3, 4, 5]
    store.roll_back(3)
    store.publish(small_drafter(seed=6), LEARNT)
    assert store.numbers() == [3, 5, 6]
    for number in store.numbers():
        assert_has_seed(store, number, number)
    assert [move["to"] for move in store.history()] == [0, 1, 2, 3, 4, 5, 3, 6]


def test_what_is_needed_never_goes(tmp_path: Path) -> None:
    dice, net = random.Random(0), small_drafter(seed=0)
    for keep in (1, 2, 3):
        store = filled(tmp_path / str(keep), keep=keep)
        for _ in range(25):
            if dice.random() < 0.4:
                store.roll_back(dice.choice(store.numbers()))
                continue
            before, there = store.current(), store.numbers()
            new = store.publish(net, LEARNT)
            assert {before, new, *[*there, new][-keep:]} <= {*store.numbers()}
            assert len(store.numbers()) <= 2 * keep + 1
            assert store.current() == new


def test_a_version_whose_parent_others_took_away_is_kept(tmp_path: Path) -> None:
    """Of two jobs the slow one publishes when the fast one has pruned what it began from."""
    slow, fast = filled(tmp_path, 2, keep=2), VersionStore(tmp_path, keep=2)
    for seed in range(2, 6):
        fast.publish(small_drafter(seed=seed), LEARNT)
    assert slow.numbers() == [3, 4, 5]
    assert slow.publish(small_drafter(seed=9), LEARNT, parent=1) == 6
    assert_has_seed(slow, 6, 9)
    assert slow.read(6).parent == 1
    assert checkpoint.inspect(slow.path(6)).own["tokenizer_sha256"] == "aaaa"
    assert [*slow.ancestors(6)] == []
    assert fast.publish(small_drafter(seed=7), LEARNT) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_imported_drafter_is_that_drafter(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, store = tmp_path / "mine", VersionStore(tmp_path / "store")
    files = {VOCABULARY: to_bytes({"token_ids": torch.arange(7)}), "README.md": b"a card"}
    own = {name: value for name, value in OWN.items() if name != "origin"}
    checkpoint.save(small_drafter(dtype), folder, {"adaflash": own}, files)
    assert store.import_checkpoint(folder, TARGET) == 0
    weights = (folder / "model.safetensors", store.path(0) / "model.safetensors")
    assert checkpoint.inspect(store.path(0)).dtype == dtype
    _assert_same(store.load(0, TARGET, dtype=dtype), small_drafter(dtype))
    assert weights[0].stat().st_size == weights[1].stat().st_size
    assert (store.path(0) / "README.md").read_bytes() == b"a card"
    assert (store.path(0) / VOCABULARY).read_bytes() == files[VOCABULARY]
    said = checkpoint.inspect(store.path(0)).own
    assert said == {
        **own,
        "origin": {"folder": str(folder), "identity": checkpoint.identity(folder)},
    }
    store.publish(small_drafter(seed=2), LEARNT)
    assert store.import_checkpoint(folder, TARGET) == 1
    assert store.numbers() == [0, 1]


def test_a_drafter_of_another_target_is_never_imported(tmp_path: Path) -> None:
    checkpoint.save(small_drafter(), tmp_path / "mine", {"adaflash": OWN})
    other = TargetFacts(300, 64, 12, "other", "bbbb")
    with pytest.raises(ConfigError) as error:
        VersionStore(tmp_path / "store").import_checkpoint(tmp_path / "mine", other)
    assert "other" in error.value.message
    assert not (tmp_path / "store").exists()
