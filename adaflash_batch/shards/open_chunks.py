"""Chunks on their way: which rows are still missing, and the commit when none is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from adaflash_batch.request import Prompt, RowError, RowKey
from adaflash_batch.shards.journal_folder import JournalFolder
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.schema import OutputRow

Commit = Callable[[Chunk, dict[RowKey, OutputRow]], None]


@dataclass(slots=True)
class _OpenChunk:
    """rows: the outputs so far; missing: samples still to come for each row, by position."""

    chunk: Chunk
    missing: list[int]
    num_unfinished: int
    rows: dict[RowKey, OutputRow] = field(default_factory=dict)


class OpenChunks:
    """Takes rows in any order and commits each chunk as soon as it is whole.

    Args:
        chunk_rows: rows of a chunk; the last one of a file may have fewer.
        commit: called once a chunk, with all its output rows.
        journals: keep what is finished of chunks that are not whole; None keeps nothing.
    """

    def __init__(
        self, chunk_rows: int, commit: Commit, journals: JournalFolder | None = None
    ) -> None:
        self._chunk_rows = chunk_rows
        self._commit = commit
        self._journals = journals
        self._open: dict[tuple[int, int], _OpenChunk] = {}

    @property
    def num_open(self) -> int:
        """Chunks that have begun and are not whole."""
        return len(self._open)

    def begin(self, chunk: Chunk) -> tuple[Collection[RowKey], int]:
        """Open a chunk; it has at least one row.

        Returns the samples that a run before this one finished, and how many input rows are
        finished by them. A chunk that is whole by them is committed at once.
        """
        missing = [prompt.sampling.n for prompt in chunk.prompts]
        key = (chunk.shard.index, chunk.index)
        self._open[key] = _OpenChunk(chunk, missing, len(missing))
        found = {} if self._journals is None else self._journals.begin(chunk)
        num_finished = sum(self._put(each, row, 1) for each, row in found.items())
        return found.keys(), num_finished

    def prompt(self, key: RowKey) -> Prompt:
        """The prompt that a row of an open chunk came from."""
        opened = self._find(key)
        return opened.chunk.prompts[key.row - opened.chunk.first_row]

    def put(self, key: RowKey, row: OutputRow, version: int | None = None) -> bool:
        """Take one sample; True when its input row is finished.

        Args:
            version: of the drafter, as the journal notes it.
        """
        if self._journals is not None:
            self._journals.add(self._find(key).chunk, key, row, version)
        return self._put(key, row, 1)

    def refuse(self, prompt: Prompt, error: RowError) -> None:
        """Finish a row that never became a request: one output row, whatever n is."""
        row = OutputRow(None, error)
        self._put(RowKey(prompt.shard, prompt.row, 0), row, prompt.sampling.n)

    def errors(self) -> Iterator[tuple[Chunk, RowKey, RowError]]:
        """The rows with errors of chunks that are not whole."""
        for opened in self._open.values():
            for key, row in opened.rows.items():
                if row.error is not None:
                    yield opened.chunk, key, row.error

    def _put(self, key: RowKey, row: OutputRow, samples: int) -> bool:
        opened = self._find(key)
        assert key not in opened.rows, f"{key} came twice"
        opened.rows[key] = row
        index = key.row - opened.chunk.first_row
        opened.missing[index] -= samples
        is_finished = opened.missing[index] == 0
        if is_finished:
            opened.num_unfinished -= 1
            if opened.num_unfinished == 0:
                del self._open[opened.chunk.shard.index, opened.chunk.index]
                self._commit(opened.chunk, opened.rows)
                if self._journals is not None:
                    self._journals.end(opened.chunk)
        return is_finished

    def _find(self, key: RowKey) -> _OpenChunk:
        return self._open[key.shard, key.row // self._chunk_rows]
