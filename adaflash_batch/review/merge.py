"""All parts of a job in one Parquet file, streamed, in order of the input."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pyarrow as pa
from pyarrow import fs

from adaflash_batch.durable import flush
from adaflash_batch.errors import AdaflashError, ConfigError, first_line
from adaflash_batch.review.coverage import Coverage
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.parts import READ_ERRORS, objections, read_parts
from adaflash_batch.review.unify import conform, unify
from adaflash_batch.shards.footer import NAMESPACE
from adaflash_batch.shards.locations import is_local, locate, real_path, stat
from adaflash_batch.shards.parquet import inspect_shard, open_parquet, read_batches
from adaflash_batch.shards.parquet_form import TableWriter
from adaflash_batch.shards.schema import output_schema

# What is in memory at most, beside one batch of a part (8 MiB where its rows are even).
_GROUP_BYTES = 64 * 2**20
_GROUP_ROWS = 2**17
_COPIED_AT_ONCE = 8 * 2**20


class IncompleteError(AdaflashError):
    """Rows are missing: the same command, later, can help."""

    exit_code = 75


@dataclass(frozen=True, slots=True)
class Merged:
    """A file that was written.

    Attributes:
        file: as it was named.
        rows, parts: that it holds.
        rows_missing: input rows that no part held.
        notes: lines for people about types and metadata.
    """

    file: str
    rows: int
    parts: int
    rows_missing: int
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self)


def merge(
    job: JobOutput,
    out: str,
    *,
    force: bool = False,
    partial: bool = False,
    notify: Callable[[int, int], None] = lambda _done, _all: None,
) -> Merged:
    """Write the parts' rows into one file, which is there whole or not at all.

    A row group of the file and a batch of a part are in memory. The file has the inputs' schema
    metadata and, under `adaflash.fingerprint`, the job's fingerprint.

    Args:
        job: its output.
        out: path or URI of the file.
        force: replace it if it is there.
        partial: take what is there though rows are missing.
        notify: told how many parts of how many are done with.

    Raises:
        IncompleteError: rows are missing.
        ConfigError: the file is there or cannot be one, a part is not sound, types do not agree.
        AdaflashError: the file cannot be written.
    """
    filesystem, path = _destination(job, out, force)
    parts = _sound_parts(job)
    missing = parts.num_missing(job)
    if missing and not partial:
        raise IncompleteError(
            f"{missing} of {job.num_rows} rows have no part yet",
            "run the job to its end, or merge what is there with --partial",
        )
    order = [parts.names[key] for key in sorted(parts.names)]
    unified = unify(_schemas(job, parts), job.prefix)
    said = {"fingerprint": job.fingerprint} | ({"rows_missing": missing} if missing else {})
    schema = _with_facts(unified.schema, said)
    with _opened(filesystem, path) as sink:
        rows = _write(sink, schema, _batches(job, order, schema, notify))
    return Merged(out, rows, len(order), missing, unified.notes)


def _write(sink: Any, schema: Any, batches: Iterator[Any]) -> int:
    """Write a Parquet file; the number of its rows."""
    rows = 0
    with TableWriter(sink, schema) as writer:
        for group in _row_groups(batches):
            writer.write(group)
            rows += group.num_rows
    return rows


def _destination(job: JobOutput, out: str, force: bool) -> tuple[Any, str]:
    filesystem, path = locate(out)
    kind = stat(filesystem, path).type
    is_with_job = type(filesystem) is type(job.filesystem)
    if is_with_job and real_path(filesystem, path).startswith(_below(job)):
        raise ConfigError(
            f"{out} is inside the job's output {job.directory}: readers would take it for a part",
            "name a file elsewhere",
        )
    if kind == fs.FileType.Directory:
        raise ConfigError(f"{out} is a directory", "name a file, like merged.parquet")
    for source in job.inputs:
        theirs, their_path = locate(source.location)
        if theirs == filesystem and real_path(theirs, their_path) == real_path(filesystem, path):
            raise ConfigError(f"{out} is an input file of the job", "name another file")
    if kind == fs.FileType.File and not force:
        raise ConfigError(
            f"{out} is there already", "name another file, or replace it with --force"
        )
    return filesystem, path


def _below(job: JobOutput) -> str:
    path = os.path.realpath(job.path) if is_local(job.filesystem) else job.path
    return path.rstrip("/") + "/"


def _sound_parts(job: JobOutput) -> Coverage:
    """The parts, all of which fit the job. Raises ConfigError."""
    found = Coverage()
    for part in read_parts(job, job.part_files()):
        wrong = objections(job, part)
        if wrong or part.footer is None:
            raise ConfigError(
                f"{part.file.name} {wrong[0]}",
                f"adaflash-batch verify {job.directory} says all that is wrong",
            )
        found.add(part.file.shard, part.file.chunk, part.file.name)
    return found


def _schemas(job: JobOutput, parts: Coverage) -> Mapping[str, Any]:
    """Schema of the output of each input file, by its name: of its first part, or of the file."""
    schemas = {}
    for (shard, _), name in sorted(parts.names.items()):
        source = job.inputs[shard].name
        if source not in schemas:
            with _reading(name), open_parquet(job.filesystem, f"{job.path}/{name}") as file:
                schemas[source] = file.schema_arrow
    if not schemas:  # inputs without rows leave no parts
        for each in job.inputs:
            schemas[each.name] = output_schema(inspect_shard(each.shard()).schema, job.prefix)
    return schemas


def _with_facts(schema: Any, facts: Mapping[str, object]) -> Any:
    own = {NAMESPACE + key.encode(): json.dumps(value).encode() for key, value in facts.items()}
    return schema.with_metadata({**(schema.metadata or {}), **own})


def _batches(
    job: JobOutput, names: Sequence[str], schema: Any, notify: Callable[[int, int], None]
) -> Iterator[Any]:
    for number, name in enumerate(names, 1):
        with _reading(name), open_parquet(job.filesystem, f"{job.path}/{name}") as file:
            for batch in read_batches(file):
                yield conform(batch, schema, name)
        notify(number, len(names))


def _row_groups(batches: Iterator[Any]) -> Iterator[Any]:
    """Tables of bounded size, of one batch at least."""
    waiting: list[Any] = []
    num_bytes = num_rows = 0
    for batch in batches:
        waiting.append(batch)
        num_bytes += batch.nbytes
        num_rows += batch.num_rows
        if num_bytes >= _GROUP_BYTES or num_rows >= _GROUP_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting, num_bytes, num_rows = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    # Only reading happens within: what is made of a batch is done where the generator is asked.
    try:
        yield
    except READ_ERRORS as error:
        raise AdaflashError(
            f"{name} cannot be read: {first_line(error)}", "run adaflash-batch verify"
        ) from error


@contextmanager
def _opened(filesystem: Any, path: str) -> Iterator[Any]:
    """A file that gets its name when it is whole and durable."""
    try:
        with _opened_local(path) if is_local(filesystem) else _staged(filesystem, path) as sink:
            yield sink
    except (OSError, pa.ArrowException) as error:
        raise AdaflashError(
            f"cannot write {path}: {first_line(error)}", "nothing of the job is harmed"
        ) from error


@contextmanager
def _opened_local(path: str) -> Iterator[Any]:
    directory, _, name = path.rpartition("/")
    temporary = Path(directory, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    flush(Path(directory))


@contextmanager
def _staged(filesystem: Any, path: str) -> Iterator[Any]:
    # Closing an upload commits it, also after an error, and object stores copy instead of renaming:
    # the file is made whole on a local disk, then put in its place at once.
    with TemporaryFile() as sink:
        yield sink
        sink.seek(0)
        with filesystem.open_output_stream(path) as upload:
            shutil.copyfileobj(sink, upload, _COPIED_AT_ONCE)
