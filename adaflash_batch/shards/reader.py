"""Input files as chunks of rows with their prompts, streamed. The door to the reading side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from adaflash_batch.request import Prompt, Sampling
from adaflash_batch.shards.columns import (
    ContentColumn,
    check_sampling_columns,
    detect_content,
)
from adaflash_batch.shards.identity import check_ids
from adaflash_batch.shards.inputs import Shard, resolve_inputs
from adaflash_batch.shards.parquet import ShardInfo, inspect_shard, open_shard, read_batches
from adaflash_batch.shards.prompts import build_prompts, row_identity

__all__ = [
    "Chunk",
    "ContentColumn",
    "Shard",
    "ShardInfo",
    "check_ids",
    "check_sampling_columns",
    "detect_content",
    "inspect_shard",
    "num_chunks",
    "read_chunks",
    "resolve_inputs",
    "row_identity",
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of rows of a shard, the unit of commit.

    Attributes:
        shard: the input file.
        index: number of the chunk in it.
        first_row: row of the file that it begins with.
        table: all input columns, unchanged.
        prompts: one a row, in order.
    """

    shard: Shard
    index: int
    first_row: int
    table: Any
    prompts: list[Prompt]

    @property
    def num_rows(self) -> int:
        """Input rows in the chunk."""
        return len(self.prompts)


def num_chunks(num_rows: int, chunk_rows: int) -> int:
    """How many chunks a file of that many rows has; none if it has no rows."""
    return -(-num_rows // chunk_rows)


def read_chunks(
    shard: Shard,
    content: ContentColumn,
    chunk_rows: int,
    *,
    columns: Mapping[str, str],
    sampling: Sampling,
    id_column: str | None = None,
    skip: Callable[[int], bool] = lambda _: False,
) -> Iterator[Chunk]:
    """Yield the chunks of a file in order; a chunk, a record batch and a page are held at a time.

    Chunk k is rows [k * chunk_rows, (k + 1) * chunk_rows), whatever the row groups are.

    Args:
        shard: the file.
        content: the column of prompts.
        chunk_rows: rows a chunk, at least 1.
        columns: field of Sampling -> input column that sets it, null leaving the job's value.
        sampling: the job's.
        id_column: the column that identifies rows, else their position does.
        skip: chunks for which this is true are not built, and row groups that only such chunks
            use are not read.

    Raises:
        InputError: the file cannot be read any further.
    """
    with open_shard(shard) as file:
        for index, table in _read_tables(file, chunk_rows, skip):
            first_row = index * chunk_rows
            prompts = build_prompts(
                shard,
                first_row,
                table,
                content,
                columns=columns,
                sampling=sampling,
                id_column=id_column,
            )
            yield Chunk(shard, index, first_row, table, prompts)


def _read_tables(
    file: Any, chunk_rows: int, skip: Callable[[int], bool]
) -> Iterator[tuple[int, Any]]:
    wanted = {k for k in range(num_chunks(file.metadata.num_rows, chunk_rows)) if not skip(k)}
    for first_row, row_groups in _row_group_runs(file.metadata, chunk_rows, wanted):
        batches = read_batches(file, row_groups=row_groups, max_rows=chunk_rows)
        pieces = _cut(batches, first_row, chunk_rows)
        for index, group in groupby(pieces, key=lambda piece: piece[0]):
            if index in wanted:
                yield index, pa.Table.from_batches([piece for _, piece in group])


def _row_group_runs(
    metadata: Any, chunk_rows: int, wanted: set[int]
) -> list[tuple[int, Sequence[int]]]:
    """(first row, row groups without a gap) for everything that the wanted chunks touch.

    No wanted chunk crosses a border between two runs.
    """
    runs: list[tuple[int, list[int]]] = []
    first_row, in_run = 0, False
    for group in range(metadata.num_row_groups):
        num_rows = metadata.row_group(group).num_rows
        if num_rows == 0:
            continue
        last_chunk = (first_row + num_rows - 1) // chunk_rows
        needed = not wanted.isdisjoint(range(first_row // chunk_rows, last_chunk + 1))
        if needed and not in_run:
            runs.append((first_row, []))
        if needed:
            runs[-1][1].append(group)
        in_run = needed
        first_row += num_rows
    return [(start, groups) for start, groups in runs]


def _cut(batches: Iterator[Any], row: int, chunk_rows: int) -> Iterator[tuple[int, Any]]:
    """Cut record batches at the borders of chunks: (chunk, slice)."""
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            index = row // chunk_rows
            size = min(batch.num_rows - start, (index + 1) * chunk_rows - row)
            yield index, batch.slice(start, size)
            start += size
            row += size
