"""SIGKILL at every step of a commit and at any other time: no row is lost, doubled or changed."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import parts, read_rows, run, tiny_drafter_folder, tiny_model_folder, write_rows
from killing import die, dies_at, exit_code, in_a_child, in_turns

from adaflash_batch import job
from adaflash_batch.request import RowKey
from adaflash_batch.shards import fresh, journal, writer
from adaflash_batch.shards.footer import PartFooter
from adaflash_batch.shards.journal_folder import JournalFolder
from adaflash_batch.shards.output import Output

NUM_ROWS, CHUNK, SAMPLES, KILLS = 40, 4, 2, 30
# Kills the third of ten parts, when chunks that come later have finished rows too.
THIRD = 2


class Watched:
    """A module of which single functions are replaced, for one user of it alone."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def of_parts(name: str, *, after: bool = False) -> Callable[[], None]:
    """Dies at a call that the writer of parts makes of the operating system."""

    def arm() -> None:
        watched: Any = Watched(os)
        writer.os = watched  # type: ignore[attr-defined]
        dies_at(watched, name, THIRD, after=after)()

    return arm


def in_the_data() -> None:
    """Dies with half of a part written."""
    real, calls = writer._write_table, itertools.count()

    def watched(table: Any, target: Any) -> None:
        if next(calls) < THIRD:
            return real(table, target)
        buffer = pa.BufferOutputStream()
        real(table, buffer)
        data = buffer.getvalue().to_pybytes()
        target.write(data[: len(data) // 2])
        target.flush()
        die()

    writer._write_table = watched


def in_a_journal_line() -> None:
    """Dies with half of a line written."""
    real, calls = journal.Journal.add, itertools.count()

    def watched(self: journal.Journal, key: Any, row: Any) -> None:
        if next(calls) < 20:
            return real(self, key, row)
        line = journal._line(journal._value(key, row))
        with open(self._path, "ab", buffering=0) as file:
            file.write(line[: len(line) // 2])
        die()

    journal.Journal.add = watched  # type: ignore[method-assign]


PLACES: dict[str, Callable[[], None]] = {
    "before the data": dies_at(writer, "_write_table", THIRD),
    "in the data": in_the_data,
    "before the data is flushed": of_parts("fsync"),
    "before the rename": of_parts("replace"),
    "after the rename": of_parts("replace", after=True),
    "before the name is flushed": dies_at(writer, "flush", THIRD),
    "after the commit": dies_at(Output, "commit", THIRD, after=True),
    "before the journal goes": dies_at(journal.Journal, "remove", THIRD),
    "after the journal went": dies_at(journal.Journal, "remove", THIRD, after=True),
    "before a journal": dies_at(journal.Journal, "__init__", 4),
    "after a journal began": dies_at(journal.Journal, "__init__", 4, after=True),
    "before a journal line": dies_at(journal.Journal, "add", 20),
    "in a journal line": in_a_journal_line,
    "after a journal line": dies_at(journal.Journal, "add", 20, after=True),
    "after the last part": dies_at(Output, "commit", NUM_ROWS // CHUNK - 1, after=True),
    "before the summary": dies_at(job, "_end", 0),
    "before the rejects": dies_at(job, "write_rejects", 0),
}
# Where the run that goes on dies, too: while it reads what the first one left.
AGAIN: dict[str, Callable[[], None]] = {
    "while it takes over": dies_at(JournalFolder, "_take_over", 0),
    "while it begins a journal anew": dies_at(journal.Journal, "__init__", 0, after=True),
    "at its first part": dies_at(Output, "commit", 0, after=True),
}
MOVES: dict[str, Callable[[], None]] = {
    "before the mark": dies_at(fresh, "mark_whole", 0),
    "after the mark": dies_at(fresh, "mark_whole", 0, after=True),
    "between parts": dies_at(fresh, "_replace", 3),
    "before an old part goes": dies_at(fresh, "_delete", 0),
    "between its own files": dies_at(fresh, "_replace", NUM_ROWS // CHUNK + 1, after=True),
    "before the rest goes": dies_at(fresh, "discard", 0),
}
NAMES = {where: f"killed {n}" for n, where in enumerate([*PLACES, *AGAIN])}


class Place:
    """A folder with a model, a drafter and prompts, and the jobs that were run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path) -> Place:
        tiny_model_folder(folder / "model")
        tiny_drafter_folder(folder / "drafter")
        rows = pa.array([f"row {n} " + "la" * (n % 5) for n in range(NUM_ROWS)], pa.string())
        limits = pa.array([1 + 5 * (n % 4) for n in range(NUM_ROWS)], pa.int32())
        # One that is refused in every run: its error must be there once, too.
        rows = pa.array([None if n == 13 else row.as_py() for n, row in enumerate(rows)])
        write_rows(folder / "in.parquet", {"prompt": rows, "limit": limits})
        return cls(folder)

    def out(self, name: str) -> Path:
        return self.folder / name

    def run(self, name: str, keys: dict[str, object] | None = None) -> Any:
        usual: dict[str, object] = {
            "input.columns": {"max_new_tokens": "limit"},
            "output.chunk_rows": CHUNK,
            "engine.concurrency": 6,
            "sampling.n": SAMPLES,
            "sampling.temperature": 1.0,
            "speculation.drafter": str(self.folder / "drafter"),
            "adapt.when": "off",
        }
        source, model = self.folder / "in.parquet", self.folder / "model"
        return run(source, model, self.out(name), usual | (keys or {}))

    def die(
        self, name: str, arm: Callable[[], None], keys: dict[str, object] | None = None
    ) -> None:
        arm()
        self.run(name, keys)

    def journals(self, name: str) -> list[Path]:
        return sorted((self.out(name) / "_adaflash" / "journal").glob("*"))

    def footers(self, name: str) -> list[PartFooter]:
        found = [PartFooter.from_metadata(pq.read_metadata(p).metadata) for p in self.parts(name)]
        return [footer for footer in found if footer is not None]

    def parts(self, name: str) -> list[Path]:
        return parts(self.out(name))


def kill_at_steps(folder: Path) -> None:
    """A job for each place, in a process that dies there; then to its end in another one."""
    place = Place(folder)
    in_turns([partial(place.die, NAMES[where], arm) for where, arm in PLACES.items()], -9)
    first = PLACES["before the rename"]
    in_turns([partial(place.die, NAMES[where], first) for where in AGAIN], -9)
    in_turns([partial(place.die, NAMES[where], arm) for where, arm in AGAIN.items()], -9)
    for name in NAMES.values():
        shutil.copytree(place.out(name), place.out(f"{name}, as it was"))
    in_turns([partial(place.run, name) for name in NAMES.values()], 0)


def kill_at_random(folder: Path) -> None:
    """Jobs that are killed again and again until they come to their ends, 30 times in all."""
    place, dice, kills = Place(folder), random.Random(os.urandom(8)), 0
    for number in itertools.count():
        code = None
        while code != 0:
            child = in_a_child(lambda name=f"random {number}": place.run(name))  # type: ignore[misc]
            if kills < KILLS:
                time.sleep(dice.uniform(0.0, 0.6))
                os.kill(child, signal.SIGKILL)
            code = exit_code(child)
            kills += code == -signal.SIGKILL
        if kills >= KILLS:
            (folder / "random.json").write_text(json.dumps({"jobs": number + 1, "kills": kills}))
            return


def replace_and_die(folder: Path) -> None:
    """`--fresh` on a whole output, killed in its move; then the same command again."""
    place = Place(folder)
    renewed: dict[str, object] = {"run.fresh": True, "sampling.seed": 1}
    for number, arm in enumerate(MOVES.values()):
        name = f"moved {number}"
        shutil.copytree(place.out("whole"), place.out(name))
        in_turns([partial(place.die, name, arm, renewed)], -9)
        shutil.copytree(place.out(name), place.out(f"{name}, as it was"))
        in_turns([partial(place.run, name, renewed)], 0)


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
import transformers.models.llama.modeling_llama
import test_killed_jobs
torch.set_num_threads(1)
for name in ("kill_at_steps", "kill_at_random", "replace_and_die"):
    getattr(test_killed_jobs, name)(Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """With a job that nobody touched, and all those that were killed and went on."""
    found = Place.make(tmp_path_factory.mktemp("place"))
    found.run("whole")
    found.run("renewed", {"sampling.seed": 1})
    # In a process that never computed anything, so that it can be forked.
    command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parent), str(found.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return found


def assert_same(place: Place, name: str, wanted: str = "whole") -> None:
    """The files, rows, texts and schemas of a job that nobody touched; and nothing else."""
    assert read_rows(place.out(name)) == read_rows(place.out(wanted))
    assert [p.name for p in place.parts(name)] == [p.name for p in place.parts(wanted)]
    for part, whole in zip(place.parts(name), place.parts(wanted), strict=True):
        assert pq.read_schema(part).remove_metadata() == pq.read_schema(whole).remove_metadata()
    versions = [footer.drafter_version for footer in place.footers(name)]
    assert versions == [footer.drafter_version for footer in place.footers(wanted)]
    assert sorted(f.sequence for f in place.footers(name)) == [*range(NUM_ROWS // CHUNK)]
    assert place.journals(name) == []
    assert [path.name for path in place.out(name).glob(".*")] == []
    rejects = pq.read_table(place.out(name) / "_adaflash" / "rejects.parquet").to_pylist()
    assert [(each["row"], each["kind"]) for each in rejects] == [(13, "null_prompt")]


@pytest.mark.parametrize("where", [*PLACES, *AGAIN])
def test_a_killed_job_goes_on_to_the_same_output(place: Place, where: str) -> None:
    assert_same(place, NAMES[where])


def test_the_kills_hit_what_they_were_meant_for(place: Place) -> None:
    def left(where: str) -> Any:
        name = f"{NAMES[where]}, as it was"
        temporary = [*place.out(name).glob(".part-*")]
        return len(place.parts(name)), len(temporary), len(place.journals(name)) > 0

    for where in ("in the data", "before the data is flushed", "before the rename"):
        assert left(where) == (THIRD, 1, True), where
    for where in ("after the rename", "before the name is flushed", "after the commit"):
        assert left(where) == (THIRD + 1, 0, True), where
    assert left("before the data") == (THIRD, 1, True)
    assert left("after the last part")[0] == NUM_ROWS // CHUNK
    torn = [
        path
        for path in place.journals(f"{NAMES['in a journal line']}, as it was")
        if not path.read_bytes().endswith(b"\n")
    ]
    assert len(torn) == 1


def test_rows_in_journals_are_not_decoded_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{NAMES['before the rename']}, as it was"
    held = sum(len(journal.read_journal(path).rows) for path in place.journals(name))
    committed = len(place.parts(name)) * CHUNK * SAMPLES
    assert held > 0
    shutil.copytree(place.out(name), place.out("once more"))
    added: list[Any] = []
    real = journal.Journal.add

    def add(self: journal.Journal, key: RowKey, row: journal.JournalRow) -> None:
        added.append(key)
        real(self, key, row)

    monkeypatch.setattr(journal.Journal, "add", add)
    summary = place.run("once more")
    assert len(added) == len(set(added)) == (NUM_ROWS - 1) * SAMPLES - committed - held
    assert summary.fields["resumed_rows"] > THIRD * CHUNK
    assert_same(place, "once more")


def test_thirty_kills_at_random_change_nothing(place: Place) -> None:
    told = json.loads((place.folder / "random.json").read_text())
    assert told["kills"] == KILLS
    for number in range(told["jobs"]):
        assert_same(place, f"random {number}")


@pytest.mark.parametrize("number", range(len(MOVES)), ids=list(MOVES))
def test_an_output_is_replaced_whole_wherever_the_move_is_killed(place: Place, number: int) -> None:
    assert_same(place, f"moved {number}", "renewed")
    assert not (place.out(f"moved {number}") / "_adaflash" / "fresh").exists()


def test_until_the_new_output_is_whole_the_old_one_stays(place: Place) -> None:
    before = f"moved {[*MOVES].index('before the mark')}, as it was"
    after = f"moved {[*MOVES].index('after the mark')}, as it was"
    for name in (before, after):
        assert read_rows(place.out(name)) == read_rows(place.out("whole"))
        assert read_rows(fresh_of(place, name)) == read_rows(place.out("renewed"))


def fresh_of(place: Place, name: str) -> Path:
    return place.out(name) / "_adaflash" / "fresh"
