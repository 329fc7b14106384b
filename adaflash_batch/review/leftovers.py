"""What lies beside the parts: strangers, temporary files, journals, versions, rejects."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyarrow import fs

from adaflash_batch.drafter.store import KEEP, stored_models
from adaflash_batch.errors import first_line
from adaflash_batch.review.coverage import Coverage
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.parts import READ_ERRORS
from adaflash_batch.review.problems import Problems
from adaflash_batch.review.runs import read_runs
from adaflash_batch.shards.journal import JOURNAL_NAME
from adaflash_batch.shards.locations import is_local, list_directory, stat, walk_parquet
from adaflash_batch.shards.rejects import REJECTS

_LISTED = 8


def check_files(job: JobOutput, coverage: Coverage, problems: Problems) -> None:
    """Find Parquet files that readers would take for parts, and what kills have left behind."""
    parts = {part.path for part in job.part_files()}
    for path in walk_parquet(job.filesystem, job.path):
        if path not in parts:
            problems.add(
                path.removeprefix(f"{job.path}/"),
                "is no part of this job: who reads the directory takes its rows for some",
            )
    is_running = _is_running(job)
    for what, names in (
        ("temporary files", [*_temporary(job, job.path), *_temporary(job, job.folder)]),
        ("journals of chunks that are committed", _journals(job, coverage, is_done=True)),
        ("journals of chunks that are not whole", _journals(job, coverage, is_done=False)),
    ):
        if names:
            shown = ", ".join(names[:_LISTED]) + (" …" if len(names) > _LISTED else "")
            whose = "of the run at work" if is_running else "the next run takes them up or away"
            problems.notes.append(f"{len(names)} {what} ({whose}): {shown}")
    if job.is_being_replaced:
        problems.notes.append(
            "a new output (--fresh) is whole and was taking this one's place: parts of both may be "
            "here, run the job again to finish that"
        )
    elif job.fresh() is not None:
        problems.notes.append("run --fresh is making a new output, or was killed while it did")


def _is_running(job: JobOutput) -> bool:
    return any(run.state == "running" for run in read_runs(job))


def _temporary(job: JobOutput, directory: str) -> list[str]:
    names = [info.base_name for info in list_directory(job.filesystem, directory)]
    return [n for n in names if n.startswith(".") and n.endswith((".tmp", ".partial"))]


def _journals(job: JobOutput, coverage: Coverage, *, is_done: bool) -> list[str]:
    names = sorted(path.name for path in job.journals.glob("*.jsonl"))
    keys = {n: (int(m[1]), int(m[2])) for n in names if (m := JOURNAL_NAME.fullmatch(n))}
    return [name for name, key in keys.items() if (key in coverage.names) is is_done]


def check_versions(job: JobOutput, versions: Collection[int], problems: Problems) -> None:
    """Whether the drafter's versions that footers name are there, or were pruned by newer ones."""
    folder = _versions_folder(job)
    if folder is None or not versions:
        if any(versions):
            problems.notes.append(
                "the drafter's versions are not found from here, so they were not looked at"
            )
        return
    there = {int(p.name[1:]) for p in folder.glob("v*") if p.is_dir() and p.name[1:].isdecimal()}
    if not there and not any(versions):
        return  # a drafter that did not learn is not kept
    newest = max(there, default=-1)
    gone = sorted(set(versions) - there)
    pruned = [version for version in gone if version <= newest - KEEP]
    for version in gone:
        if version > newest - KEEP:
            problems.add(
                str(folder / f"v{version:06}"),
                f"is not there: parts were committed with version {version}, and no {KEEP} newer "
                "ones have pushed it out",
            )
    if pruned:
        problems.notes.append(
            f"{len(pruned)} older versions of the drafter that parts name are gone: a store keeps "
            f"the newest {KEEP}"
        )


def _versions_folder(job: JobOutput) -> Path | None:
    store = job.spec.speculation.drafter_store
    if store is None:
        return Path(job.folder) / "drafter" if is_local(job.filesystem) else None
    identity = job.text_facts.get("model")
    weights = identity.get("weights") if isinstance(identity, dict) else None
    for model in stored_models(Path(store).expanduser()):
        try:
            said = json.loads((model.folder / "model.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if weights is not None and said.get("weights") == weights:
            return model.folder
    return None


@dataclass(slots=True)
class Rejects:
    """Rows with errors by part: how many, and a digest of them that does not depend on order.

    Attributes:
        parts: that were read to their end.
    """

    parts: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    digests: Counter[str] = field(default_factory=Counter)

    def add(self, part: str, row: int, sample: int, kind: str | None, message: str | None) -> None:
        """Take a row: of the input file, not of the part."""
        said = json.dumps([row, sample, kind, message]).encode(errors="surrogatepass")
        self.counts[part] += 1
        self.digests[part] ^= int.from_bytes(blake2b(said, digest_size=8).digest(), "little")


def check_rejects(job: JobOutput, found: Rejects, coverage: Coverage, problems: Problems) -> None:
    """Compare rejects.parquet with the errors in the parts.

    Before the job is whole, and until its last run has ended, the file may be of an earlier time.

    Args:
        found: in the parts that were read.
        coverage: those parts.
    """
    is_whole = not coverage.num_missing(job) and not _is_running(job)
    path = f"{job.folder}/{REJECTS}"
    if stat(job.filesystem, path).type != fs.FileType.File:
        if is_whole and found.counts:
            problems.notes.append(f"there is no {REJECTS}, though rows carry errors")
        return
    try:
        told = _read_rejects(job.filesystem, path)
    except (*READ_ERRORS, KeyError) as error:
        problems.add(REJECTS, f"cannot be read: {first_line(error)}")
        return
    for part in sorted(told.counts.keys() | found.counts.keys()):
        is_known = part in found.parts and (is_whole or part in told.counts)
        if not is_known:
            continue
        if told.counts[part] != found.counts[part]:
            problems.add(
                REJECTS,
                f"has {told.counts[part]} errors of {part}, which holds {found.counts[part]}",
            )
        elif told.digests[part] != found.digests[part]:
            problems.add(REJECTS, f"has other errors of {part} than it holds itself")


def _read_rejects(filesystem: Any, path: str) -> Rejects:
    """What rejects.parquet has of committed chunks."""
    told, names = Rejects(), ["part", "row", "sample", "kind", "message"]
    with filesystem.open_input_file(path) as source:
        for batch in pq.ParquetFile(source).iter_batches(columns=names, use_threads=False):
            columns = [batch.column(name).to_pylist() for name in names]
            for part, *row in zip(*columns, strict=True):
                if part is not None:
                    told.add(part, *row)
    return told
