"""Rows to prompts. Nothing that a row contains raises: a bad row becomes a prompt with an error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Message, Prompt, RowError, Sampling, sampling_fields
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.inputs import Shard

Content = str | tuple[Message, ...]

_NULL = RowError("null_prompt", "the prompt is null")
_EMPTY = RowError("empty_prompt", "the prompt is empty")
_EMPTY_MESSAGES = RowError("empty_prompt", "the conversation says nothing")
# Stands for text that cannot be decoded: of a type that no field of Sampling takes.
_NOT_TEXT = b"not valid UTF-8"
_NOT_UTF8 = RowError("bad_text", "the prompt is not valid UTF-8")


def row_identity(shard_name: str, row: int, row_id: object | None = None) -> int:
    """64 bits that name a row for random choices: its id if it has one, else file name and row.

    Text, integers and bytes are told apart: "1" is another id than 1.
    """
    if row_id is None:
        name = shard_name.encode()
        # The length keeps name and row apart, whatever the name ends in.
        encoded = b"row" + len(name).to_bytes(8, "little") + name + row.to_bytes(8, "little")
    elif isinstance(row_id, str):
        encoded = b"str" + row_id.encode()
    elif isinstance(row_id, bytes):
        encoded = b"hex" + row_id
    else:
        encoded = b"int" + str(row_id).encode()
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def build_prompts(
    shard: Shard,
    first_row: int,
    table: Any,
    content: ContentColumn,
    *,
    columns: Mapping[str, str],
    sampling: Sampling,
    id_column: str | None,
) -> list[Prompt]:
    """The prompts of consecutive rows of a file; see `reader.read_chunks`."""
    read = read_texts if content.kind == "text" else read_conversations
    contents = read(table.column(content.name))
    samplings = _read_samplings(table, columns, sampling)
    ids = read_ids(table.column(id_column)) if id_column is not None else [None] * len(contents)
    prompts = []
    for row, (said, own, row_id) in enumerate(
        zip(contents, samplings, ids, strict=True), start=first_row
    ):
        bad_sampling = own if isinstance(own, RowError) else None
        error = said if isinstance(said, RowError) else bad_sampling
        prompts.append(
            Prompt(
                shard=shard.index,
                row=row,
                identity=row_identity(shard.name, row, row_id),
                content=None if error or isinstance(said, RowError) else said,
                sampling=sampling if isinstance(own, RowError) else own,
                error=error,
            )
        )
    return prompts


def read_texts(column: Any) -> list[str | RowError]:
    """Prompts of a string-like column."""
    return [_as_text(value) for chunk in column.chunks for value in _strings(chunk)]


def read_conversations(column: Any) -> list[tuple[Message, ...] | RowError]:
    """Conversations of a column of lists of structs, or of an all-null column."""
    return [value for chunk in column.chunks for value in _conversations(chunk)]


def read_ids(column: Any) -> list[str | int | bytes | None]:
    """Ids of a column of text, integers or bytes; text that is not UTF-8 counts as bytes."""
    return [value for chunk in column.chunks for value in _strings(chunk)]


def _as_text(value: Any) -> str | RowError:
    if value is None:
        return _NULL
    if isinstance(value, bytes):
        return _NOT_UTF8
    return _EMPTY if not value or value.isspace() else str(value)


def _plain(array: Any) -> Any:
    """Without extension type and dictionary."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _plain(array.storage)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _strings(array: Any) -> list[Any]:
    """Python values of a column; where text is not valid UTF-8, its bytes."""
    plain = _plain(array)
    try:
        return list(plain.to_pylist())
    except UnicodeDecodeError:
        return [_decoded(value) for value in plain.cast(pa.large_binary()).to_pylist()]


