"""Chunks on their way: which rows are still missing, and the commit when none is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adaflash_batch.request import Prompt, RowError, RowKey
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
    """

    def __init__(self, chunk_rows: int, commit: Commit) -> None:
        self._chunk_rows = chunk_rows
        self._commit = commit
        self._open: dict[tuple[int, int], _OpenChunk] = {}

    @property
    def num_open(self) -> int:
        """Chunks that have begun and are not whole."""
        return len(self._open)

    def begin(self, chunk: Chunk) -> None:
        """Open a chunk; it has at least one row."""
        missing = [prompt.sampling.n for prompt in chunk.prompts]
        key = (chunk.shard.index, chunk.index)
        self._open[key] = _OpenChunk(chunk, missing, len(missing))

    def prompt(self, key: RowKey) -> Prompt:
        """The prompt that a row of an open chunk came from."""
        opened = self._find(key)
        return opened.chunk.prompts[key.row - opened.chunk.first_row]

    def put(self, key: RowKey, row: OutputRow) -> bool:
        """Take one sample; True when its input row is finished."""
        return self._put(key, row, 1)

    def refuse(self, prompt: Prompt, error: RowError) -> None:
        """Finish a row that never became a request: one output row, whatever n is."""
        row = OutputRow(None, error)
        self._put(RowKey(prompt.shard, prompt.row, 0), row, prompt.sampling.n)

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
        return is_finished

    def _find(self, key: RowKey) -> _OpenChunk:
        return self._open[key.shard, key.row // self._chunk_rows]
