"""Which input columns a job reads, and whether their types will do: settled before it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import sampling_fields

ContentKind = Literal["text", "messages"]

# In order of preference; a name counts only where every file has it with a fitting type.
_USUAL_NAMES = (
    "prompt",
    "messages",
    "conversation",
    "conversations",
    "question",
    "instruction",
    "query",
    "text",
    "input",
)


@dataclass(frozen=True, slots=True)
class ContentColumn:
    """The input column that prompts come from."""

    name: str
    kind: ContentKind


def plain_type(arrow_type: Any) -> Any:
    """The type of the values: of an extension's storage, of a dictionary's entries."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return plain_type(arrow_type.storage_type)
    if pa.types.is_dictionary(arrow_type):
        return plain_type(arrow_type.value_type)
    return arrow_type


def is_string_like(arrow_type: Any) -> bool:
    """Whether values are text or null, in any of Arrow's encodings of text."""
    plain, types = plain_type(arrow_type), pa.types
    return bool(
        types.is_string(plain)
        or types.is_large_string(plain)
        or types.is_string_view(plain)
        or types.is_null(plain)
    )


def is_list_like(arrow_type: Any) -> bool:
    """Whether values are lists, in any of Arrow's encodings of lists."""
    types = pa.types
    return bool(
        types.is_list(arrow_type)
        or types.is_large_list(arrow_type)
        or types.is_fixed_size_list(arrow_type)
        or types.is_list_view(arrow_type)
        or types.is_large_list_view(arrow_type)
    )


def is_messages(arrow_type: Any) -> bool:
    """Whether values are lists of structs that have a textual role and a textual content."""
    plain = plain_type(arrow_type)
    if not is_list_like(plain):
        return False
    turn = plain_type(plain.value_type)
    if pa.types.is_null(turn):
        return True
    if not pa.types.is_struct(turn):
        return False
    return all(
        (index := turn.get_field_index(name)) >= 0 and is_string_like(turn.field(index).type)
        for name in ("role", "content")
    )


def detect_content(
    schemas: Sequence[Any],
    prompt_column: str | None = None,
    messages_column: str | None = None,
    *,
    names: Sequence[str] | None = None,
    exclude: Collection[str] = (),
) -> ContentColumn:
    """Choose the column of prompts for all input files.

    Args:
        schemas: Arrow schema of each file, at least one.
        prompt_column: the column of text that the user names.
        messages_column: the column of conversations that the user names.
        names: what to call the files in messages.
        exclude: columns that serve something else, never chosen unasked.

    Raises:
        ConfigError: the named column is missing or of a wrong type, or none can be told.
    """
    files = names or [f"input file {number}" for number in range(len(schemas))]
    if prompt_column is not None and messages_column is not None:
        raise ConfigError("both --prompt-column and --messages-column are given", "give one")
    if prompt_column is not None:
        _require(schemas, files, prompt_column, "text")
        return ContentColumn(prompt_column, "text")
    if messages_column is not None:
        _require(schemas, files, messages_column, "messages")
        return ContentColumn(messages_column, "messages")
    return _guess(schemas, exclude)


def require_column(schema: Any, name: str, file: str, purpose: str) -> Any:
    """The type of a column; ConfigError if the file has none of that name, or two."""
    indices = schema.get_all_field_indices(name)
    if not indices:
        raise ConfigError(
            f"{file} has no column {name!r} ({purpose})", f"its columns are {describe(schema)}"
        )
    if len(indices) > 1:
        raise ConfigError(f"{file} has {len(indices)} columns named {name!r} ({purpose})")
    return schema.field(indices[0]).type


def describe(schema: Any) -> str:
    """Columns and their types, for people."""
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"


def check_sampling_columns(
    schema: Any, columns: Mapping[str, str], file: str = "the input file"
) -> None:
    """Check that the columns that set a row's sampling exist and can hold it.

    Args:
        schema: Arrow schema of one input file.
        columns: field of Sampling -> name of the input column.
        file: what to call the file in messages.

    Raises:
        ConfigError: naming the column and its type.
    """
    kinds = sampling_fields()
    for field, column in columns.items():
        if field not in kinds:
            raise ConfigError(
                f"{field!r} is nothing that a column can set", f"one of {', '.join(kinds)}"
            )
        arrow_type = require_column(schema, column, file, f"the rows' {field}")
        if not _holds(kinds[field], arrow_type):
            raise ConfigError(
                f"column {column!r} of {file} is {arrow_type}, it cannot set {field}",
                f"it must hold {_WANTED[kinds[field]]}",
            )


_WANTED = {
    "float": "numbers",
    "int": "whole numbers",
    "bool": "booleans",
    "strings": "a string or a list of strings",
    "ints": "a list of integers",
}


def _holds(kind: str, arrow_type: Any) -> bool:
    plain, types = plain_type(arrow_type), pa.types
    if types.is_null(plain):
        return True
    if kind == "bool":
        return bool(types.is_boolean(plain))
    if kind in ("float", "int"):
        # Whole numbers with nulls become floats in pandas: the values decide, row by row.
        return bool(types.is_integer(plain) or types.is_floating(plain) or types.is_decimal(plain))
    is_item = is_string_like if kind == "strings" else _is_integer_like
    return is_item(plain) or (is_list_like(plain) and is_item(plain.value_type))


def _is_integer_like(arrow_type: Any) -> bool:
    plain = plain_type(arrow_type)
    return bool(pa.types.is_integer(plain) or pa.types.is_null(plain))


def _require(schemas: Sequence[Any], files: Sequence[str], column: str, kind: ContentKind) -> None:
    option = "--prompt-column" if kind == "text" else "--messages-column"
    for schema, file in zip(schemas, files, strict=True):
        arrow_type = require_column(schema, column, file, option)
        if not _fits(arrow_type, kind):
            wanted = "text" if kind == "text" else "lists of {role, content}"
            hint = "give --messages-column instead" if is_messages(arrow_type) else None
            raise ConfigError(
                f"column {column!r} of {file} is {arrow_type}, {option} must hold {wanted}", hint
            )


def _fits(arrow_type: Any, kind: ContentKind) -> bool:
    if kind == "text":
        return is_string_like(arrow_type)
    return is_messages(arrow_type) or bool(pa.types.is_null(plain_type(arrow_type)))


def _guess(schemas: Sequence[Any], exclude: Collection[str]) -> ContentColumn:
    shared = [
        name
        for name in schemas[0].names
        if name not in exclude and all(s.names.count(name) == 1 for s in schemas)
    ]
    kinds = {
        name: kind
        for name in shared
        if (kind := _common_kind(s.field(name).type for s in schemas)) is not None
    }
    for name in _USUAL_NAMES:
        if name in kinds:
            return ContentColumn(name, kinds[name])
    texts = [name for name, kind in kinds.items() if kind == "text"]
    if len(texts) == 1:
        return ContentColumn(texts[0], "text")
    raise ConfigError(
        f"cannot tell which column holds the prompts: {describe(schemas[0])}",
        "name it with --prompt-column (text) or --messages-column (lists of {role, content})",
    )


def _common_kind(arrow_types: Iterable[Any]) -> ContentKind | None:
    """What all files agree on; a column that is all null in one file agrees with anything."""
    types = list(arrow_types)
    kinds: tuple[ContentKind, ...] = ("text", "messages")
    return next((k for k in kinds if all(_fits(arrow_type, k) for arrow_type in types)), None)
