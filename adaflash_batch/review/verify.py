"""Whether an output is what its job says: every row once, sound, of this input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from adaflash_batch.errors import ConfigError, InputError
from adaflash_batch.review.coverage import Coverage, Gap
from adaflash_batch.review.input_rows import InputRows
from adaflash_batch.review.job_output import InputFile, JobOutput, PartFile
from adaflash_batch.review.leftovers import Rejects, check_files, check_rejects, check_versions
from adaflash_batch.review.part_content import PartCheck
from adaflash_batch.review.parts import Part, is_misnamed, objections, read_parts
from adaflash_batch.review.problems import Problem, Problems
from adaflash_batch.shards.parquet import inspect_shard, open_shard
from adaflash_batch.shards.recovery import fingerprint
from adaflash_batch.shards.schema import output_schema

EXIT_DAMAGED, EXIT_INCOMPLETE = 1, 75

Notify = Callable[[int, int], None]


@dataclass(slots=True)
class Verification:
    """What was found.

    Attributes:
        rows, rows_missing: input rows of the job, and those that no sound part holds.
        parts, parts_expected: that are there, and that should be.
        output_rows, errors: sums over the parts that were read.
        problems: in the order in which they were found.
        gaps: where rows are missing.
        notes: what is no problem, and yet should be known.
        inputs_compared: whether the input files were read.
    """

    directory: str
    fingerprint: str
    rows: int
    rows_missing: int
    parts: int
    parts_expected: int
    output_rows: int
    errors: int
    inputs_compared: bool
    problems: list[Problem] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: sound and complete; 75: sound, but rows are missing; 1: damaged."""
        if self.problems:
            return EXIT_DAMAGED
        return EXIT_INCOMPLETE if self.rows_missing else 0

    def as_dict(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self) | {"sound": not self.problems, "complete": self.rows_missing == 0}


def verify(
    job: JobOutput, *, compare_inputs: bool = True, notify: Notify = lambda _done, _all: None
) -> Verification:
    """Read all parts of a job, and its input files beside them; a batch of rows is in memory.

    Args:
        compare_inputs: False leaves the input files alone, which may be gone.
        notify: told how many parts of how many are done with.

    Raises:
        InputError: an input file cannot be read.
    """
    return _Verifier(job, compare_inputs, notify).verify()


class _Verifier:
    def __init__(self, job: JobOutput, compare_inputs: bool, notify: Notify) -> None:
        self._job = job
        self._compares = compare_inputs
        self._notify = notify
        self._problems = Problems()
        self._rejects = Rejects()
        self._check = PartCheck(job, self._problems, self._rejects)
        self._coverage = Coverage()
        self._versions: set[int] = set()
        self._output_rows = self._errors = self._num_read = 0

    def verify(self) -> Verification:
        job, problems = self._job, self._problems
        self._check_job()
        files = job.part_files()
        for shard, group in groupby(files, key=lambda file: file.shard):
            self._check_shard(shard, list(group), len(files))
        check_files(job, self._coverage, problems)
        check_versions(job, self._versions, problems)
        check_rejects(job, self._rejects, self._coverage, problems)
        return Verification(
            directory=job.directory,
            fingerprint=job.fingerprint,
            rows=job.num_rows,
            rows_missing=self._coverage.num_missing(job),
            parts=len(files),
            parts_expected=sum(job.chunks(each.index) for each in job.inputs),
            output_rows=self._output_rows,
            errors=self._errors,
            inputs_compared=self._compares,
            problems=problems.found,
            gaps=list(self._coverage.gaps(job)),
            notes=problems.notes,
        )

    def _check_job(self) -> None:
        """job.json against itself."""
        job, name = self._job, "_adaflash/job.json"
        if fingerprint(job.text_facts) != job.fingerprint:
            self._problems.add(name, "has been changed: its fingerprint is not that of its facts")
        known = job.text_facts.get("inputs")
        if known != {each.name: each.digest for each in job.inputs}:
            self._problems.add(name, "lists other input files than its fingerprint was made of")
        if job.text_facts.get("output.chunk_rows") != job.chunk_rows:
            self._problems.add(name, "has two numbers for output.chunk_rows")

    def _check_shard(self, shard: int, files: Sequence[PartFile], num_files: int) -> None:
        known = self._job.inputs[shard] if shard < len(self._job.inputs) else None
        with self._open_input(known) as (schema, rows):
            for part in read_parts(self._job, files):
                found = self._check_part(part, schema, rows)
                schema = schema if schema is not None else found
                self._problems.end_file()
                self._num_read += 1
                self._notify(self._num_read, num_files)

    @contextmanager
    def _open_input(self, source: InputFile | None) -> Iterator[tuple[Any, InputRows | None]]:
        """The schema that parts should have, and the rows to compare them with."""
        if source is None or not self._compares:
            yield None, None
            return
        try:
            info = inspect_shard(source.shard())
        except InputError as error:
            raise InputError(error.message, "--no-inputs looks at the output alone") from error
        if info.digest != source.digest or info.num_rows != source.num_rows:
            self._problems.add(source.location, "has changed since the job began")
        with open_shard(info.shard) as file:
            yield self._schema(source, info.schema), InputRows(file, source.location)

    def _schema(self, source: InputFile, schema: Any) -> Any:
        try:
            return output_schema(schema, self._job.prefix)
        except ConfigError as error:
            self._problems.add(source.location, error.message)
            return None

    def _check_part(self, part: Part, schema: Any, rows: InputRows | None) -> Any:
        wrong = objections(self._job, part)
        for message in wrong:
            self._problems.add(part.file.name, message)
        if part.footer is None:
            return None
        footer = part.footer
        if not wrong or (is_misnamed(part) and len(wrong) == 1):
            other = self._coverage.add(footer.shard_index, footer.chunk_index, part.file.name)
            if other is not None:
                self._problems.add(part.file.name, f"holds the same rows as {other}")
        self._output_rows += part.num_rows
        self._errors += footer.totals.num_errors
        if footer.drafter_version is not None:
            self._versions.add(footer.drafter_version)
        # Rows of another place would all be found wrong, which the name has said already.
        return self._check.check(part, schema, None if wrong else rows)
