"""Which column holds the prompts, and which types are refused before a job starts."""

from typing import Any

import pyarrow as pa
import pytest

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import sampling_fields
from adaflash_batch.shards.columns import ContentColumn, check_sampling_columns, detect_content

TURN = pa.struct([("role", pa.string()), ("content", pa.large_string()), ("extra", pa.int8())])
CHAT = pa.list_(TURN)


def schema(**columns: Any) -> Any:
    return pa.schema(list(columns.items()))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": pa.string(), "text": pa.string()}, ("prompt", "text")),
        ({"text": pa.string(), "messages": CHAT}, ("messages", "messages")),
        ({"prompt": CHAT, "answer": pa.string()}, ("prompt", "messages")),
        ({"prompt": pa.int64(), "question": pa.string()}, ("question", "text")),
        ({"messages": pa.string(), "text": pa.int8()}, ("messages", "text")),
        ({"id": pa.int64(), "body": pa.large_string()}, ("body", "text")),
        ({"body": pa.dictionary(pa.int8(), pa.string())}, ("body", "text")),
        ({"input": pa.string_view()}, ("input", "text")),
        ({"prompt": pa.null()}, ("prompt", "text")),
        ({"conversations": pa.large_list(TURN)}, ("conversations", "messages")),
        ({"conversation": pa.list_(TURN, 2)}, ("conversation", "messages")),
    ],
)
def test_detection(columns: dict[str, Any], expected: tuple[str, str]) -> None:
    assert detect_content([schema(**columns)]) == ContentColumn(*expected)  # type: ignore[arg-type]


def test_detection_over_files_of_different_types() -> None:
    files = [
        schema(prompt=pa.null(), text=pa.string()),
        schema(prompt=pa.string()),
        schema(prompt=pa.large_string(), text=pa.string()),
        schema(prompt=pa.dictionary(pa.int32(), pa.string())),
    ]
    assert detect_content(files) == ContentColumn("prompt", "text")
    assert detect_content([schema(prompt=pa.null()), schema(prompt=CHAT)]).kind == "messages"
    with pytest.raises(ConfigError):
        detect_content([schema(prompt=pa.string()), schema(prompt=CHAT)])


def test_column_that_serves_something_else_is_not_chosen() -> None:
    columns = schema(id=pa.string(), body=pa.string())
    assert detect_content([columns], exclude=["id"]).name == "body"


@pytest.mark.parametrize(
    "columns",
    [{"a": pa.string(), "b": pa.string()}, {"a": pa.int64()}, {}, {"raw": pa.binary()}],
)
def test_undecidable_lists_the_columns(columns: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_content([schema(**columns)])
    assert all(name in caught.value.message for name in columns)
    assert "--prompt-column" in str(caught.value.hint)


@pytest.mark.parametrize(
    "wrong",
    [pa.int64(), pa.list_(pa.int64()), pa.binary(), pa.list_(pa.string()), pa.float32(), CHAT],
    ids=str,
)
def test_wrong_type_names_file_column_and_type(wrong: Any) -> None:
    files = [schema(prompt=pa.string()), schema(prompt=wrong)]
    with pytest.raises(ConfigError) as caught:
        detect_content(files, "prompt", names=["one.parquet", "two.parquet"])
    for word in ("two.parquet", "'prompt'", str(wrong)):
        assert word in caught.value.message


@pytest.mark.parametrize(
    "wrong",
    [
        pa.string(),
        pa.list_(pa.string()),
        pa.list_(pa.struct([("role", pa.string())])),
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(pa.string()))])),
        pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())])),
        TURN,
    ],
    ids=str,
)
def test_wrong_messages_type(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="messages"):
        detect_content([schema(chat=wrong)], messages_column="chat")


def test_named_column_wins_and_must_exist() -> None:
    columns = schema(prompt=pa.string(), other=pa.string(), chat=CHAT)
    assert detect_content([columns], "other").name == "other"
    assert detect_content([columns], None, "chat").kind == "messages"
    with pytest.raises(ConfigError, match="no column 'nope'") as caught:
        detect_content([columns], "nope")
    assert "prompt (string)" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="both"):
        detect_content([columns], "other", "chat")


def test_column_that_exists_twice_is_refused() -> None:
    twice = pa.schema([("prompt", pa.string()), ("prompt", pa.string())])
    with pytest.raises(ConfigError, match="2 columns"):
        detect_content([twice], "prompt")
    with pytest.raises(ConfigError, match="cannot tell"):
        detect_content([twice])


RIGHT = {
    "float": [pa.float16(), pa.float64(), pa.int8(), pa.decimal128(5, 2), pa.null()],
    "int": [pa.uint64(), pa.int8(), pa.float64(), pa.null()],
    "bool": [pa.bool_(), pa.null()],
    "strings": [pa.string(), pa.list_(pa.string_view()), pa.large_list(pa.large_string())],
    "ints": [pa.int32(), pa.list_(pa.uint8()), pa.list_(pa.int64(), 2), pa.list_(pa.null())],
}
WRONG = {
    "float": [pa.string(), pa.bool_(), pa.list_(pa.float32())],
    "int": [pa.string(), pa.bool_(), pa.timestamp("s")],
    "bool": [pa.int8(), pa.string()],
    "strings": [pa.int64(), pa.binary(), pa.list_(pa.int8()), pa.list_(pa.list_(pa.string()))],
    "ints": [pa.float64(), pa.string(), pa.list_(pa.float64())],
}


@pytest.mark.parametrize("field", sorted(sampling_fields()))
def test_types_of_sampling_columns(field: str) -> None:
    kind = sampling_fields()[field]
    for arrow_type in RIGHT[kind]:
        check_sampling_columns(schema(c=arrow_type), {field: "c"})
    for arrow_type in WRONG[kind]:
        with pytest.raises(ConfigError) as caught:
            check_sampling_columns(schema(c=arrow_type), {field: "c"}, "in.parquet")
        for word in ("'c'", str(arrow_type), field, "in.parquet"):
            assert word in caught.value.message


def test_sampling_columns_must_exist_and_set_something() -> None:
    with pytest.raises(ConfigError, match="no column 'gone'"):
        check_sampling_columns(schema(c=pa.int8()), {"n": "gone"})
    with pytest.raises(ConfigError, match="'heat'"):
        check_sampling_columns(schema(c=pa.int8()), {"heat": "c"})
