"""Whether an id column can identify rows: no nulls, no repeats over all input files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.columns import is_string_like, plain_type, require_column
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.parquet import open_shard, read_batches
from adaflash_batch.shards.prompts import read_ids, row_identity

_RowId = str | int | bytes
_SORT_BLOCK = 1 << 20


def check_ids(shards: Sequence[Shard], id_column: str) -> None:
    """Refuse an id column that does not identify rows, naming file and row.

    The hashes are sorted in a temporary file (8 bytes a row), so memory does not grow with the
    number of rows; only where two are equal are the ids themselves compared.

    Raises:
        ConfigError: a missing column, a type that is neither text, integer nor bytes, a null, or
            an id that occurs twice.
    """
    num_rows = sum(_check_type(shard, id_column) for shard in shards)
    if num_rows == 0:
        return
    with TemporaryFile() as file:
        hashes = np.memmap(file, dtype=np.uint64, shape=(num_rows,))
        end = 0
        for batch_hashes in _read_hashes(shards, id_column):
            hashes[end : end + len(batch_hashes)] = batch_hashes
            end += len(batch_hashes)
        hashes.sort()
        for suspects in _repeats(hashes):
            _refuse_repeats(shards, id_column, suspects)


def _check_type(shard: Shard, id_column: str) -> int:
    """Rows of the file, once the type of its id column is known to do."""
    with open_shard(shard) as file:
        schema, num_rows = file.schema_arrow, int(file.metadata.num_rows)
    arrow_type = require_column(schema, id_column, shard.path, "the id column")
    plain = plain_type(arrow_type)
    if not (is_string_like(plain) or pa.types.is_integer(plain) or _is_binary(plain)):
        raise ConfigError(
            f"column {id_column!r} of {shard.path} is {arrow_type}, it cannot identify rows",
            "ids must be text, integers or bytes",
        )
    return num_rows


def _is_binary(arrow_type: Any) -> bool:
    types = pa.types
    return bool(
        types.is_binary(arrow_type)
        or types.is_large_binary(arrow_type)
        or types.is_binary_view(arrow_type)
        or types.is_fixed_size_binary(arrow_type)
    )


def _read_id_batches(shard: Shard, id_column: str) -> Iterator[tuple[int, list[_RowId]]]:
    """(first row, ids) of each record batch; ConfigError at a null."""
    with open_shard(shard) as file:
        row = 0
        for batch in read_batches(file, columns=[id_column]):
            ids = read_ids(pa.chunked_array([batch.column(id_column)]))
            present = [row_id for row_id in ids if row_id is not None]
            if len(present) < len(ids):
                raise ConfigError(
                    f"column {id_column!r} of {shard.path} is null in row {row + ids.index(None)}",
                    "give every row an id, or leave the id column out",
                )
            yield row, present
            row += len(ids)


def _read_hashes(shards: Sequence[Shard], id_column: str) -> Iterator[Any]:
    for shard in shards:
        for first_row, ids in _read_id_batches(shard, id_column):
            hashes = (row_identity("", first_row, row_id) for row_id in ids)
            yield np.fromiter(hashes, dtype=np.uint64, count=len(ids))


def _repeats(hashes: Any) -> Iterator[set[int]]:
    """The values that occur twice in a sorted array, some at a time."""
    for start in range(0, len(hashes) - 1, _SORT_BLOCK):
        block = hashes[start : start + _SORT_BLOCK + 1]
        repeated = np.unique(block[1:][block[1:] == block[:-1]])
        if len(repeated):
            yield set(repeated.tolist())


def _refuse_repeats(shards: Sequence[Shard], id_column: str, suspects: set[int]) -> None:
    # Two different ids may share a hash; they then share random choices too, which harms nothing.
    seen: dict[_RowId, tuple[str, int]] = {}
    for shard in shards:
        for first_row, ids in _read_id_batches(shard, id_column):
            for row, row_id in enumerate(ids, start=first_row):
                if row_identity("", row, row_id) not in suspects:
                    continue
                if row_id in seen:
                    path, other = seen[row_id]
                    raise ConfigError(
                        f"column {id_column!r} has {row_id!r} twice: in {path} row {other} "
                        f"and in {shard.path} row {row}",
                        "give every row its own id, or leave the id column out",
                    )
                seen[row_id] = (shard.path, row)
