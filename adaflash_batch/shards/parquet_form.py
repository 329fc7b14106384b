"""Tables to Parquet, also where Arrow's own writer stops: they read back as they were."""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adaflash_batch.shards.stored_views import stored_array, stored_type

# Where Arrow's reader finds the types that Parquet itself does not know.
_ARROW_SCHEMA = b"ARROW:schema"


_OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}


def write_parquet(table: Any, target: Any) -> None:
    """Write a table with its schema and metadata. Raises OSError or an ArrowException."""
    pieces = _pieces(table)
    if len(pieces) == 1 and _stored_schema(table.schema).equals(table.schema):
        pq.write_table(pieces[0], target, **_OPTIONS)
        return
    with TableWriter(target, table.schema) as writer:
        writer.write(table)


class TableWriter:
    """Writes tables of one schema into one file, each in row groups of its own.

    Two things that readers bring are beyond `pq.ParquetWriter` (pyarrow 26): dictionaries that
    together have more entries than their index type can count, each of which gets a row group of
    its own, and views of text within structs, which are stored as text and declared to be views.
    """

    def __init__(self, target: Any, schema: Any) -> None:
        self._schema, self._stored = schema, _stored_schema(schema)
        self._as_it_is = self._stored.equals(schema)
        self._writer = pq.ParquetWriter(
            target, self._stored, store_schema=self._as_it_is, **_OPTIONS
        )

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._as_it_is:
            declared = base64.b64encode(self._schema.serialize())
            metadata = (self._schema.metadata or {}) | {_ARROW_SCHEMA: declared}
            self._writer.add_key_value_metadata(metadata)
        self._writer.close()

    def write(self, table: Any) -> None:
        """Add the rows of a table. Raises OSError or an ArrowException."""
        for piece in _pieces(table):
            self._writer.write_table(_stored_table(piece, self._stored))


def _pieces(table: Any) -> list[Any]:
    """The whole table with one dictionary a column; where there is none, the pieces it came in."""
    try:
        # With several dictionaries a column would fall back to plain encoding.
        return [table.unify_dictionaries()]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return [pa.Table.from_batches([batch]) for batch in table.to_batches()]


def _stored_schema(schema: Any) -> Any:
    fields = [field.with_type(stored_type(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _stored_table(table: Any, schema: Any) -> Any:
    columns = [
        pa.chunked_array([stored_array(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)
