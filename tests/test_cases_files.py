"""Files that users of other systems ran into, through whole jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import completions, parts, read_rows, run, tiny_model_folder, write_rows

from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.merge import merge
from adaflash_batch.shards.parquet_form import write_parquet

PROMPTS = ["one", None, "two", "", "one"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def encodings() -> list[Any]:
    plain = pa.array(PROMPTS, pa.string())
    return [
        pa.nulls(len(PROMPTS)),
        plain,
        plain.cast(pa.large_string()),
        plain.cast(pa.string_view()),
        plain.dictionary_encode(),
        pa.array(PROMPTS, pa.large_string()).dictionary_encode(),
        pa.ExtensionArray.from_storage(pa.json_(), plain),
    ]


def test_files_may_encode_their_text_as_they_like(tmp_path: Path, model: Path) -> None:
    """Nulls alone in the first one, then every encoding: the same texts, types as they were."""
    arrays = encodings()
    shards = [
        write_rows(tmp_path / f"{place}.parquet", {"prompt": array, "place": [place] * len(array)})
        for place, array in enumerate(arrays)
    ]
    run(shards, model, tmp_path / "out", {"output.chunk_rows": 2})
    found = completions(tmp_path / "out")
    size = len(PROMPTS)
    assert found[:size] == [None] * size
    for start in range(size, len(found), size):
        assert found[start : start + size] == found[size : 2 * size]
    for part in parts(tmp_path / "out"):
        place = int(part.name.split("-")[1])
        assert pq.read_schema(part).field("prompt") == pq.read_schema(shards[place]).field("prompt")


def test_two_inputs_of_one_name_stay_apart(tmp_path: Path, model: Path) -> None:
    first = write_rows(tmp_path / "x" / "rows.parquet", ["a", "b"])
    second = write_rows(tmp_path / "y" / "rows.parquet", ["c"])
    run([first, second], model, tmp_path / "out")
    assert [row["prompt"] for row in read_rows(tmp_path / "out")] == ["a", "b", "c"]
    assert len(parts(tmp_path / "out")) == 2


@pytest.mark.parametrize("place", ["a b", "żółć ไทย", "100% #1 [x]"])
def test_addresses_and_names_of_every_kind(tmp_path: Path, model: Path, place: str) -> None:
    shard = write_rows(tmp_path / place / "in put.parquet", ["x", "y"])
    out = tmp_path / place / "out put"
    run(shard, model, out)
    assert len(read_rows(out)) == 2
    escaped = str(tmp_path / place).replace("%", "%25")
    uris: dict[str, object] = {
        "input.paths": [f"file://{escaped}/in put.parquet"],
        "output.directory": f"file://{escaped}/by address",
    }
    if "#" not in place:  # where a fragment of an address begins
        run(shard, model, out, uris)
        assert completions(tmp_path / place / "by address") == completions(out)


def merged(out: Path) -> list[dict[str, Any]]:
    """The rows of `merge`, which finds and keeps what `run` wrote."""
    target = out.with_suffix(".merged.parquet")
    merge(JobOutput.open(str(out)), str(target))
    rows: list[dict[str, Any]] = pq.read_table(target).to_pylist()
    return rows


def write_groups(path: Path, tables: list[Any]) -> Path:
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return path


def labels(group: int, arrow_type: Any) -> Any:
    entries = pa.array([f"{group}-{entry}" for entry in range(100)])
    return pa.DictionaryArray.from_arrays(pa.array(range(100), arrow_type), entries)


@pytest.mark.parametrize("index_type", [pa.int8(), pa.uint8(), pa.int32()], ids=str)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_dictionaries_of_row_groups_that_do_not_fit_together(
    tmp_path: Path, model: Path, index_type: Any, samples: int, nested: bool
) -> None:
    """Pandas writes categories with the smallest index: each row group's fit, all together not."""

    def group(place: int) -> Any:
        label = labels(place, index_type)
        column = pa.StructArray.from_arrays([label], ["label"]) if nested else label
        return pa.table({"prompt": [""] * 99 + ["x"], "c": column})

    shard = write_groups(tmp_path / "in.parquet", [group(place) for place in range(3)])
    keys = {"sampling.n": samples, "sampling.max_new_tokens": 1}
    run(shard, model, tmp_path / "out", keys)
    (part,) = parts(tmp_path / "out")
    assert pq.read_schema(part).field("c") == pq.read_schema(shard).field("c")
    expected = []
    for row in range(300):
        value = f"{row // 100}-{row % 100}"
        times = samples if row % 100 == 99 else 1
        expected += [{"label": value} if nested else value] * times
    assert [row["c"] for row in read_rows(tmp_path / "out")] == expected
    assert [row["c"] for row in merged(tmp_path / "out")] == expected


@pytest.mark.parametrize(
    "make", [pa.list_, pa.large_list, pa.list_view], ids=["list", "large", "view"]
)
def test_conversations_of_text_views_are_kept_in_every_chunk(
    tmp_path: Path, model: Path, make: Any
) -> None:
    """As DataFusion writes them; Arrow's own writer cannot slice them."""
    view = pa.struct([("role", pa.string_view()), ("content", pa.string_view())])
    talks = [[{"role": "user", "content": f"this is question number {row}"}] for row in range(5)]
    text = pa.struct([("role", pa.string()), ("content", pa.string())])
    plain = write_rows(tmp_path / "plain.parquet", {"messages": pa.array(talks, pa.list_(text))})
    shard = tmp_path / "in.parquet"
    with open(shard, "wb") as file:
        write_parquet(pa.table({"messages": pa.array(talks, make(view))}), file)
    assert pa.types.is_string_view(pq.read_schema(shard).field(0).type.value_type.field(0).type)
    keys = {"output.chunk_rows": 2, "prompt.chat_template": True, "sampling.n": 2}
    run(shard, model, tmp_path / "out", keys)
    run(plain, model, tmp_path / "expected", keys)
    assert read_rows(tmp_path / "out") == read_rows(tmp_path / "expected")
    assert [row["messages"] for row in merged(tmp_path / "out")[::2]] == talks
    for part in parts(tmp_path / "out"):
        assert pq.read_schema(part).field(0) == pq.read_schema(shard).field(0)


def test_prompts_that_are_no_text_are_listed_among_the_rejected(
    tmp_path: Path, model: Path
) -> None:
    wrong = pa.array([b"x", b"\xff\xfe", None], pa.binary_view()).view(pa.string_view())
    shard = write_rows(tmp_path / "in.parquet", {"prompt": wrong})
    assert run(shard, model, tmp_path / "out").exit_code == 3
    rejected = pq.read_table(tmp_path / "out" / "_adaflash" / "rejects.parquet").to_pylist()
    assert [(row["row"], row["kind"], row["prompt"]) for row in rejected] == [
        (1, "bad_text", "\\xff\\xfe"),
        (2, "null_prompt", None),
    ]
