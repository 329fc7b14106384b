"""Journals: the finished rows of chunks that are not whole yet, so that a kill does not lose them.

`journal/00003-00012.jsonl` belongs to chunk 12 of input file 3. A line is eight hexadecimal digits
(zlib.crc32 of the rest), a space, and JSON; the first line says which chunk of which job it is.
A line is one write: a killed process leaves whole lines and perhaps a torn last one, which is
passed over. Nothing rests on a journal: what it lacks is decoded again.
"""

from __future__ import annotations

import errno
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaflash_batch.durable import flush
from adaflash_batch.request import Completion, RowKey, Timing
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.schema import OutputRow
from adaflash_batch.shards.writer import write_error
from adaflash_batch.stats import SpeculationCounts

FORMAT = 1
JOURNAL_NAME = re.compile(r"(\d{5,})-(\d{5,})\.jsonl")


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Which chunk a journal belongs to.

    Attributes:
        fingerprint: of the job.
        shard_digest: of the input file.
        first_row, num_rows: of the chunk.
    """

    fingerprint: str
    shard_digest: str
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class JournalRow:
    """A finished sample of a row.

    Attributes:
        row: what the output says of it.
        drafter_version: that drafted when it was finished, None without a drafter.
        sequence: parts that the run's portion of the job had by then.
    """

    row: OutputRow
    drafter_version: int | None = None
    sequence: int = 0


@dataclass(slots=True)
class Journaled:
    """What a journal holds.

    Attributes:
        header: None if the file does not begin with one.
        rows: by their keys.
    """

    header: JournalHeader | None
    rows: dict[RowKey, JournalRow]

    def num_finished(self, samples: int) -> int:
        """Input rows of which so many samples are there."""
        seen = Counter(key.row for key in self.rows)
        return sum(count >= samples for count in seen.values())


def journal_name(shard_index: int, chunk_index: int) -> str:
    """The name of a chunk's journal."""
    return f"{shard_index:05d}-{chunk_index:05d}.jsonl"


def read_journal(path: Path) -> Journaled:
    """What a journal holds; lines that are torn or damaged are passed over.

    Raises OSError if the file cannot be read.
    """
    name = JOURNAL_NAME.fullmatch(path.name)
    assert name is not None, path
    found = Journaled(None, {})
    for number, value in enumerate(_whole_lines(path)):
        if number == 0:
            found.header = _header(value)
        elif found.header is not None and (entry := _entry(int(name[1]), value)) is not None:
            found.rows[entry[0]] = entry[1]
    return found


class Journal:
    """Takes the finished rows of one chunk.

    Args:
        path: of the file, `journal_name` in a folder that is there. It is begun anew with the rows
            that it held before.
        header: of the chunk.
        before: those rows.

    Raises:
        AdaflashError: it cannot be written; so do `add` and `flush`.
    """

    def __init__(
        self, path: Path, header: JournalHeader, before: Mapping[RowKey, JournalRow] | None = None
    ) -> None:
        self._path = path
        lines = [_line({"format": FORMAT, **asdict(header)})]
        lines += [_line(_value(key, row)) for key, row in (before or {}).items()]
        scratch = path.with_name(f".{path.name}.partial")
        try:
            # Anew and not at its end: what is torn there would take the next line with it.
            scratch.write_bytes(b"".join(lines))
            scratch.replace(path)
        except OSError as error:
            raise write_error(str(path), error) from error

    def add(self, key: RowKey, row: JournalRow) -> None:
        """Keep a row; it outlives this process, though not the machine's fall."""
        line = _line(_value(key, row))
        try:
            # Opened each time: a job may have more open chunks than a process may have files.
            with open(self._path, "ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "the line was not written whole")
        except OSError as error:
            raise write_error(str(self._path), error) from error

    def flush(self) -> None:
        """Make what was added outlive the machine's fall, too."""
        try:
            flush(self._path)
            flush(self._path.parent)
        except OSError as error:
            raise write_error(str(self._path), error) from error

    def remove(self) -> None:
        """The chunk is committed: the journal goes."""
        self._path.unlink(missing_ok=True)


def chunk_header(chunk: Chunk, fingerprint: str, shard_digest: str) -> JournalHeader:
    """The header of a chunk's journal."""
    return JournalHeader(fingerprint, shard_digest, chunk.first_row, chunk.num_rows)


def _line(value: Mapping[str, Any]) -> bytes:
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for line in file:
            mark, _, data = line[:-1].partition(b" ")
            if line.endswith(b"\n") and mark == b"%08x" % zlib.crc32(data):
                yield json.loads(data)


def _header(value: dict[str, Any]) -> JournalHeader | None:
    try:
        return JournalHeader(**value) if value.pop("format") == FORMAT else None
    except (KeyError, TypeError):
        return None


def _value(key: RowKey, row: JournalRow) -> dict[str, Any]:
    served = row.row.served
    assert served is not None, "rows with errors are not kept: they may be served the next time"
    return {
        "row": key.row,
        "sample": key.sample,
        "completion": row.row.completion,
        "token_ids": served.token_ids,
        "finish_reason": served.finish_reason,
        "prompt_tokens": served.prompt_tokens,
        "truncated_tokens": served.truncated_tokens,
        "counts": asdict(served.counts),
        "timing": asdict(served.timing),
        "drafter_version": row.drafter_version,
        "sequence": row.sequence,
    }


def _entry(shard: int, value: dict[str, Any]) -> tuple[RowKey, JournalRow] | None:
    try:
        key = RowKey(shard, value["row"], value["sample"])
        served = Completion(
            key=key,
            token_ids=value["token_ids"],
            finish_reason=value["finish_reason"],
            prompt_tokens=value["prompt_tokens"],
            truncated_tokens=value["truncated_tokens"],
            counts=SpeculationCounts(**value["counts"]),
            timing=Timing(**value["timing"]),
        )
        row = OutputRow(value["completion"], served)
        return key, JournalRow(row, value["drafter_version"], value["sequence"])
    except (KeyError, TypeError):  # written by another version of this program
        return None
