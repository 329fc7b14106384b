"""Versions of a drafter on disk: folders that never change, and one pointer that is replaced whole.

    v000003/             a checkpoint, with version.json and, where given, training.safetensors
    current              the name of the version that drafts
    history.jsonl        every move of that pointer, each written before it is done
    lock                 held while something is written; readers need it never

A version is flushed, then renamed into place, then its name is flushed; then the pointer, in the
same way. A kill leaves the old current version or the new one, whole, and perhaps a whole version
that nothing points to. What else it leaves ends in `.partial` and goes with the next write.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts, Write
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.store import CURRENT, KEEP
from adaflash_batch.drafter.vocabulary import VOCABULARY, load_vocabulary
from adaflash_batch.durable import flush, locked, write_whole
from adaflash_batch.errors import ConfigError

VERSION = "version.json"
TRAINING = "training.safetensors"
HISTORY = "history.jsonl"

_NAME = re.compile(r"v(\d{6,})")
_METADATA = "adaflash"
# What a version says of itself as its parent did; how the parent was trained is not true of it.
_CARRIED = ("tokenizer_sha256", "target", "origin")
# A writer holds the lock for as long as a version takes to write.
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Learnt:
    """What its maker tells of a version.

    Attributes:
        why: it was made: `imported`, `published`, ...
        job: who made it, in words.
        rows, tokens, updates: learnt from and done since its parent.
        tau_before, tau_after: mean tokens a step on held-out trajectories, of parent and version,
            both scored on the same ones.
    """

    why: str = "published"
    job: str | None = None
    rows: int = 0
    tokens: int = 0
    updates: int = 0
    tau_before: float | None = None
    tau_after: float | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """What a version says of itself: `version.json`.

    Attributes:
        number: its own.
        parent: the version whose weights it began with, which may be gone; None if it is the first.
        created: UTC, ISO 8601.
        learnt: the rest.
    """

    number: int
    parent: int | None
    created: str
    learnt: Learnt


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a trainer goes on from exactly as if it had never stopped.

    Attributes:
        tensors: weights in float32 and the optimiser's state, by name.
        facts: what else it wants to know, as JSON has it.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class VersionStore:
    """The versions of the drafter of one target.

    Several processes may read; those who write take turns. Each method that writes raises
    LockedError if another process holds the lock for a minute.

    Args:
        folder: there or not; only writing makes it.
        keep: how many stay: the newest, and as many ancestors of the current one. The current
            version and its parent always stay.

    Attributes:
        pinned: versions that stay, too, as long as this object is the one that publishes.
    """

    def __init__(self, folder: str | Path, *, keep: int = KEEP) -> None:
        assert keep >= 1
        self.folder = Path(folder)
        self._keep = keep
        self.pinned: frozenset[int] = frozenset()

    def current(self) -> int | None:
        """The version that drafts, None where there is none yet."""
        try:
            name = (self.folder / CURRENT).read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        found = _NAME.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"{self.folder / CURRENT} names no version: {name[:40]!r}",
                "point it to a version with adaflash-batch drafter rollback STORE --to N",
            )
        return int(found[1])

    def numbers(self) -> list[int]:
        """All versions, ascending."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(found[1]) for found in names if found)

    def path(self, number: int) -> Path:
        """The folder of a version, a whole checkpoint. Raises ConfigError if it is not there."""
        path = self._path(number)
        if not path.is_dir():
            there = ", ".join(map(str, self.numbers())) or "none"
            raise ConfigError(f"{self.folder} has no version {number}", f"it has {there}")
        return path

    def read(self, number: int) -> Version:
        """What a version says of itself."""
        return read_version(self.path(number))

    def load(self, number: int, target: TargetFacts, *, dtype: torch.dtype) -> DFlash:
        """The net of a version, on the CPU; refused as `checkpoint.load` refuses."""
        return checkpoint.load(self.path(number), target, dtype=dtype)

    def training_state(self, number: int) -> TrainingState | None:
        """What the trainer had when it published a version, None where it left nothing."""
        path = self.path(number) / TRAINING
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return TrainingState(tensors, json.loads(file.metadata()[_METADATA]))
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error

    def ancestors(self, number: int) -> Iterator[int]:
        """Its parent, the parent's parent and so on, as far as they are still there."""
        there = {*self.numbers()}
        while number in there:
            parent = self.read(number).parent
            if parent not in there:
                return
            yield parent
            number = parent

    def history(self) -> list[dict[str, Any]]:
        """All moves of the pointer: when, who, why, from, to.

        One that a kill prevented is there too: the next one does not begin where it ends.
        """
        path = self.folder / HISTORY
        lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
        return [move for move in map(_parsed, lines) if move is not None]

    def begin(
        self, net: DFlash, learnt: Learnt, own: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> int:
        """Make a drafter the first version, unless there is a current one; returns the current one.

        Args:
            net: in the dtype to be written.
            learnt: what is known of it.
            own: the field `adaflash` of its config.json. All versions after it will have its
                `tokenizer_sha256`, `target` and `origin`.
            files: beside its weights, e.g. the draft vocabulary, which goes on with all versions.
        """
        with self._writing():
            found = self.current()
            if found is not None:
                return found
            number = self._next_number()
            self._add(net, self._version(number, None, learnt), own, dict(files))
            self._point(None, number, learnt.why)
            return number

    def import_checkpoint(self, folder: Path, target: TargetFacts, job: str | None = None) -> int:
        """Make the drafter in a folder the first version, unless there is a current one.

        Returns the current version. Raises ConfigError as `checkpoint.load` does, with nothing
        changed.
        """
        view = checkpoint.inspect(folder)
        net = checkpoint.load(folder, target, dtype=view.dtype)
        load_vocabulary(folder, net.config)
        origin = {"folder": str(folder), "identity": checkpoint.identity(folder)}
        present = (folder / name for name in (VOCABULARY, "README.md"))
        files = {path.name: path.read_bytes() for path in present if path.is_file()}
        return self.begin(net, Learnt("imported", job), {**view.own, "origin": origin}, files)

    def publish(
        self,
        net: DFlash,
        learnt: Learnt,
        training_state: TrainingState | None = None,
        *,
        parent: int | None = None,
    ) -> int:
        """Add a version and make it the current one; returns its number.

        Args:
            net: in the dtype to be written. Its draft vocabulary is the parent's.
            learnt: what it learnt.
            training_state: for exact continuation.
            parent: the version that it began from, which may be gone: others publish, too. The
                current one unless given.

        Raises:
            ConfigError: there is no parent; see `begin`.
        """
        with self._writing():
            current = self.current()
            parent = current if parent is None else parent
            if parent is None:
                raise ConfigError(f"{self.folder} has no version to go on from")
            # Whoever is there can pass on what all versions of a store have.
            heir = parent if current is None or parent in self.numbers() else current
            own, files = _inherited(self.path(heir))
            if training_state is not None:
                files[TRAINING] = partial(_write_state, training_state)
            number = self._next_number()
            self._add(net, self._version(number, parent, learnt), own, files)
            self._point(current, number, learnt.why)
            self._prune(number)
            return number

    def roll_back(self, number: int) -> int | None:
        """Make a version that is there the current one; returns the one that was. None is lost."""
        with self._writing():
            self.path(number)
            try:
                current = self.current()
            except ConfigError:  # this is how a damaged pointer is mended
                current = None
            self._point(current, number, "rolled_back")
            return current

    def _path(self, number: int) -> Path:
        return self.folder / f"v{number:06}"

    def _next_number(self) -> int:
        return max(self.numbers(), default=-1) + 1

    @staticmethod
    def _version(number: int, parent: int | None, learnt: Learnt) -> Version:
        return Version(number, parent, _now(), learnt)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with locked(self.folder, wait_s=_WAIT_S):
            for path in self.folder.glob(".*.partial"):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            yield

    def _add(
        self,
        net: DFlash,
        version: Version,
        own: Mapping[str, Any],
        files: Mapping[str, bytes | Write],
    ) -> None:
        fields = asdict(version)
        fields |= fields.pop("learnt")
        said = (json.dumps(fields, indent=2) + "\n").encode()
        extra = {"adaflash": dict(own)} if own else None
        checkpoint.save(net, self._path(version.number), extra, {**files, VERSION: said})

    def _point(self, old: int | None, new: int, why: str) -> None:
        user = os.environ.get("LOGNAME") or os.environ.get("USER") or f"uid {os.getuid()}"
        who = f"{user} on {socket.gethostname()}, process {os.getpid()}"
        self._record({"when": _now(), "who": who, "why": why, "from": old, "to": new})
        write_whole(self.folder / CURRENT, f"{self._path(new).name}\n".encode())

    def _record(self, move: Mapping[str, Any]) -> None:
        path = self.folder / HISTORY
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # torn by a kill
                    file.write(b"\n")
            file.write((json.dumps(move) + "\n").encode())
        flush(path)

    def _prune(self, current: int) -> None:
        # Renamed first: a version without some of its files must never be taken for a whole one.
        numbers = self.numbers()
        kept = {current, *numbers[-self._keep :], *islice(self.ancestors(current), self._keep)}
        kept |= self.pinned
        for number in numbers:
            if number not in kept:
                path = self._path(number)
                scratch = path.with_name(f".{path.name}.partial")
                path.rename(scratch)
                shutil.rmtree(scratch)


def read_version(folder: Path) -> Version:
    """What the version in a folder says of itself. Raises ConfigError if it says nothing."""
    path = folder / VERSION
    try:
        fields = json.loads(path.read_text("utf-8"))
        own = {name: fields.pop(name) for name in ("number", "parent", "created")}
        return Version(**own, learnt=Learnt(**fields))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _inherited(parent: Path) -> tuple[dict[str, Any], dict[str, bytes | Write]]:
    """What a version has of its parent beside the weights: in config.json, and as files."""
    own, vocabulary = checkpoint.inspect(parent).own, parent / VOCABULARY
    files: dict[str, bytes | Write] = {}
    if vocabulary.is_file():
        files[VOCABULARY] = vocabulary.read_bytes()
    return {name: own[name] for name in _CARRIED if name in own}, files


def _write_state(state: TrainingState, path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    checkpoint.write_tensors(tensors, path, {_METADATA: json.dumps(dict(state.facts))})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        move = json.loads(line)
    except ValueError:
        return None
    return move if isinstance(move, dict) else None
