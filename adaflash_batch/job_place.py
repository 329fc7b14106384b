"""The output of a job: where its files are, whose it is, and what it holds already."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaflash_batch import models
from adaflash_batch.job_facts import JobInputs
from adaflash_batch.shards import fresh
from adaflash_batch.shards.job_folder import FOLDER, JobFolder
from adaflash_batch.shards.journal_folder import JOURNALS, JournalFolder
from adaflash_batch.shards.locations import is_local, location
from adaflash_batch.shards.output import Output
from adaflash_batch.shards.portion import Portion
from adaflash_batch.shards.recovery import Committed, committed, fingerprint
from adaflash_batch.shards.run_folder import RUNS
from adaflash_batch.spec import JobSpec


class Place:
    """Where the files of a job are.

    Args:
        filesystem, path: of the output directory.
        scratch: a local folder that a person names for journals and locks.
    """

    def __init__(self, filesystem: Any, path: str, scratch: str | None) -> None:
        self.filesystem, self.path = filesystem, path
        self._scratch = scratch

    @property
    def runs(self) -> Path:
        """Local folder of locks and reports."""
        if is_local(self.filesystem):
            return Path(self.path) / FOLDER / RUNS
        return self._private(self.path) / RUNS

    def journals(self, root: str) -> Path:
        """Local folder of the journals of the output that grows in `root`."""
        if is_local(self.filesystem) and self._scratch is None:
            return Path(root) / FOLDER / JOURNALS
        return self._private(root) / JOURNALS

    def own_store(self, root: str) -> Path | None:
        """For versions of the drafter; None if the output is not local."""
        return Path(root) / FOLDER / "drafter" if is_local(self.filesystem) else None

    def _private(self, root: str) -> Path:
        name = hashlib.sha256(location(self.filesystem, root).encode()).hexdigest()[:16]
        if self._scratch is not None:
            return Path(self._scratch).expanduser() / name
        return models.cache_root() / "scratch" / name


@dataclass(frozen=True, slots=True)
class Claimed:
    """An output that is this run's to add to.

    Attributes:
        filesystem, path: of the output directory.
        folder: its `_adaflash/`.
        root: the output directory, or where the new output grows with `--fresh`.
        is_fresh: whether it is the latter.
        done, journals, output: what is there, and what takes more.
        own_store: see `Place.own_store`.
    """

    filesystem: Any
    path: str
    folder: JobFolder
    root: str
    is_fresh: bool
    done: Committed
    journals: JournalFolder
    output: Output
    own_store: Path | None

    @property
    def version(self) -> int | None:
        """The drafter's version that the last committed or journaled row was made with."""
        newest = self.journals.newest_version()
        is_newer = newest is not None and newest[0] >= self.done.num_committed
        return newest[1] if newest is not None and is_newer else self.done.drafter_version


def claim(
    spec: JobSpec,
    inputs: JobInputs,
    portion: Portion,
    place: Place,
    facts: Mapping[str, object],
    others: list[str],
) -> Claimed:
    """Make the output this job's, or find that it is, and read what it holds.

    Call it behind the door (`RunFolder.door`).

    Args:
        spec, inputs: the job and its input files.
        portion: what this run does of it.
        place: where its files are.
        facts: see `job_facts.text_facts`.
        others: runs that are at work on other portions.

    Raises:
        ConfigError: it holds another job's rows.
    """
    filesystem, infos = place.filesystem, inputs.infos
    # What a kill left of a move is finished first; then this is the run that asked for it.
    has_moved = fresh.finish_move(filesystem, place.path)
    begins_anew = spec.run.fresh and not has_moved
    root = _root(place, facts, portion.end) if begins_anew else place.path
    folder, journal_folder = JobFolder(filesystem, root), place.journals(root)
    has_rows = not begins_anew and any(journal_folder.glob("*.jsonl"))
    mark = folder.claim(
        facts,
        spec.to_json(),
        infos,
        is_in_use=bool(others) or has_rows,
        is_fresh=spec.run.fresh,
    )
    done = committed(root, mark, infos, spec.output.chunk_rows, filesystem, portion)
    journals = JournalFolder(journal_folder, mark, infos)
    journals.recover(portion, done)
    output = Output(
        filesystem,
        root,
        prefix=spec.output.prefix,
        infos=infos,
        fingerprint=mark,
        done=done,
        portion=portion,
    )
    own_store = place.own_store(root)
    is_fresh = root != place.path
    return Claimed(
        filesystem, place.path, folder, root, is_fresh, done, journals, output, own_store
    )


def _root(place: Place, facts: Mapping[str, object], num_chunks: int) -> str:
    """Where a fresh output grows: beside the old one, or in its place if there is none yet."""
    filesystem, path = place.filesystem, place.path
    old, mark = JobFolder(filesystem, path), fingerprint(facts)
    if not old.has_parts() or old.goes_on_fresh(mark, num_chunks):
        return path
    root = fresh.fresh_path(path)
    if JobFolder(filesystem, root).fingerprint() != mark:
        fresh.discard(filesystem, path)
    return root
