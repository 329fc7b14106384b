"""Whether an id column can identify rows: no nulls, no repeats over all input files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.columns import is_string_like, plain_type, require_column
from adaflash_batch.shards.hashes import Hashes
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.parquet import open_shard, read_batches
from adaflash_batch.shards.prompts import read_ids, row_identity

RowId = str | int | bytes


@dataclass(frozen=True, slots=True)
class BadId:
    """A row that its id does not identify.

    Attributes:
        shard, row: where it is.
        row_id: its id; None where it is null.
        first: where the id stands first; None where it is null.
    """

    shard: Shard
    row: int
    row_id: RowId | None
    first: tuple[Shard, int] | None

    @property
    def message(self) -> str:
        """What is wrong, without the column's name."""
        if self.first is None:
            return f"of {self.shard.path} is null in row {self.row}"
        shard, row = self.first
        return (
            f"has {self.row_id!r} twice: in {shard.path} row {row} "
            f"and in {self.shard.path} row {self.row}"
        )


def check_ids(shards: Sequence[Shard], id_column: str) -> None:
    """Refuse an id column that does not identify rows, naming file and row.

    Raises:
        ConfigError: a missing column, a type that is neither text, integer nor bytes, a null, or
            an id that occurs twice.
    """
    for bad in bad_ids(shards, id_column):
        own = "an id" if bad.first is None else "its own id"
        raise ConfigError(
            f"column {id_column!r} {bad.message}",
            f"give every row {own}, or leave the id column out",
        )


def bad_ids(shards: Sequence[Shard], id_column: str) -> Iterator[BadId]:
    """The rows that an id column does not identify: first nulls, then repeats.

    Hashes are sorted in a temporary file (8 bytes a row), so memory does not grow with the number
    of rows; only where two are equal are the ids themselves compared.

    Raises:
        ConfigError: a missing column, or a type that is neither text, integer nor bytes.
    """
    for shard in shards:
        with open_shard(shard) as file:
            check_id_type(file.schema_arrow, id_column, shard.path)
    with Hashes() as hashes:
        for shard in shards:
            for first_row, ids in _read_id_batches(shard, id_column):
                rows = list(enumerate(ids, start=first_row))
                yield from (BadId(shard, row, None, None) for row, row_id in rows if row_id is None)
                known = [
                    row_identity("", row, row_id) for row, row_id in rows if row_id is not None
                ]
                hashes.add(np.array(known, dtype=np.uint64))
        for suspects in hashes.repeated():
            yield from _repeats(shards, id_column, suspects)


def check_id_type(schema: Any, id_column: str, path: str) -> None:
    """Refuse a file without the column, or with one that can hold no ids, by ConfigError."""
    arrow_type = require_column(schema, id_column, path, "the id column")
    plain = plain_type(arrow_type)
    if not (is_string_like(plain) or pa.types.is_integer(plain) or _is_binary(plain)):
        raise ConfigError(
            f"column {id_column!r} of {path} is {arrow_type}, it cannot identify rows",
            "ids must be text, integers or bytes",
        )


def _is_binary(arrow_type: Any) -> bool:
    types = pa.types
    return bool(
        types.is_binary(arrow_type)
        or types.is_large_binary(arrow_type)
        or types.is_binary_view(arrow_type)
        or types.is_fixed_size_binary(arrow_type)
    )


def _read_id_batches(shard: Shard, id_column: str) -> Iterator[tuple[int, list[RowId | None]]]:
    """(first row, ids) of each record batch."""
    with open_shard(shard) as file:
        row = 0
        for batch in read_batches(file, columns=[id_column]):
            ids = read_ids(pa.chunked_array([batch.column(id_column)]))
            yield row, ids
            row += len(ids)


def _repeats(shards: Sequence[Shard], id_column: str, suspects: set[int]) -> Iterator[BadId]:
    # Two different ids may share a hash; they then share random choices too, which harms nothing.
    seen: dict[RowId, tuple[Shard, int]] = {}
    for shard in shards:
        for first_row, ids in _read_id_batches(shard, id_column):
            for row, row_id in enumerate(ids, start=first_row):
                if row_id is None or row_identity("", row, row_id) not in suspects:
                    continue
                if row_id in seen:
                    yield BadId(shard, row, row_id, seen[row_id])
                seen.setdefault(row_id, (shard, row))
