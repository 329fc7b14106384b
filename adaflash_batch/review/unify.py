"""One schema for outputs whose inputs have different ones, and rows cast to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from adaflash_batch.errors import ConfigError, first_line
from adaflash_batch.shards.columns import is_string_like, plain_type
from adaflash_batch.shards.footer import NAMESPACE
from adaflash_batch.shards.schema import OUR_COLUMNS


@dataclass(slots=True)
class Unified:
    """A common schema.

    Attributes:
        schema: with the inputs' metadata.
        notes: lines for people about what is not as it was in every file.
    """

    schema: Any
    notes: list[str] = field(default_factory=list)


def unify(schemas: Mapping[str, Any], prefix: str) -> Unified:
    """A schema that holds the rows of all outputs; the inputs' columns first, then ours.

    Texts of several encodings become `string`, or `large_string` where one of them is; a
    dictionary's values stand for themselves unless all files have that dictionary's type; null,
    integers, floats, lists and structs go to the wider type. A column that a file lacks is null in
    its rows.

    Args:
        schemas: of the output of each input file, by the file's name; at least one.
        prefix: of our columns.

    Raises:
        ConfigError: two types of a column have nothing in common, or it is there twice.
    """
    ours = [prefix + name for name, _ in OUR_COLUMNS]
    first = next(iter(schemas.values()))
    metadata, notes = _metadata(schemas)
    if all(schema.equals(first) for schema in schemas.values()):
        return Unified(first.with_metadata(metadata), notes)
    for name, schema in schemas.items():
        _refuse_repeats(name, schema)
    columns = dict.fromkeys(column for schema in schemas.values() for column in schema.names)
    theirs = [column for column in columns if column not in ours]
    fields = [_field(column, schemas, notes) for column in (*theirs, *ours)]
    return Unified(pa.schema(fields, metadata=metadata), notes)


def conform(batch: Any, schema: Any, name: str) -> Any:
    """A record batch in another schema; ConfigError where a value does not fit, naming column.

    Args:
        name: what to call the file that it is from.
    """
    if batch.schema.equals(schema):
        return batch.replace_schema_metadata(schema.metadata)
    if batch.schema.names == schema.names:  # which may have a name twice
        columns = list(batch.columns)
    else:
        here = set(batch.schema.names)
        columns = [batch.column(f.name) if f.name in here else None for f in schema]
    arrays = [
        pa.nulls(batch.num_rows, f.type) if column is None else _cast(column, f, name)
        for f, column in zip(schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(column: Any, wanted: Any, name: str) -> Any:
    if column.type.equals(wanted.type):
        return column
    try:
        if pa.types.is_dictionary(column.type) and not pa.types.is_dictionary(wanted.type):
            column = column.dictionary_decode()
        return column.cast(wanted.type)
    except pa.ArrowException as error:
        raise ConfigError(
            f"column {wanted.name!r} of {name} is {column.type}, a value of it does not fit the "
            f"common type {wanted.type}: {first_line(error)}",
            "merge the parts of each input file by itself",
        ) from error


def _field(column: str, schemas: Mapping[str, Any], notes: list[str]) -> Any:
    found = {name: s.field(column) for name, s in schemas.items() if column in s.names}
    lacking = [name for name in schemas if name not in found]
    first_name, first = next(iter(found.items()))
    common = first.type
    for name, each in found.items():
        both = _common(common, each.type)
        if both is None:
            raise ConfigError(
                f"column {column!r} is {first.type} in {first_name} and {each.type} in {name}, "
                "which have no type in common",
                "merge the parts of each input file by itself, or give the inputs one type",
            )
        common = both
    kinds: dict[str, str] = {}
    for name, each in found.items():
        kinds.setdefault(str(each.type), name)
    if len(kinds) > 1:
        told = ", ".join(f"{kind} in {name}" for kind, name in kinds.items())
        notes.append(f"column {column!r} is {told}; it becomes {common}")
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        notes.append(f"column {column!r} is not in {lacking[0]}{more}; it is null there")
    nullable = bool(lacking) or any(each.nullable for each in found.values())
    return pa.field(column, common, nullable, first.metadata)


def _common(one: Any, other: Any) -> Any:
    """A type for the values of both, None if there is none."""
    if one.equals(other):
        return one
    values = [plain_type(one), plain_type(other)]
    if all(map(is_string_like, values)) and not all(map(pa.types.is_null, values)):
        is_large = any(not (pa.types.is_string(v) or pa.types.is_null(v)) for v in values)
        return pa.large_string() if is_large else pa.string()
    if pa.types.is_null(one) or pa.types.is_null(other):
        return other if pa.types.is_null(one) else one
    try:
        fields = [pa.schema([("value", value)]) for value in values]
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except (pa.ArrowException, TypeError):
        return None


def _refuse_repeats(name: str, schema: Any) -> None:
    repeated = sorted({column for column in schema.names if schema.names.count(column) > 1})
    if repeated:
        raise ConfigError(
            f"{name} has two columns named {repeated[0]!r}, and other columns than other input "
            "files, so it cannot be told which is which",
            "merge the parts of each input file by itself",
        )


def _metadata(schemas: Mapping[str, Any]) -> tuple[dict[bytes, bytes], list[str]]:
    """The inputs' metadata; of different values of a key the first."""
    merged: dict[bytes, bytes] = {}
    other: dict[bytes, str] = {}
    for name, schema in schemas.items():
        for key, value in _inputs_metadata(schema):
            if merged.setdefault(key, value) != value:
                other.setdefault(key, name)
    notes = [
        f"the schema metadata {key.decode(errors='replace')!r} of {name} is another one; the "
        "first input file's is kept"
        for key, name in other.items()
    ]
    return merged, notes


def _inputs_metadata(schema: Any) -> Iterator[tuple[bytes, bytes]]:
    for key, value in (schema.metadata or {}).items():
        if not key.startswith(NAMESPACE):
            yield key, value
