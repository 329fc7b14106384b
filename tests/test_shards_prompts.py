"""A bad row becomes a prompt with an error; a good one keeps its own settings."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.request import Message, Prompt, Sampling
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.prompts import build_prompts, row_identity

SHARD = Shard(3, "dir/a.parquet", "/dir/a.parquet")
TEXT = ContentColumn("prompt", "text")
MESSAGES = ContentColumn("messages", "messages")
TURN = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool", pa.int8())])
NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 3, pa.array([b"ok", b"\xff\xfe", None], pa.binary()).buffers()
)
USER = {"role": "user", "content": "hi"}


def build(
    table: Any,
    content: ContentColumn = TEXT,
    columns: Mapping[str, str] | None = None,
    sampling: Sampling | None = None,
    id_column: str | None = None,
) -> list[Prompt]:
    return build_prompts(
        SHARD,
        10,
        table,
        content,
        columns=columns or {},
        sampling=sampling or Sampling(),
        id_column=id_column,
    )


def kinds(prompts: list[Prompt]) -> list[str | None]:
    for prompt in prompts:
        assert (prompt.content is None) == (prompt.error is not None)
    return [prompt.error.kind if prompt.error else None for prompt in prompts]


@pytest.mark.parametrize(
    "arrow_type",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_texts_of_every_type(arrow_type: Any) -> None:
    values = ["hello", None, "", " \n\u3000", "<|im_end|>", "a\0b", "🇹🇭"]
    column = pa.array(values)
    if pa.types.is_dictionary(arrow_type):
        column = column.dictionary_encode()
    column = column.cast(arrow_type)
    table = pa.table({"prompt": pa.chunked_array([column[2:], column[:2]])})
    prompts = build(table)
    expected = ["empty_prompt", "empty_prompt", None, None, None, None, "null_prompt"]
    assert kinds(prompts) == expected
    assert [p.content for p in prompts if not p.error] == ["<|im_end|>", "a\0b", "🇹🇭", "hello"]
    assert [p.row for p in prompts] == list(range(10, 17))
    assert {p.shard for p in prompts} == {3}


def test_column_that_is_all_null() -> None:
    assert kinds(build(pa.table({"prompt": pa.nulls(2)}))) == ["null_prompt"] * 2
    assert kinds(build(pa.table({"messages": pa.nulls(2)}), MESSAGES)) == ["null_prompt"] * 2


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_that_is_not_utf8(arrow_type: Any) -> None:
    table = pa.table({"prompt": NOT_UTF8.cast(arrow_type)})
    assert kinds(build(table)) == [None, "bad_text", "null_prompt"]


@pytest.mark.parametrize("make", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_conversations(make: Any) -> None:
    rows = [
        [USER],
        None,
        [],
        [{"role": "system", "content": ""}, USER, {"role": "user", "content": "again"}],
        [{"role": "system", "content": " "}, {"role": "user", "content": "\n"}],
        [USER, None],
        [{"role": None, "content": "hi"}],
        [{"role": "", "content": "hi"}],
        [{"content": "hi"}],
        [USER, {"role": "assistant", "content": None}],
        [USER],
    ]
    table = pa.table({"messages": pa.array(rows, make(TURN))})
    for offset in range(len(rows)):
        prompts = build(table.slice(offset), MESSAGES)
        expected = [None, "null_prompt", "empty_prompt", None, "empty_prompt"]
        expected += ["bad_messages"] * 5 + [None]
        assert kinds(prompts) == expected[offset:]
        assert prompts[-1].content == (Message("user", "hi"),)
    assert build(table, MESSAGES)[3].content == (
        Message("system", ""),
        Message("user", "hi"),
        Message("user", "again"),
    )


def test_conversations_of_fixed_length_and_of_nothing() -> None:
    fixed = pa.array([[USER], None, [None], [USER]], pa.list_(TURN, 1))
    prompts = build(pa.table({"messages": fixed}), MESSAGES)
    assert kinds(prompts) == [None, "null_prompt", "bad_messages", None]
    nothing = pa.array([[], None, [None]], pa.list_(pa.null()))
    assert kinds(build(pa.table({"messages": nothing}), MESSAGES)) == [
        "empty_prompt",
        "null_prompt",
        "bad_messages",
    ]


def test_conversation_with_dictionary_and_bad_bytes() -> None:
    roles = pa.array(["user", "user", "user"]).dictionary_encode()
    turns = pa.StructArray.from_arrays([roles, NOT_UTF8], ["role", "content"])
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    prompts = build(pa.table({"messages": column}), MESSAGES)
    assert kinds(prompts) == [None, "bad_messages", "bad_messages"]
    assert "UTF-8" in str(prompts[1].error)
    assert "turn 0" in str(prompts[2].error)


def test_row_settings_and_null_for_the_jobs() -> None:
    table = pa.table(
        {
            "prompt": ["a", "b", "c"],
            "heat": pa.array([0.5, None, 1], pa.float32()),
            "limit": pa.array([7.0, None, 9.0]),
            "seed": pa.array([2**64 - 1, None, 0], pa.uint64()),
            "end": pa.array([["x", "yy"], None, []], pa.list_(pa.string())),
            "ids": pa.array([[1, 2], None, []], pa.list_(pa.int16())),
            "eos": pa.array([True, None, False]),
        }
    )
    columns = {
        "temperature": "heat",
        "max_new_tokens": "limit",
        "seed": "seed",
        "stop": "end",
        "stop_token_ids": "ids",
        "ignore_eos": "eos",
    }
    job = Sampling(temperature=0.25, max_new_tokens=3, seed=5, stop=("j",), stop_token_ids=(9,))
    rows = [prompt.sampling for prompt in build(table, TEXT, columns, job)]
    assert rows[1] == job
    assert rows[0] == Sampling(
        temperature=0.5,
        max_new_tokens=7,
        seed=2**64 - 1,
        stop=("x", "yy"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
    )
    assert rows[2] == Sampling(temperature=1.0, max_new_tokens=9)
    assert isinstance(rows[0].max_new_tokens, int)


def test_single_stop_string_and_single_token_id() -> None:
    table = pa.table({"prompt": ["a"], "end": ["STOP"], "id": pa.array([7], pa.int8())})
    (prompt,) = build(table, TEXT, {"stop": "end", "stop_token_ids": "id"})
    assert prompt.sampling.stop == ("STOP",)
    assert prompt.sampling.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("field", "value", "arrow_type"),
    [
        ("temperature", -1.0, pa.float64()),
        ("temperature", float("nan"), pa.float64()),
        ("temperature", float("inf"), pa.float16()),
        ("top_p", 0, pa.int8()),
        ("top_p", Decimal("1.5"), pa.decimal128(3, 1)),
        ("min_p", float("nan"), pa.float32()),
        ("max_new_tokens", 0, pa.int32()),
        ("max_new_tokens", 1.5, pa.float64()),
        ("max_new_tokens", float("nan"), pa.float64()),
        ("max_new_tokens", float("inf"), pa.float64()),
        ("min_new_tokens", 1000, pa.int32()),
        ("n", 0, pa.int64()),
        ("n", -3, pa.int64()),
        ("top_k", -1, pa.int8()),
        ("stop", "", pa.string()),
        ("stop", ["a", None], pa.list_(pa.string())),
        ("stop", ["a", ""], pa.list_(pa.string())),
        ("stop_token_ids", [1, None], pa.list_(pa.int64())),
    ],
)
def test_bad_row_settings_spoil_only_their_row(field: str, value: Any, arrow_type: Any) -> None:
    table = pa.table({"prompt": ["a", "b"], "c": pa.array([value, None], arrow_type)})
    bad, good = build(table, TEXT, {field: "c"})
    assert kinds([bad, good]) == ["bad_sampling", None]
    assert field in str(bad.error)
    assert bad.sampling == good.sampling == Sampling()


def test_stop_that_is_not_utf8() -> None:
    table = pa.table({"prompt": ["a", "b", "c"], "c": NOT_UTF8})
    assert kinds(build(table, TEXT, {"stop": "c"})) == [None, "bad_sampling", None]


def test_what_is_wrong_with_the_prompt_is_said_first() -> None:
    table = pa.table({"prompt": [None, "b"], "n": [0, 3]})
    prompts = build(table, TEXT, {"n": "n"})
    assert kinds(prompts) == ["null_prompt", None]
    assert prompts[1].sampling.n == 3


def test_row_of_a_bad_prompt_keeps_its_number_of_samples() -> None:
    (prompt,) = build(pa.table({"prompt": [""], "n": [3]}), TEXT, {"n": "n"})
    assert prompt.sampling.n == 3


def test_equal_prompts_are_different_rows() -> None:
    prompts = build(pa.table({"prompt": ["same"] * 8}))
    assert len({prompt.identity for prompt in prompts}) == 8
    assert prompts[0].identity == row_identity("dir/a.parquet", 10)


def test_id_column_names_rows_wherever_they_are() -> None:
    texts = pa.table({"prompt": ["a", "b", "c"], "id": ["x", "y", None]})
    prompts = build(texts, TEXT, id_column="id")
    views = texts.set_column(1, "id", texts["id"].cast(pa.string_view()))
    assert [p.identity for p in prompts[:2]] == [
        row_identity("elsewhere", 0, "x"),
        row_identity("elsewhere", 5, "y"),
    ]
    assert [p.identity for p in build(views, TEXT, id_column="id")] == [p.identity for p in prompts]
    assert prompts[2].identity == row_identity("dir/a.parquet", 12)


row_keys = st.tuples(
    st.text(max_size=4),
    st.integers(0, 2**40),
    st.none() | st.text(max_size=4) | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=4),
)


def named_by(key: tuple[str, int, Any]) -> tuple[Any, ...]:
    name, row, row_id = key
    return (name, row) if row_id is None else (type(row_id), row_id)


@given(row_keys, row_keys)
def test_identities_are_equal_iff_what_names_the_row_is(
    first: tuple[str, int, Any], second: tuple[str, int, Any]
) -> None:
    same = named_by(first) == named_by(second)
    assert (row_identity(*first) == row_identity(*second)) is same
    assert 0 <= row_identity(*first) < 2**64


def test_identities_never_change() -> None:
    # Sampled text depends on them: a new value here breaks the resuming of older jobs.
    assert row_identity("a.parquet", 0) == 10724931793070318993
    assert row_identity("a.parquet", 0, "x") == 2684563819889815032
    assert row_identity("a.parquet", 0, 1) == 5002557075200177490
