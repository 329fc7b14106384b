"""Flagged rows written out: Parquet, or JSON lines on a stream. Bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from adaflash_batch.errors import AdaflashError
from adaflash_batch.review.findings import Flagged
from adaflash_batch.shards.inputs import resolve_inputs
from adaflash_batch.shards.locations import is_local, locate, path_matches

_AT_ONCE = 10_000
_COLUMNS = ("file", "row", "kind", "message", "effect")
_SCHEMA = pa.schema([(name, pa.int64() if name == "row" else pa.string()) for name in _COLUMNS])


def in_the_way(path: Path, inputs: Sequence[str], output: str) -> str | None:
    """Why a file here would be taken for one of the job's, None if it would not.

    Raises:
        AdaflashError: the inputs cannot be found.
    """
    filesystem, directory = locate(output)
    there = path.resolve()
    if is_local(filesystem) and there.is_relative_to(Path(directory).resolve()):
        return "in the output directory"
    for shard in resolve_inputs(inputs):
        if not is_local(shard.filesystem):
            continue
        if there == Path(shard.path).resolve():
            return "an input file"
        origin = Path(shard.origin)
        if origin.is_dir() and there.is_relative_to(origin.resolve()):
            return f"in the input directory {origin}"
        if not origin.exists() and path_matches(os.path.abspath(path), shard.origin):
            return f"one that the input {origin} names"
    return None


class RowWriter(Protocol):
    """Takes flagged rows in any order."""

    def add(self, flagged: Flagged) -> None:
        """Take one."""

    def close(self) -> None:
        """All have come."""

    def abandon(self) -> None:
        """Leave nothing behind; no harm after `close`."""


class NoRows:
    """A RowWriter for nobody."""

    def add(self, flagged: Flagged) -> None:
        """See RowWriter."""

    def close(self) -> None:
        """See RowWriter."""

    def abandon(self) -> None:
        """See RowWriter."""


class JsonRows:
    """A RowWriter of a line of JSON each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, flagged: Flagged) -> None:
        """See RowWriter."""
        print(json.dumps(_as_dict(flagged)), file=self._stream)

    def close(self) -> None:
        """See RowWriter."""
        self._stream.flush()

    def abandon(self) -> None:
        """See RowWriter."""


class ParquetRows:
    """A RowWriter whose file is there when all rows are.

    Raises:
        AdaflashError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._waiting: list[dict[str, Any]] = []
        self._writer: Any = self._trying(lambda: pq.ParquetWriter(self._temporary, _SCHEMA))

    def add(self, flagged: Flagged) -> None:
        """See RowWriter."""
        self._waiting.append(_as_dict(flagged))
        if len(self._waiting) >= _AT_ONCE:
            self._write()

    def close(self) -> None:
        """See RowWriter."""
        self._write()
        self._trying(self._writer.close)
        self._trying(lambda: os.replace(self._temporary, self._path))

    def abandon(self) -> None:
        """See RowWriter."""
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _write(self) -> None:
        table = pa.Table.from_pylist(self._waiting, _SCHEMA)
        self._trying(lambda: self._writer.write_table(table))
        self._waiting.clear()

    def _trying(self, work: Any) -> Any:
        try:
            return work()
        except (OSError, pa.ArrowException) as error:
            raise AdaflashError(
                f"cannot write {self._path}: {error}", "name another file with --rows"
            ) from error


def _as_dict(flagged: Flagged) -> dict[str, Any]:
    place = flagged.place
    values = (place.file, place.row, flagged.kind, place.message, flagged.effect)
    return dict(zip(_COLUMNS, values, strict=True))
