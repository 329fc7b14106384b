"""Rows of every kind in a job: each gets its own, and none harms another."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import (
    CONTEXT,
    END,
    VOCABULARY,
    completions,
    kinds,
    parts,
    read_rows,
    run,
    tiny_model_folder,
    token_of,
    write_rows,
)

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.schema import output_schema

NEW = 8
LONGEST = CONTEXT - NEW


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def done(
    tmp_path: Path, model: Path, rows: Any, keys: dict[str, object] | None = None
) -> list[dict[str, Any]]:
    """The output rows of a job on these input rows; the shard has the same name every time."""
    number = len(list(tmp_path.iterdir()))
    shard = write_rows(tmp_path / f"job{number}" / "in.parquet", rows)
    run(shard, model, shard.parent / "out", keys)
    return read_rows(shard.parent / "out")


@pytest.mark.parametrize("place", [0, 5, 11])
def test_one_prompt_beyond_the_context_spoils_no_other(
    tmp_path: Path, model: Path, place: int
) -> None:
    prompts = [f"prompt {row}" for row in range(12)]
    expected = [row["completion"] for row in done(tmp_path, model, prompts)]
    prompts[place] = "x" * (CONTEXT + 1)
    rows = done(tmp_path, model, prompts)
    assert rows[place]["error"]["kind"] == "prompt_too_long"
    assert str(CONTEXT) in rows[place]["error"]["message"]
    del rows[place], expected[place]
    assert [row["completion"] for row in rows] == expected


def test_a_prompt_may_fill_the_context_to_the_last_token(tmp_path: Path, model: Path) -> None:
    rows = done(tmp_path, model, ["x" * LONGEST, "x" * (LONGEST + 1), "x" * (CONTEXT + 1)])
    assert [row["error"] and row["error"]["kind"] for row in rows] == [
        None,
        "prompt_too_long",
        "prompt_too_long",
    ]
    usage = {"prompt_tokens": LONGEST, "completion_tokens": NEW, "truncated_tokens": 0}
    assert rows[0]["usage"] == usage


@pytest.mark.parametrize("policy", ["truncate-left", "truncate-right"])
def test_long_prompts_are_cut_by_the_stated_policy(
    tmp_path: Path, model: Path, policy: str
) -> None:
    long = "".join(chr(ord("a") + place % 26) for place in range(300))
    kept = long[-LONGEST:] if policy == "truncate-left" else long[:LONGEST]
    cut, whole = done(tmp_path, model, [long, kept], {"prompt.on_long_prompt": policy})
    assert cut["completion"] == whole["completion"]
    assert cut["usage"] == whole["usage"] | {"truncated_tokens": 300 - LONGEST}
    assert whole["usage"]["truncated_tokens"] == 0


def test_null_empty_and_blank_prompts_are_rows_with_errors(tmp_path: Path, model: Path) -> None:
    rows = done(tmp_path, model, [None, "", " ", "\n\t", "x", None])
    assert [row["error"] and row["error"]["kind"] for row in rows] == [
        *("null_prompt", "empty_prompt", "empty_prompt", "empty_prompt", None, "null_prompt"),
    ]
    assert [row["completion"] is None for row in rows] == [True] * 4 + [False, True]
    assert [row["finish_reason"] for row in rows] == ["error"] * 4 + ["length", "error"]


def test_a_job_of_errors_has_the_usual_schema(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", [None, "", "x" * 999])
    summary = run(shard, model, tmp_path / "out")
    (part,) = parts(tmp_path / "out")
    assert pq.read_schema(part).equals(output_schema(pq.read_schema(shard)))
    assert summary.exit_code == 3
    assert summary.fields["errors"] == summary.fields["rows"] == 3
    assert summary.fields["emitted_per_step"] is None


COLUMNS: dict[str, Any] = {
    "max_new_tokens": [3, None, 20, 1, None, 12],
    "temperature": [0.9, None, 1.5, 0.0, 0.7, None],
    "seed": [None, 7, 7, None, 1, 2],
    "top_p": [0.5, None, None, 1.0, 0.9, None],
    "top_k": [None, 3, None, None, None, 1],
    "stop": [None, ["a", "e"], [], ["z"], None, None],
    "n": [2, None, 3, None, None, 1],
    "stop_token_ids": [None, None, [70, 71], None, [], None],
}
JOB: dict[str, object] = {"sampling.temperature": 0.4, "sampling.seed": 5, "sampling.stop": ["q"]}


def test_every_row_gets_its_own_sampling_and_null_means_the_jobs(
    tmp_path: Path, model: Path
) -> None:
    rows = {"prompt": [f"row number {row}" for row in range(6)], **COLUMNS}
    own = done(tmp_path, model, rows, JOB | {"input.columns": {name: name for name in COLUMNS}})
    assert len(own) == 2 + 1 + 3 + 1 + 1 + 1
    for row in range(6):
        values = {f"sampling.{name}": column[row] for name, column in COLUMNS.items()}
        given = {key: value for key, value in values.items() if value not in (None, [])}
        if COLUMNS["stop"][row] == []:
            given["sampling.stop"] = ["\0 never"]
        alone = done(tmp_path, model, rows, JOB | given)
        prompt = f"row number {row}"
        assert [r for r in own if r["prompt"] == prompt] == [
            r for r in alone if r["prompt"] == prompt
        ]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_new_tokens", [0, -1, 2.5, float("nan"), 10**9]),
        ("temperature", [-0.1, float("nan"), float("inf")]),
        ("top_p", [0.0, 1.1]),
        ("n", [0, -3]),
        ("stop", ["", None]),
        ("stop_token_ids", [[VOCABULARY], [-1], [None]]),
        ("min_new_tokens", [NEW + 1]),
    ],
)
def test_a_bad_value_is_the_error_of_its_row(
    tmp_path: Path, model: Path, field: str, values: list[Any]
) -> None:
    column = [*values, None]
    rows = {"prompt": ["x"] * len(column), "value": column}
    got = [
        row["error"] and row["error"]["kind"]
        for row in done(tmp_path, model, rows, {"input.columns": {field: "value"}})
    ]
    expected = ["bad_sampling" if value is not None else None for value in column]
    if field == "max_new_tokens":
        expected[values.index(10**9)] = "prompt_too_long"
    assert got == expected


@pytest.mark.parametrize("keys", [{"sampling.stop_token_ids": [VOCABULARY]}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_jobs_token_ids_must_be_in_the_vocabulary(
    tmp_path: Path, model: Path, keys: dict[str, object], bias: bool
) -> None:
    if bias:
        keys = {"sampling.logit_bias": {str(VOCABULARY): 1.0}}
    with pytest.raises(ConfigError, match=f"token id {VOCABULARY} .* vocabulary of {VOCABULARY}"):
        done(tmp_path, model, ["x"], keys)


def test_equal_prompts_are_rows_of_their_own(tmp_path: Path, model: Path) -> None:
    rows = done(tmp_path, model, ["the same"] * 8, {"sampling.temperature": 1.5})
    assert len(rows) == len({row["completion"] for row in rows}) == 8


@pytest.mark.parametrize("concurrency", [1, 16])
def test_samples_differ_and_come_back(tmp_path: Path, model: Path, concurrency: int) -> None:
    keys: dict[str, object] = {"sampling.n": 4, "sampling.temperature": 1.5, "sampling.seed": 3}
    first = done(tmp_path, model, ["one", None, "two"], keys)
    assert [row["sample"] for row in first] == [0, 1, 2, 3, 0, 0, 1, 2, 3]
    assert len({row["completion"] for row in first}) == 9
    again = done(tmp_path, model, ["one", None, "two"], keys | {"engine.concurrency": concurrency})
    assert again == first
    other = done(tmp_path, model, ["one", None, "two"], keys | {"sampling.seed": 4})
    assert {row["completion"] for row in other} & {row["completion"] for row in first} == {None}


def test_ids_name_rows_wherever_they_are(tmp_path: Path, model: Path) -> None:
    keys: dict[str, object] = {"sampling.temperature": 1.5, "input.id_column": "id"}
    ids = ["a", "b", "c", "d"]
    first = done(tmp_path, model, {"prompt": ["same"] * 4, "id": ids}, keys)
    moved = done(tmp_path, model, {"prompt": ["same"] * 4, "id": ids[::-1]}, keys)
    assert moved == first[::-1]
    for bad in (["a", "b", "a", "d"], ["a", None, "c", "d"]):
        with pytest.raises(ConfigError, match="column 'id'"):
            done(tmp_path, model, {"prompt": ["same"] * 4, "id": bad}, keys)


TURN = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def test_conversations_and_texts_go_through_the_template(tmp_path: Path, model: Path) -> None:
    def said(*turns: tuple[str, str | None]) -> list[dict[str, str | None]]:
        return [{"role": role, "content": content} for role, content in turns]

    talks = [
        said(("user", "hello")),
        said(("system", "be brief"), ("user", "hello")),
        [],
        said(("user", None)),
        None,
        said(("user", "a"), ("user", "b")),
    ]
    keys: dict[str, object] = {"prompt.chat_template": True}
    rows = done(tmp_path, model, {"messages": pa.array(talks, TURN)}, keys)
    assert [row["error"] and row["error"]["kind"] for row in rows] == [
        *(None, None, "empty_prompt", "bad_messages", "null_prompt", None)
    ]
    texts = done(tmp_path, model, ["hello"], keys)
    assert texts[0]["completion"] == rows[0]["completion"]
    system = done(tmp_path, model, ["hello"], keys | {"prompt.system_prompt": "be brief"})
    assert system[0]["completion"] == rows[1]["completion"] != rows[0]["completion"]
    with pytest.raises(ConfigError, match="conversations need a chat template"):
        done(tmp_path, model, {"messages": pa.array(talks, TURN)})


def test_end_tokens_end_a_text_unless_they_are_ignored(tmp_path: Path, model: Path) -> None:
    ending: dict[str, object] = {"sampling.logit_bias": {str(END): 1000.0}}
    (row,) = done(tmp_path, model, ["x"], ending)
    assert (row["completion"], row["finish_reason"]) == ("", "stop")
    assert row["usage"]["completion_tokens"] == 1
    (row,) = done(tmp_path, model, ["x"], ending | {"sampling.ignore_eos": True})
    assert (row["completion"], row["finish_reason"]) == ("", "length")
    assert row["usage"]["completion_tokens"] == NEW
    (row,) = done(tmp_path, model, ["x"], ending | {"sampling.min_new_tokens": 4})
    assert row["finish_reason"] == "stop"
    assert row["usage"]["completion_tokens"] == 5
    (plain,) = done(tmp_path, model, ["x"])
    assert plain["completion"].startswith(row["completion"])


def test_a_stop_string_ends_a_text_before_it(tmp_path: Path, model: Path) -> None:
    always = token_of("k")
    bias: dict[str, object] = {"sampling.logit_bias": {str(always): 1000.0}}
    (row,) = done(tmp_path, model, ["x"], bias | {"sampling.stop": ["zz", "kkk"]})
    assert (row["completion"], row["finish_reason"]) == ("", "stop")
    assert row["usage"]["completion_tokens"] == 3
    (row,) = done(tmp_path, model, ["x"], bias | {"sampling.stop_token_ids": [always]})
    assert (row["completion"], row["usage"]["completion_tokens"]) == ("", 1)


def test_special_token_text_stays_text_unless_asked(tmp_path: Path, model: Path) -> None:
    (row,) = done(tmp_path, model, ["a<|im_end|>"])
    assert row["usage"]["prompt_tokens"] == len("a<|im_end|>")
    (row,) = done(tmp_path, model, ["a<|im_end|>"], {"prompt.special_tokens": "parse"})
    assert row["usage"]["prompt_tokens"] == 2


def test_tokens_that_only_the_tokenizer_knows_are_errors_of_their_rows(tmp_path: Path) -> None:
    small = tiny_model_folder(tmp_path / "small", vocab_size=VOCABULARY - 1)
    last = "\u0143"  # how the last byte is spelt in the vocabulary; it is 0xAD
    shard = write_rows(tmp_path / "in.parquet", ["x", "\u00ad", "y"])
    assert token_of(last) == VOCABULARY - 1
    run(shard, small, tmp_path / "out")
    assert kinds(tmp_path / "out") == [None, "unknown_token", None]


def test_an_end_token_beyond_the_vocabulary_is_harmless(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model", eos_token_id=[END, VOCABULARY + 5])
    shard = write_rows(tmp_path / "in.parquet", ["x", "y"])
    summary = run(shard, model, tmp_path / "out", {"sampling.min_new_tokens": 2})
    assert summary.exit_code == 0
    assert None not in completions(tmp_path / "out")


def test_a_request_that_kv_memory_can_never_hold_is_an_error_of_its_row(
    tmp_path: Path, model: Path
) -> None:
    rows = done(tmp_path, model, ["x", "y" * 100, "z"], {"engine.kv_memory": "13KB"})
    assert [row["error"] and row["error"]["kind"] for row in rows] == [
        *(None, "kv_memory_too_small", None)
    ]
    with pytest.raises(ConfigError, match="KV memory hold"):
        done(tmp_path, model, ["x"], {"engine.kv_memory": "1KB"})


def test_the_context_may_be_made_smaller_and_not_larger(tmp_path: Path, model: Path) -> None:
    (row,) = done(tmp_path, model, ["x" * 30], {"engine.context": 37})
    assert row["error"]["kind"] == "prompt_too_long"
    (row,) = done(tmp_path, model, ["x" * 30], {"engine.context": 38})
    assert row["error"] is None
    with pytest.raises(ConfigError, match=f"a context of 300 .* made for {CONTEXT}"):
        done(tmp_path, model, ["x"], {"engine.context": 300})
