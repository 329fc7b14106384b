"""The output's columns: the input's unchanged, ours typed, whatever the rows are."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Completion, Prompt, RowError, RowKey, Sampling, Timing
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.schema import OUR_COLUMNS, OutputRow, build_table, output_schema
from adaflash_batch.stats import SpeculationCounts

OUR_NAMES = [name for name, _ in OUR_COLUMNS]
FAILED = OutputRow(None, RowError("null_prompt", "the prompt is null"))


def make_chunk(table: Any, samples: Sequence[int]) -> Chunk:
    prompts = [Prompt(2, 40 + i, i, "p", Sampling(n=n)) for i, n in enumerate(samples)]
    return Chunk(Shard(2, "a", "/a"), 4, 40, table, prompts)


def served(row: int, sample: int = 0) -> tuple[RowKey, OutputRow]:
    key = RowKey(2, row, sample)
    counts = SpeculationCounts(drafter_first=3, drafter_last=5)
    counts.record(7, 4, 2)
    completion = Completion(key, [5, 6, 7], "length", 11, 2, counts, Timing(0.5, 0.25, 1.5))
    return key, OutputRow(f"text {row}/{sample}", completion)


def test_input_columns_come_first_and_unchanged() -> None:
    fields = [
        pa.field("b", pa.dictionary(pa.int8(), pa.string()), nullable=False, metadata={"k": "v"}),
        pa.field("a", pa.list_(pa.struct([("x", pa.float16())]))),
    ]
    columns = pa.schema(fields, metadata={"pandas": "{}"})
    out = output_schema(columns)
    assert pa.schema(list(out)[:2]).equals(pa.schema(fields), check_metadata=True)
    assert out.names[2:] == OUR_NAMES
    assert out.metadata == columns.metadata


def test_types_are_as_documented() -> None:
    assert [f"{name}: {arrow_type}" for name, arrow_type in OUR_COLUMNS] == [
        "completion: string",
        "finish_reason: string",
        "sample: int32",
        "error: struct<kind: string, message: string>",
        "usage: struct<prompt_tokens: int32, completion_tokens: int32, truncated_tokens: int32>",
        "spec: struct<steps: int32, drafted: int32, verified: int32, accepted: int32, "
        "accepted_hist: list<item: int32>, drafter_first: int32, drafter_last: int32, "
        "verified_hist: list<item: int32>, lookup_steps: int32, lookup_verified: int32, "
        "lookup_accepted: int32>",
        "timing: struct<queued_s: float, prefill_s: float, decode_s: float>",
    ]


@pytest.mark.parametrize("name", OUR_NAMES)
def test_clash_names_the_flag_that_settles_it(name: str) -> None:
    columns = pa.schema([("prompt", pa.string()), (name, pa.string())])
    with pytest.raises(ConfigError, match=f"'{name}'") as caught:
        output_schema(columns)
    assert "--output-prefix" in str(caught.value.hint)
    out = output_schema(columns, "new_")
    assert out.names == ["prompt", name, *(f"new_{ours}" for ours in OUR_NAMES)]
    with pytest.raises(ConfigError, match="new_"):
        output_schema(out, "new_")


def test_completed_row() -> None:
    table = pa.table({"prompt": ["p"]})
    out = build_table(make_chunk(table, [1]), dict([served(40)]), output_schema(table.schema))
    assert out.to_pylist() == [
        {
            "prompt": "p",
            "completion": "text 40/0",
            "finish_reason": "length",
            "sample": 0,
            "error": None,
            "usage": {"prompt_tokens": 11, "completion_tokens": 3, "truncated_tokens": 2},
            "spec": {
                "steps": 1,
                "drafted": 7,
                "verified": 4,
                "accepted": 2,
                "accepted_hist": [0, 0, 1],
                "drafter_first": 3,
                "drafter_last": 5,
                "verified_hist": [0, 0, 0, 0, 1],
                "lookup_steps": 0,
                "lookup_verified": 0,
                "lookup_accepted": 0,
            },
            "timing": {"queued_s": 0.5, "prefill_s": 0.25, "decode_s": 1.5},
        }
    ]


def test_row_that_failed_in_either_way() -> None:
    error = RowError("non_finite", "NaN in the logits")
    key, good = served(41)
    assert isinstance(good.outcome, Completion)
    half_done = Completion(key, [5], "error", 11, 2, good.outcome.counts, Timing(1, 1, 1), error)
    table = pa.table({"prompt": [None, "p"]})
    rows = {RowKey(2, 40, 0): FAILED, key: OutputRow("half", half_done)}
    out = build_table(make_chunk(table, [1, 1]), rows, output_schema(table.schema)).to_pylist()
    assert [row["error"]["kind"] for row in out] == ["null_prompt", "non_finite"]
    for row in out:
        assert row["completion"] is None
        assert row["finish_reason"] == "error"
        assert set(row["usage"].values()) == {0}
        assert set(row["timing"].values()) == {0.0}
        assert row["spec"]["accepted_hist"] == []
        assert row["spec"]["drafter_first"] is None
        assert row["spec"]["steps"] == row["spec"]["drafted"] == row["spec"]["verified"] == 0


def test_samples_follow_their_row_whatever_order_they_arrive_in() -> None:
    table = pa.table({"prompt": ["a", "b", "c"], "x": pa.array([1, 2, 3], pa.int8())})
    arrived = [
        served(41, 2),
        served(42),
        served(40, 1),
        served(41, 0),
        served(40, 0),
        served(41, 1),
    ]
    out = build_table(make_chunk(table, [2, 3, 1]), dict(arrived), output_schema(table.schema))
    assert out["x"].to_pylist() == [1, 1, 2, 2, 2, 3]
    assert out["sample"].to_pylist() == [0, 1, 0, 1, 2, 0]
    assert out["completion"].to_pylist()[2:4] == ["text 41/0", "text 41/1"]


def test_failed_row_may_stand_for_all_its_samples_or_for_each() -> None:
    table = pa.table({"prompt": ["a", "b"]})
    chunk, schema = make_chunk(table, [3, 2]), output_schema(table.schema)
    rows = {RowKey(2, 40, 0): FAILED, RowKey(2, 41, 0): FAILED, RowKey(2, 41, 1): FAILED}
    assert build_table(chunk, rows, schema)["sample"].to_pylist() == [0, 0, 1]


@pytest.mark.parametrize("missing", [RowKey(2, 40, 0), RowKey(2, 40, 1), RowKey(2, 41, 0)])
def test_missing_sample_is_never_written_over(missing: RowKey) -> None:
    table = pa.table({"prompt": ["a", "b"]})
    rows = dict([served(40, 0), served(40, 1), served(41)])
    del rows[missing]
    with pytest.raises(KeyError):
        build_table(make_chunk(table, [2, 1]), rows, output_schema(table.schema))


@pytest.mark.parametrize("extra", [RowKey(2, 40, 1), RowKey(2, 41, 0), RowKey(1, 40, 0)])
def test_row_that_does_not_belong_is_never_dropped(extra: RowKey) -> None:
    table = pa.table({"prompt": ["a"]})
    rows = dict([served(40)]) | {extra: FAILED}
    with pytest.raises(AssertionError):
        build_table(make_chunk(table, [1]), rows, output_schema(table.schema))


def test_chunk_without_rows_has_the_same_schema() -> None:
    table = pa.table({"prompt": pa.array([], pa.large_string())})
    schema = output_schema(table.schema)
    assert build_table(make_chunk(table, []), {}, schema).schema.equals(schema)


def test_types_that_arrow_cannot_take_from_are_repeated_too() -> None:
    columns = {
        "view": pa.array(["a", None, "a longer text than fits inline"], pa.string_view()),
        "nested": pa.array([["x"], None, []], pa.list_(pa.binary_view())),
        "word": pa.array(["u", None, "v"]).dictionary_encode(),
    }
    table = pa.table(columns)
    rows = dict([served(40, 0), served(40, 1), served(41), served(42)])
    out = build_table(make_chunk(table, [2, 1, 1]), rows, output_schema(table.schema))
    out.validate(full=True)
    for name, column in columns.items():
        first, second, third = column.to_pylist()
        assert out[name].to_pylist() == [first, first, second, third]
        assert out[name].type == column.type


def test_columns_of_one_name_are_kept_apart() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array(["x"])], names=["same", "same"])
    out = build_table(make_chunk(table, [1]), dict([served(40)]), output_schema(table.schema))
    assert [out.column(0).to_pylist(), out.column(1).to_pylist()] == [[1], ["x"]]
