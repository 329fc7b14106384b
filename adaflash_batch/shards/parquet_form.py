"""Tables to Parquet, also where Arrow's own writer stops: they read back as they were."""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adaflash_batch.shards.stored_views import stored_array, stored_type

# Where Arrow's reader finds the types that Parquet itself does not know.
_ARROW_SCHEMA = b"ARROW:schema"


def write_parquet(table: Any, target: Any) -> None:
    """Write a table with its schema and metadata. Raises OSError or an ArrowException.

    Two things that readers bring are beyond `pq.write_table` (pyarrow 26): dictionaries that
    together have more entries than their index type can count, each of which gets row groups of
    its own, and views of text within structs, which are stored as text and declared to be views.
    """
    options = {"compression": "zstd", "write_page_checksum": True}
    pieces, stored = _pieces(table), _stored_schema(table.schema)
    if len(pieces) == 1 and stored.equals(table.schema):
        pq.write_table(pieces[0], target, **options)
        return
    declared = base64.b64encode(table.schema.serialize())
    with pq.ParquetWriter(target, stored, store_schema=False, **options) as writer:
        for piece in pieces:
            writer.write_table(_stored_table(piece, stored))
        writer.add_key_value_metadata((table.schema.metadata or {}) | {_ARROW_SCHEMA: declared})


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
