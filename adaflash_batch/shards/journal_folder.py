"""The journals of a job's open chunks: what they still hold when a job goes on, and their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import RowKey
from adaflash_batch.shards.journal import (
    JOURNAL_NAME,
    Journal,
    JournalHeader,
    JournalRow,
    chunk_header,
    journal_name,
    read_journal,
)
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.portion import Portion
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.recovery import Committed
from adaflash_batch.shards.schema import OutputRow

JOURNALS = "journal"


class JournalFolder:
    """One journal a chunk, from its first finished row until it is committed.

    Args:
        folder: a local one, made when the first row comes.
        fingerprint: of the job.
        infos: its input files.

    Attributes:
        sequence: parts that the run's portion of the job has.
        notes: lines for people about what was found.
    """

    def __init__(self, folder: Path, fingerprint: str, infos: Sequence[ShardInfo]) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._infos = infos
        self._open: dict[tuple[int, int], Journal] = {}
        self._found: dict[tuple[int, int], tuple[JournalHeader, dict[RowKey, JournalRow]]] = {}
        self.sequence = 0
        self.notes: list[str] = []

    def recover(self, portion: Portion, done: Committed) -> None:
        """Read what a run before this one left, of this portion; what is committed too goes.

        Raises ConfigError if a journal cannot be read.
        """
        self.sequence = done.num_committed
        for path in sorted(self._folder.glob("*.jsonl")):
            name = JOURNAL_NAME.fullmatch(path.name)
            if name is None or not portion.holds(int(name[1]), int(name[2])):
                continue
            key = int(name[1]), int(name[2])
            if done.is_done(*key) or not self._take_over(path, key):
                path.unlink(missing_ok=True)

    def _take_over(self, path: Path, key: tuple[int, int]) -> bool:
        """Whether a journal is this job's, and is kept in mind."""
        try:
            found = read_journal(path)
        except OSError as error:
            raise ConfigError(f"cannot read the journal {path}: {error.strerror}") from error
        header = found.header
        is_ours = header is not None and (header.fingerprint, header.shard_digest) == (
            self._fingerprint,
            self._infos[key[0]].digest,
        )
        if header is None or not is_ours:
            what = "is of another job" if header is not None else "has no head"
            self.notes.append(f"{path} {what}: its rows are done again")
            return False
        if found.rows:
            self._found[key] = header, found.rows
        return bool(found.rows)

    def newest_version(self) -> tuple[int, int | None] | None:
        """Sequence and drafter's version of the last row that was found; None if none was."""
        rows = [row for _, rows in self._found.values() for row in rows.values()]
        if not rows:
            return None
        last = max(row.sequence for row in rows)
        versions = [row.drafter_version for row in rows if row.sequence == last]
        known = [version for version in versions if version is not None]
        return last, max(known) if known else None

    def begin(self, chunk: Chunk) -> Mapping[RowKey, OutputRow]:
        """The rows of a chunk that were finished before."""
        key = (chunk.shard.index, chunk.index)
        header, before = self._found.pop(key, (None, {}))
        if header is None or header != self._header(chunk):
            return {}
        self._open[key] = Journal(self._folder / journal_name(*key), header, before)
        return {row_key: row.row for row_key, row in before.items()}

    def add(self, chunk: Chunk, key: RowKey, row: OutputRow, version: int | None) -> None:
        """Keep a finished row; one with an error is not kept, since it may be served next time."""
        if row.served is None:
            return
        place = (chunk.shard.index, chunk.index)
        if place not in self._open:
            self._open[place] = self._create(chunk)
        self._open[place].add(key, JournalRow(row, version, self.sequence))

    def end(self, chunk: Chunk) -> None:
        """The chunk is committed."""
        self.sequence += 1
        journal = self._open.pop((chunk.shard.index, chunk.index), None)
        if journal is not None:
            journal.remove()

    def close(self) -> None:
        """Flush and let go; the files stay."""
        for journal in self._open.values():
            journal.flush()
        self._open.clear()

    def _create(self, chunk: Chunk) -> Journal:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {self._folder}: {error.strerror}") from error
        name = journal_name(chunk.shard.index, chunk.index)
        return Journal(self._folder / name, self._header(chunk))

    def _header(self, chunk: Chunk) -> JournalHeader:
        return chunk_header(chunk, self._fingerprint, self._infos[chunk.shard.index].digest)
