"""Every input row comes out exactly once, in order, with its columns unchanged."""

import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaflash_batch.request import Completion, RowError, RowKey, Sampling
from adaflash_batch.shards.reader import (
    Chunk,
    detect_content,
    inspect_shard,
    num_chunks,
    read_chunks,
    resolve_inputs,
)
from adaflash_batch.shards.recovery import committed
from adaflash_batch.shards.schema import OUR_COLUMNS, OutputRow, build_table, output_schema
from adaflash_batch.shards.writer import make_footer, part_name, write_part

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
    pa.null(),
]
OTHER_TYPES = {
    "flag": (pa.bool_(), st.booleans()),
    "small": (pa.int8(), st.integers(-128, 127)),
    "real": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "moment": (pa.timestamp("us", "Europe/Berlin"), st.integers(0, 2**50)),
    "raw": (pa.binary_view(), st.binary(max_size=4)),
    "fixed": (pa.binary(2), st.binary(min_size=2, max_size=2)),
    "names": (pa.list_(pa.string_view()), st.lists(st.text(max_size=3), max_size=3)),
    "pairs": (
        pa.map_(pa.string(), pa.int64()),
        st.dictionaries(st.text(max_size=2), st.integers(-9, 9), max_size=2).map(
            lambda pairs: list(pairs.items())
        ),
    ),
    "nothing": (pa.null(), st.none()),
    "label": (pa.dictionary(pa.int16(), pa.string()), st.sampled_from(["x", "y"])),
}


def texts() -> st.SearchStrategy[str | None]:
    return st.none() | st.sampled_from(["", " ", "\n\t", "hello"]) | st.text(max_size=8)


def conversations() -> st.SearchStrategy[Any]:
    message = st.fixed_dictionaries({"role": texts(), "content": texts(), "name": texts()})
    return st.none() | st.lists(st.none() | message, max_size=3)


@st.composite
def columns_of_rows(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(0, 23))

    def column(values: st.SearchStrategy[Any], arrow_type: Any) -> Any:
        rows = draw(st.lists(values, min_size=num_rows, max_size=num_rows))
        if pa.types.is_dictionary(arrow_type):
            plain = pa.array(rows, arrow_type.value_type)
            return plain.dictionary_encode().cast(arrow_type)
        return pa.array(rows, arrow_type)

    table = {}
    if draw(st.booleans()):
        shape = draw(st.sampled_from([pa.list_, pa.large_list]))
        table["messages"] = column(conversations(), shape(MESSAGE))
    else:
        text_type = draw(st.sampled_from(TEXT_TYPES))
        table["prompt"] = column(st.none() if pa.types.is_null(text_type) else texts(), text_type)
    for name in draw(st.lists(st.sampled_from(sorted(OTHER_TYPES)), max_size=4, unique=True)):
        arrow_type, values = OTHER_TYPES[name]
        table[name] = column(st.none() | values, arrow_type)
    table["n"] = column(st.none() | st.integers(0, 3), pa.int64())
    return pa.table(table).replace_schema_metadata({"pandas": "{}", "origin": "test"})


def outputs_of(chunk: Chunk) -> dict[RowKey, OutputRow]:
    rows = {}
    for prompt in chunk.prompts:
        for sample in range(prompt.sampling.n):
            key = RowKey(prompt.shard, prompt.row, sample)
            outcome: Completion | RowError
            outcome = prompt.error or Completion(key, [1, 2], "stop", prompt_tokens=3)
            rows[key] = OutputRow(f"{prompt.row}/{sample}", outcome)
    return rows


def write_with_empty_groups(table: pa.Table, path: Path, group_rows: int) -> None:
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        for start in range(0, table.num_rows, group_rows):
            writer.write_table(table.slice(start, group_rows))
            writer.write_table(table.slice(0, 0))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    table=columns_of_rows(),
    group_rows=st.integers(1, 9),
    chunk_rows=st.integers(1, 11),
    skipped=st.sets(st.integers(0, 6)),
)
def test_rows_come_out_once_in_order_and_unchanged(
    table: pa.Table, group_rows: int, chunk_rows: int, skipped: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "in.parquet"
        write_with_empty_groups(table, source, group_rows)
        out = Path(directory) / "out"
        out.mkdir()
        first = run(str(source), out, chunk_rows, skipped)
        second = run(str(source), out, chunk_rows, set())
        all_chunks = set(range(num_chunks(table.num_rows, chunk_rows)))
        assert first == all_chunks - skipped
        assert second == all_chunks & skipped
        check_parts(pq.read_table(source), out)


def run(source: str, out: Path, chunk_rows: int, skipped: set[int]) -> set[int]:
    """Do what the output lacks, all but the skipped chunks; returns which chunks were done."""
    (shard,) = resolve_inputs([source])
    info = inspect_shard(shard)
    content = detect_content([info.schema], exclude=["label"])
    done = committed(str(out), "job", [info], chunk_rows)
    worked = set()
    for chunk in read_chunks(
        shard,
        content,
        chunk_rows,
        columns={"n": "n"},
        sampling=Sampling(n=2),
        skip=lambda index: done.is_done(0, index) or index in skipped,
    ):
        rows = outputs_of(chunk)
        part = build_table(chunk, rows, output_schema(info.schema))
        footer = make_footer(chunk, rows.values(), fingerprint="job", shard_digest=info.digest)
        write_part(str(out), part_name(0, chunk.index), part, footer)
        worked.add(chunk.index)
    return worked


def check_parts(source: pa.Table, out: Path) -> None:
    parts = [pq.read_table(path) for path in sorted(out.iterdir())]
    if not parts:
        assert source.num_rows == 0
        return
    expected = []
    for row, n in enumerate(source["n"].to_pylist()):
        samples = 2 if n is None or n < 1 else n
        expected += [(row, sample) for sample in range(samples)]
    written = pa.concat_tables(parts)
    ours = len(OUR_COLUMNS)
    assert written["sample"].to_pylist() == [sample for _, sample in expected]
    assert written.schema.names[-ours:] == [name for name, _ in OUR_COLUMNS]
    for part in parts:
        assert pa.schema(list(part.schema)[:-ours]).equals(source.schema, check_metadata=False)
        assert part.schema.metadata[b"origin"] == b"test"
    for name in source.column_names:
        values = source[name].to_pylist()
        assert written[name].to_pylist() == [values[row] for row, _ in expected]
    for (row, sample), text, error in zip(
        expected, written["completion"].to_pylist(), written["error"].to_pylist(), strict=True
    ):
        assert (text is None) == (error is not None)
        assert text in (None, f"{row}/{sample}")


@pytest.mark.parametrize("arrow_type", TEXT_TYPES[:5], ids=str)
def test_polars_reads_the_parts(arrow_type: Any, tmp_path: Path) -> None:
    prompts = pa.array(["a", None, "b"])
    if pa.types.is_dictionary(arrow_type):
        prompts = prompts.cast(arrow_type.value_type).dictionary_encode().cast(arrow_type)
    else:
        prompts = prompts.cast(arrow_type)
    table = pa.table({"prompt": prompts, "n": pa.array([1, 1, 2])})
    pq.write_table(table, tmp_path / "in.parquet")
    out = tmp_path / "out"
    out.mkdir()
    run(str(tmp_path / "in.parquet"), out, 2, set())
    frame = pl.read_parquet(out / "*.parquet")
    assert frame["completion"].to_list() == ["0/0", None, "2/0", "2/1"]
    assert frame["prompt"].cast(pl.String).to_list() == ["a", None, "b", "b"]
    assert frame["spec"].struct.field("steps").to_list() == [0, 0, 0, 0]