def _decoded(value: bytes | None) -> str | bytes | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _conversations(array: Any) -> list[tuple[Message, ...] | RowError]:
    array = _plain(array)
    if pa.types.is_null(array.type):
        return [_NULL] * len(array)
    starts, lengths = _list_places(array)
    used = [
        (start, start + length) for start, length in zip(starts, lengths, strict=True) if length
    ]
    begin = min((start for start, _ in used), default=0)
    end = max((end for _, end in used), default=0)
    roles, contents = _roles_and_contents(array.values.slice(begin, end - begin))
    conversations: list[tuple[Message, ...] | RowError] = []
    for start, length in zip(starts, lengths, strict=True):
        if length is None:
            conversations.append(_NULL)
            continue
        place = slice(start - begin, start - begin + length) if length else slice(0)
        conversations.append(_conversation(roles[place], contents[place]))
    return conversations


def _list_places(array: Any) -> tuple[list[int], list[int | None]]:
    """Where each row's items begin in `array.values`, and how many there are; None for null."""
    # Not flatten(): it cannot leave out nulls where items are of an extension type.
    lengths = pc.list_value_length(array).to_pylist()
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return [(array.offset + row) * size for row in range(len(array))], lengths
    return array.offsets.to_pylist()[: len(array)], lengths


def _roles_and_contents(turns: Any) -> tuple[list[Any], list[Any]]:
    turns = _plain(turns)
    if pa.types.is_null(turns.type):
        return [None] * len(turns), [None] * len(turns)
    roles, contents = (_strings(pc.struct_field(turns, name)) for name in ("role", "content"))
    return roles, contents


def _conversation(roles: list[Any], contents: list[Any]) -> tuple[Message, ...] | RowError:
    for turn, (role, text) in enumerate(zip(roles, contents, strict=True)):
        if not isinstance(role, str) or not role or not isinstance(text, str):
            return RowError("bad_messages", f"turn {turn} {_complaint(role, text)}")
    if not any(text.strip() for text in contents):
        return _EMPTY_MESSAGES
    return tuple(map(Message, roles, contents))


def _complaint(role: Any, text: Any) -> str:
    if role is None and text is None:
        return "is null or has neither role nor content"
    if not role:
        return "has no role"
    if text is None:
        return "has no content (null)"
    return "is not valid UTF-8"


def _read_samplings(
    table: Any, columns: Mapping[str, str], sampling: Sampling
) -> list[Sampling | RowError]:
    """Each row's sampling: its columns over the job's, null leaving the job's."""
    if not columns:
        return [sampling] * table.num_rows
    fields = list(columns)
    values = [_hashable_values(table.column(columns[field])) for field in fields]
    # Rows repeat each other's settings, and making a Sampling costs more than all the rest.
    known: dict[tuple[Any, ...], Sampling | RowError] = {}
    samplings = []
    for row_values in zip(*values, strict=True):
        if row_values not in known:
            known[row_values] = _overlay(
                sampling, columns, dict(zip(fields, row_values, strict=True))
            )
        samplings.append(known[row_values])
    return samplings


def _hashable_values(column: Any) -> list[Any]:
    values = [value for chunk in column.chunks for value in _python_values(_plain(chunk))]
    return [tuple(value) if isinstance(value, list) else value for value in values]


def _python_values(array: Any) -> list[Any]:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        return [_python_value(scalar) for scalar in array]


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _NOT_TEXT


def _overlay(
    sampling: Sampling, columns: Mapping[str, str], values: Mapping[str, Any]
) -> Sampling | RowError:
    kinds = sampling_fields()
    own: dict[str, Any] = {}
    for field, value in values.items():
        if value is None:
            continue
        try:
            own[field] = _CONVERTERS[kinds[field]](value)
        except (ValueError, TypeError, OverflowError):
            return RowError("bad_sampling", f"column {columns[field]}: {field} is {value!r}")
    try:
        return replace(sampling, **own) if own else sampling
    except ConfigError as error:
        return RowError("bad_sampling", error.message)


def _whole(value: Any) -> int:
    if value != int(value):
        raise ValueError(value)
    return int(value)


def _texts(value: str | tuple[Any, ...]) -> tuple[str, ...]:
    texts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(value)
    return texts


def _token_ids(value: int | tuple[Any, ...]) -> tuple[int, ...]:
    ids = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(token_id, int) for token_id in ids):
        raise TypeError(value)
    return ids


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "int": _whole,
    "bool": bool,
    "strings": _texts,
    "ints": _token_ids,
}
