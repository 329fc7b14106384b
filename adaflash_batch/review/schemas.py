"""The schema of a part against the one that it should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from adaflash_batch.shards.footer import NAMESPACE
from adaflash_batch.shards.schema import OUR_COLUMNS

Difference = tuple[str | None, str]


def schema_differences(found: Any, wanted: Any, prefix: str) -> Iterator[Difference]:
    """Column (None: the metadata), and what of it is not as it should be.

    Args:
        found: of the part.
        wanted: None where nothing tells the input's columns: then only ours are looked at.
        prefix: of our columns.
    """
    if wanted is None:
        ours = [pa.field(prefix + name, arrow_type) for name, arrow_type in OUR_COLUMNS]
        names = {field.name for field in ours}
        wanted = pa.schema([*(field for field in found if field.name not in names), *ours])
    yield from _column_differences(found, wanted)
    yield from _metadata_differences(found.metadata or {}, wanted.metadata or {})


def _column_differences(found: Any, wanted: Any) -> Iterator[Difference]:
    if len(set(found.names)) < len(found) or len(set(wanted.names)) < len(wanted):
        if not found.equals(wanted):
            name = found.names[0] if found.names else None
            yield name, f"the columns are {_listed(found)}, they should be {_listed(wanted)}"
        return
    here, there = ({field.name: field for field in schema} for schema in (found, wanted))
    for name, field in there.items():
        if name not in here:
            yield name, f"is missing, it should be {_described(field)}"
        elif not here[name].equals(field):
            yield name, f"is {_described(here[name])}, it should be {_described(field)}"
    for name in (name for name in here if name not in there):
        yield name, "should not be there"
    if here.keys() == there.keys() and found.names != wanted.names:
        pairs = zip(found.names, wanted.names, strict=True)
        first, instead = next((one, other) for one, other in pairs if one != other)
        yield first, f"stands where {instead} should"


def _metadata_differences(
    found: Mapping[bytes, bytes], wanted: Mapping[bytes, bytes]
) -> Iterator[Difference]:
    for key, value in wanted.items():
        if not key.startswith(NAMESPACE) and found.get(key) != value:
            yield None, f"has not the input's schema metadata {key.decode(errors='replace')!r}"


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name}: {_described(field)}" for field in schema)


def _described(field: Any) -> str:
    return f"{field.type}" + ("" if field.nullable else " not null")
