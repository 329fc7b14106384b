"""merge: all rows in order in one file, one schema for all, whole or not at all, bounded memory."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import parts, run, write_rows
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from reviewed_jobs import MORE, PROMPTS, Job, command, input_columns

from adaflash_batch.errors import AdaflashError, ConfigError
from adaflash_batch.review import merge as merging
from adaflash_batch.review.merge import merge
from adaflash_batch.review.unify import conform, unify
from adaflash_batch.shards.locations import locate
from adaflash_batch.shards.schema import OUR_COLUMNS, output_schema


def rows_of(*paths: Path) -> list[dict[str, Any]]:
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    return [{**row, "share": repr(row["share"])} if "share" in row else row for row in rows]


def test_all_rows_are_there_in_order(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    target = job.folder / "merged.parquet"
    code, out, err = command(capfd, "merge", job.out, "--out", target)
    assert (code, err) == (0, "")
    assert out == f"{pq.read_metadata(target).num_rows} rows of 5 parts in {target}\n"
    assert rows_of(target) == rows_of(*parts(job.out))
    schema = pq.read_schema(target)
    assert schema.remove_metadata() == pq.read_schema(job.part(0, 0)).remove_metadata()
    assert schema.metadata == {
        b"adaflash.fingerprint": json.dumps(job.opened().fingerprint).encode()
    }
    assert [path.name for path in job.folder.glob(".*")] == []


def test_order_is_by_number_not_by_name(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(0, 100000), (0, 99999), (1, 0)]
    assert [f"part-{s:05d}-{c:05d}.parquet" for s, c in sorted(names)] != sorted(
        f"part-{s:05d}-{c:05d}.parquet" for s, c in names
    )
    listed = job.opened().part_files()
    assert [(part.shard, part.chunk) for part in listed] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_the_inputs_metadata_is_kept(tmp_path: Path, finished: Job) -> None:
    files = []
    for name, prompts in (("a", PROMPTS), ("b", MORE)):
        table = pa.table({"prompt": prompts}, metadata={"huggingface": "{}", "pandas": name})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        files.append(tmp_path / f"{name}.parquet")
    run(files, finished.folder / "model", tmp_path / "out")
    merged = merge(Job(tmp_path).opened(), str(tmp_path / "m.parquet"))
    metadata = pq.read_schema(tmp_path / "m.parquet").metadata
    assert (metadata[b"huggingface"], metadata[b"pandas"]) == (b"{}", b"a")
    assert {key for key in metadata if key.startswith(b"adaflash.")} == {b"adaflash.fingerprint"}
    assert merged.notes == [
        "the schema metadata 'pandas' of b.parquet is another one; the first input file's is kept"
    ]


def test_types_that_differ_between_inputs_are_unified(
    tmp_path: Path, finished: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    first = {
        "prompt": pa.array(["a", None], pa.string()),
        "n": pa.array([1, 2], pa.int8()),
        "only": pa.array([True, False]),
    }
    second = {
        "prompt": pa.array(["b"], pa.large_string()),
        "n": pa.array([300], pa.int64()),
        "late": pa.array([[1.5]]),
    }
    third = {"prompt": pa.array(["c", "c"]).dictionary_encode(), "n": pa.nulls(2)}
    files = [
        write_rows(tmp_path / f"{name}.parquet", columns)
        for name, columns in (("a", first), ("b", second), ("c", third))
    ]
    run(files, finished.folder / "model", tmp_path / "out", {"input.prompt_column": "prompt"})
    target = tmp_path / "m.parquet"
    code, out, err = command(capfd, "merge", tmp_path / "out", "--out", target, "--json")
    assert code == 0
    schema = pq.read_schema(target)
    assert schema.names[:4] == ["prompt", "n", "only", "late"]
    assert schema.names[4:] == [name for name, _ in OUR_COLUMNS]
    assert (schema.field("prompt").type, schema.field("n").type) == (pa.large_string(), pa.int64())
    table = pq.read_table(target)
    assert table["prompt"].to_pylist() == ["a", None, "b", "c", "c"]
    assert table["n"].to_pylist() == [1, 2, 300, None, None]
    assert table["only"].to_pylist() == [True, False, None, None, None]
    assert table["late"].to_pylist() == [None, None, [1.5], None, None]
    assert table["completion"].null_count == 1
    assert err.splitlines() == json.loads(out)["notes"]
    assert (
        "column 'prompt' is string in a.parquet, large_string in b.parquet, dictionary<values="
        in err
    )
    assert "column 'only' is not in b.parquet and 1 more; it is null there" in err


def unified(*types: Any) -> Any:
    schemas = {
        f"{number}.parquet": output_schema(pa.schema([("x", each)]))
        for number, each in enumerate(types)
    }
    return unify(schemas, "").schema.field("x").type


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (pa.string(), pa.string(), pa.string()),
        (pa.string(), pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.string_view(), pa.string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.null(), pa.large_string()),
        (pa.null(), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.int8(), pa.uint16(), pa.int32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.list_(pa.int8()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.dictionary(pa.int8(), pa.int32()), pa.int64(), pa.int64()),
        (pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("ms")),
    ],
)
def test_common_types(one: Any, other: Any, common: Any) -> None:
    assert unified(one, other) == common
    assert unified(other, one) == common


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.string(), pa.int64()),
        (pa.bool_(), pa.string()),
        (pa.list_(pa.string()), pa.string()),
        (pa.struct([("a", pa.string())]), pa.struct([("a", pa.int8())])),
    ],
)
def test_types_without_a_common_one_are_refused(one: Any, other: Any) -> None:
    with pytest.raises(ConfigError, match=r"column 'x' is .* in 0\.parquet and .* in 1\.parquet"):
        unified(one, other)


def test_a_value_that_does_not_fit_names_its_column() -> None:
    batch = pa.record_batch({"x": pa.array([2**60 + 1])})
    with pytest.raises(ConfigError, match=r"column 'x' of part-1 is int64, a value of it does not"):
        conform(batch, pa.schema([("x", pa.float64())]), "part-1")


def test_repeated_names_pass_only_where_all_files_are_alike() -> None:
    twice = pa.schema([("x", pa.int8()), ("x", pa.int8()), *OUR_COLUMNS])
    assert unify({"a": twice, "b": twice}, "").schema.names.count("x") == 2
    once = pa.schema([("x", pa.int8()), *OUR_COLUMNS])
    with pytest.raises(ConfigError, match="a has two columns named 'x'"):
        unify({"a": twice, "b": once}, "")


_TYPES = st.sampled_from(
    [
        *(pa.string(), pa.large_string(), pa.null(), pa.int8(), pa.int64(), pa.float64()),
        *(pa.list_(pa.string()), pa.dictionary(pa.int8(), pa.string())),
        pa.struct([("a", pa.int8()), ("b", pa.string())]),
    ]
)
_SCHEMAS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), _TYPES, min_size=1), min_size=1, max_size=4
)


@given(_SCHEMAS)
def test_unified_rows_keep_their_values(kinds: list[dict[str, Any]]) -> None:
    value = {"string": "x", "int": 5, "double": 1.0, "list": ["y"], "struct": {"a": 1, "b": "z"}}

    def column(kind: Any) -> Any:
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        found = next((v for name, v in value.items() if name in str(plain).split("<")[0]), None)
        return pa.array([found, None], plain).cast(kind)

    tables = [pa.record_batch({name: column(k) for name, k in each.items()}) for each in kinds]
    try:
        schema = unify({f"{n}": t.schema for n, t in enumerate(tables)}, "").schema
    except (ConfigError, KeyError, StopIteration):
        return
    for table in tables:
        same = conform(table, schema, "part").to_pylist()
        expected = [{name: row.get(name) for name in schema.names} for row in table.to_pylist()]
        assert same == expected


def test_an_incomplete_job_is_refused_unless_asked_for(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    target = job.folder / "m.parquet"
    job.part(0, 1).unlink()
    code, out, err = command(capfd, "merge", job.out, "--out", target)
    assert (code, out) == (75, "")
    assert "error: 3 of 11 rows have no part yet" in err
    assert "--partial" in err
    assert not target.exists()
    code, out, _ = command(capfd, "merge", job.out, "--out", target, "--partial", "--json")
    assert code == 0
    assert (json.loads(out)["rows_missing"], json.loads(out)["parts"]) == (3, 4)
    assert pq.read_schema(target).metadata[b"adaflash.rows_missing"] == b"3"
    assert rows_of(target) == rows_of(*parts(job.out))


def test_what_is_there_is_not_replaced_unasked(job: Job) -> None:
    target = job.folder / "m.parquet"
    target.write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        merge(job.opened(), str(target))
    assert target.read_text() == "precious"
    merge(job.opened(), str(target), force=True)
    assert pq.read_metadata(target).num_rows > 11


def test_places_that_would_do_harm_are_refused(job: Job) -> None:
    source = (job.folder / "a.parquet").read_bytes()
    for place, said in (
        (job.folder / "a.parquet", "is an input file of the job"),
        (job.out / "all.parquet", "is inside the job's output"),
        (job.out / "_adaflash" / "all.parquet", "is inside the job's output"),
        (job.folder / "model", "is a directory"),
    ):
        with pytest.raises(ConfigError, match=said):
            merge(job.opened(), str(place), force=True)
    (job.folder / "link").symlink_to(job.out)
    with pytest.raises(ConfigError, match="is inside the job's output"):
        merge(job.opened(), str(job.folder / "link" / "all.parquet"))
    assert (job.folder / "a.parquet").read_bytes() == source


def test_a_merge_that_fails_leaves_what_was_there(job: Job) -> None:
    target = job.folder / "m.parquet"
    target.write_text("precious")
    part = job.part(1, 0)
    data = bytearray(part.read_bytes())
    column = pq.read_metadata(part).row_group(0).column(1)
    data[column.data_page_offset + 60] ^= 255
    part.write_bytes(data)
    with pytest.raises(AdaflashError, match=part.name):
        merge(job.opened(), str(target), force=True)
    assert target.read_text() == "precious"
    whole = job.part(0, 0).read_bytes()
    job.part(0, 0).write_bytes(b"no")
    with pytest.raises(ConfigError, match="cannot be read as Parquet") as caught:
        merge(job.opened(), str(target), force=True)
    assert "verify" in str(caught.value.hint)
    job.part(0, 0).write_bytes(whole)
    with pytest.raises(AdaflashError, match="cannot write"):
        merge(job.opened(), str(job.folder / "no such" / "m.parquet"))
    assert [path.name for path in job.folder.glob(".*")] == []


def test_inputs_without_rows_make_a_file_without_rows(tmp_path: Path, finished: Job) -> None:
    columns = {name: values.slice(0, 0) for name, values in input_columns([None]).items()}
    empty = write_rows(tmp_path / "a.parquet", columns)
    run(empty, finished.folder / "model", tmp_path / "out")
    merged = merge(Job(tmp_path).opened(), str(tmp_path / "m.parquet"))
    assert (merged.rows, merged.parts) == (0, 0)
    table = pq.read_table(tmp_path / "m.parquet")
    assert table.column_names == [*columns, *(name for name, _ in OUR_COLUMNS)]


def test_row_groups_are_bounded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_GROUP_ROWS", 4)
    merge(job.opened(), str(job.folder / "m.parquet"))
    metadata = pq.read_metadata(job.folder / "m.parquet")
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    most = max(pq.read_metadata(path).num_rows for path in parts(job.out))
    assert len(sizes) > 1
    assert all(4 <= size < 4 + most for size in sizes[:-1])


def test_no_more_than_a_row_group_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_GROUP_BYTES", 8 * 1000)
    alive: list[weakref.ref[Any]] = []
    most = 0

    def batches() -> Iterator[Any]:
        nonlocal most
        for _ in range(50):
            batch = pa.record_batch({"x": np.zeros(400)})
            alive.append(weakref.ref(batch))
            most = max(most, sum(each() is not None for each in alive))
            yield batch

    num_rows = [group.num_rows for group in merging._row_groups(batches())]
    assert sum(num_rows) == 50 * 400
    assert max(num_rows) == 1200
    assert most <= 4


def test_other_filesystems_get_the_file_in_one_put(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    elsewhere = fs.SubTreeFileSystem(str(tmp_path / "store"), fs.LocalFileSystem())
    monkeypatch.setattr(
        "adaflash_batch.review.merge.locate",
        lambda text: (elsewhere, "m.parquet") if text.startswith("s3://") else locate(text),
    )
    merge(job.opened(), "s3://bucket/m.parquet")
    assert rows_of(tmp_path / "store" / "m.parquet") == rows_of(*parts(job.out))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["m.parquet"]
