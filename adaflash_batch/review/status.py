"""What is done of a job, running, missing; how fast; which errors. Also while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from adaflash_batch.errors import InputError, first_line
from adaflash_batch.request import Sampling
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.parts import (
    READ_ERRORS,
    Part,
    objections,
    read_parts,
)
from adaflash_batch.review.runs import Run, read_runs
from adaflash_batch.shards.footer import Totals
from adaflash_batch.shards.journal import JOURNAL_NAME, read_journal
from adaflash_batch.shards.locations import is_local
from adaflash_batch.shards.parquet import open_parquet
from adaflash_batch.shards.portion import read_name

EXIT_INCOMPLETE = 75

# Kinds of errors are in the rows themselves: of so many parts they are read.
_PARTS_WITH_KINDS = 64


@dataclass(slots=True)
class Status:
    """How far a job is.

    Attributes:
        directory: as it was named.
        rows: input rows of the job.
        rows_committed: those that parts hold.
        rows_in_journals: finished ones of chunks that are not whole; a kill does not lose them.
        errors, output_rows, completion_tokens: sums over the committed rows.
        error_kinds: output rows with errors by kind, of the first `error_parts` parts with some.
        parts, parts_expected: that are there, and that there will be.
        runs: that left a report.
        idle_slices: in array mode, those that no run does or has done.
        drafter_version: of the newest run or part.
        part_bytes, other_bytes: on disk: parts, and all in `_adaflash/`.
        notes: what else a person should know.
        fresh: the output that is to take this one's place.
    """

    directory: str
    fingerprint: str
    created: str | None
    rows: int
    parts_expected: int
    rows_committed: int = 0
    rows_in_journals: int = 0
    output_rows: int = 0
    errors: int = 0
    completion_tokens: int = 0
    error_kinds: dict[str, int] = field(default_factory=dict)
    error_parts: int = 0
    parts: int = 0
    runs: list[Run] = field(default_factory=list)
    idle_slices: list[int] = field(default_factory=list)
    drafter_version: int | None = None
    part_bytes: int = 0
    other_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    fresh: Status | None = None

    @property
    def rows_missing(self) -> int:
        """Input rows that are neither committed nor in a journal."""
        return max(self.rows - self.rows_committed - self.rows_in_journals, 0)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are committed and nothing is to take their place."""
        return self.rows_committed >= self.rows and self.fresh is None

    @property
    def exit_code(self) -> int:
        """0 if it is complete, also with errors; 75 while rows are missing."""
        return 0 if self.is_complete else EXIT_INCOMPLETE

    @property
    def tokens_per_s(self) -> float | None:
        """Of all runs that are at work, None if none is or says."""
        speeds = [r.tokens_per_s for r in self.runs if r.state == "running" and r.tokens_per_s]
        return sum(speeds) if speeds else None

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the last run at work is done with its slice; None if that is unknown."""
        at_work = [run.time_left_s for run in self.runs if run.state == "running"]
        known = [left for left in at_work if left is not None]
        return max(known) if known and len(known) == len(at_work) else None

    def as_dict(self) -> dict[str, Any]:
        """As one JSON object."""
        said = asdict(self) | {
            "rows_missing": self.rows_missing,
            "complete": self.is_complete,
            "tokens_per_s": self.tokens_per_s,
            "time_left_s": self.time_left_s,
            "runs": [asdict(run) | {"time_left_s": run.time_left_s} for run in self.runs],
            "fresh": None if self.fresh is None else self.fresh.as_dict(),
        }
        return said


def read_status(job: JobOutput) -> Status:
    """Look at a job's output; nothing is written, and a run that is at work is not disturbed.

    Raises:
        InputError: the directory cannot be listed.
    """
    expected = sum(job.chunks(each.index) for each in job.inputs)
    status = Status(job.directory, job.fingerprint, job.created, job.num_rows, expected)
    # Runs first, then journals: what they finish meanwhile is seen twice rather than not at all.
    status.runs = read_runs(job)
    journaled = _rows_in_journals(job, status.notes)
    done = _add_parts(job, status)
    status.rows_in_journals = sum(count for key, count in journaled.items() if key not in done)
    status.idle_slices = _idle_slices(status.runs)
    versions = [r.drafter_version for r in status.runs if r.drafter_version is not None]
    if versions and any(run.state == "running" for run in status.runs):
        status.drafter_version = max(versions)
    status.other_bytes = _folder_bytes(job)
    if job.is_being_replaced:
        status.notes.append(
            "a new output is whole and takes this one's place: run the job again to finish that"
        )
    fresh = job.fresh()
    status.fresh = None if fresh is None else read_status(fresh)
    return status


def _add_parts(job: JobOutput, status: Status) -> set[tuple[int, int]]:
    """Sum up the parts; the chunks that they hold."""
    done: set[tuple[int, int]] = set()
    totals, newest = Totals(), -1
    with_errors: list[Part] = []
    for part in read_parts(job, job.part_files()):
        status.part_bytes += part.file.size
        wrong = objections(job, part)
        if wrong or part.footer is None:
            status.notes.append(f"{part.file.name} does not count: it {wrong[0]}")
            continue
        done.add((part.file.shard, part.file.chunk))
        totals += part.footer.totals
        if part.footer.sequence > newest:
            newest, status.drafter_version = part.footer.sequence, part.footer.drafter_version
        if part.footer.totals.num_errors and len(with_errors) < _PARTS_WITH_KINDS:
            with_errors.append(part)
    status.parts = len(done)
    status.rows_committed, status.output_rows = totals.num_rows, totals.num_output_rows
    status.errors, status.completion_tokens = totals.num_errors, totals.completion_tokens
    status.error_parts = len(with_errors)
    status.error_kinds = _error_kinds(job, with_errors, status.notes)
    return done


def _error_kinds(job: JobOutput, parts: Sequence[Part], notes: list[str]) -> dict[str, int]:
    """Kinds and how often they are there, most frequent first."""
    counts: Counter[str] = Counter()
    column = f"{job.prefix}error"
    for part in parts:
        try:
            with open_parquet(job.filesystem, part.file.path) as file:
                for batch in file.iter_batches(columns=[f"{column}.kind"], use_threads=False):
                    kinds = pc.value_counts(batch.column(column).flatten()[0].drop_null())
                    for each in kinds.to_pylist():
                        counts[each["values"]] += each["counts"]
        except FileNotFoundError:
            continue
        except READ_ERRORS as error:
            notes.append(f"the errors in {part.file.name} cannot be read: {first_line(error)}")
    return dict(counts.most_common())


def _rows_in_journals(job: JobOutput, notes: list[str]) -> dict[tuple[int, int], int]:
    """Finished input rows of each chunk that has a journal.

    Where a column sets the number of samples, a row counts once it has as many as the job says.
    """
    if not is_local(job.filesystem):
        notes.append(
            f"runs and their journals are seen where they are on this machine, in {job.runs.parent}"
        )
    samples = job.spec.sampling.over(Sampling()).n
    found = {}
    for path in sorted(job.journals.glob("*.jsonl")):
        name = JOURNAL_NAME.fullmatch(path.name)
        if name is None:
            continue
        try:
            journal = read_journal(path)
        except OSError:  # its chunk was committed just now
            continue
        if journal.header is not None and journal.header.fingerprint == job.fingerprint:
            found[int(name[1]), int(name[2])] = journal.num_finished(samples)
    return found


def _idle_slices(runs: Sequence[Run]) -> list[int]:
    """Slices of an array that no run does or has finished; none where there is no array."""
    named = [(name, run) for run in runs if (name := read_name(run.name)) is not None]
    counts = {count for (_, count), _ in named if count > 1}
    if len(counts) != 1:
        return []
    busy = {index for (index, _), run in named if run.state in ("running", "finished")}
    return [index for index in range(counts.pop()) if index not in busy]


def _folder_bytes(job: JobOutput) -> int:
    try:
        selector = fs.FileSelector(job.folder, recursive=True, allow_not_found=True)
        return sum(info.size or 0 for info in job.filesystem.get_file_info(selector))
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"cannot list {job.folder}: {first_line(error)}") from error
