"""verify against inputs of every kind: what is sound passes, one changed value is found."""

import datetime
import decimal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fabricated import fabricate
from hypothesis import given
from hypothesis import strategies as st
from reviewed_jobs import rewrite

from adaflash_batch.review import merge as merging
from adaflash_batch.review import parts
from adaflash_batch.review.input_rows import InputRows
from adaflash_batch.review.our_columns import OurColumns
from adaflash_batch.review.row_order import SampleOrder
from adaflash_batch.review.verify import verify

NAN = float("nan")
DAY = datetime.date(2026, 1, 2)
COLUMNS: dict[str, Any] = {
    "text": pa.array(["a", None, "ż", ""]),
    "large": pa.array(["a", None, "b", ""], pa.large_string()),
    "view": pa.array(["a", None, "long enough to be kept elsewhere", ""], pa.string_view()),
    "binary": pa.array([b"\xff", None, b"", b"x"]),
    "fixed": pa.array([b"ab", None, b"cd", b"ef"], pa.binary(2)),
    "words": pa.array(["a", None, "b", "a"]).dictionary_encode(),
    "flag": pa.array([True, None, False, True]),
    "half": pa.array(np.array([1, NAN, -0.0, 3], np.float16)),
    "float": pa.array([1.5, NAN, None, -0.0], pa.float32()),
    "double": pa.array([1.5, NAN, None, float("inf")]),
    "small": pa.array([1, None, 3, 255], pa.uint8()),
    "price": pa.array([decimal.Decimal("1.10"), None, None, decimal.Decimal("2.20")]),
    "day": pa.array([DAY, None, DAY, DAY]),
    "time": pa.array([0, None, 1, 2**60], pa.timestamp("ns", "UTC")),
    "list": pa.array([[NAN, 1.0], None, [], [2.0]]),
    "lists": pa.array([[["a"]], None, [], [[], None, ["b"]]]),
    "vector": pa.array([[1.0, NAN], None, [2.0, 3.0], [4.0, 5.0]], pa.list_(pa.float32(), 2)),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}, {"a": 2, "b": None}]),
    "map": pa.array([[("a", 1)], None, [], [("b", 2)]], pa.map_(pa.string(), pa.int8())),
    "null": pa.nulls(4),
    "uuid": pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([b"0" * 16, None, b"1" * 16, b"2" * 16], pa.binary(16))
    ),
}
PROMPTS = pa.array(["one", "two", "three", "four"])


@pytest.mark.parametrize("samples", [1, 3])
def test_columns_of_every_type_are_found_unchanged(tmp_path: Path, samples: int) -> None:
    table = pa.table({"prompt": PROMPTS, **COLUMNS})
    keys = {"output.chunk_rows": 3, "sampling.n": samples}
    job = fabricate(tmp_path, {"a.parquet": table}, keys, row_group_size=2)
    found = verify(job)
    assert [str(problem) for problem in found.problems] == []
    assert found.output_rows == 4 * samples


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "null"])
def test_a_changed_value_of_every_type_is_found(tmp_path: Path, name: str) -> None:
    job = fabricate(tmp_path, {"a.parquet": pa.table({"prompt": PROMPTS, name: COLUMNS[name]})})

    def change(table: Any) -> Any:
        pieces = [column.combine_chunks() for column in [table.column(name)]]
        array = pieces[0].chunk(0) if isinstance(pieces[0], pa.ChunkedArray) else pieces[0]
        swapped = pa.chunked_array([array.slice(3, 1), array.slice(1, 2), array.slice(0, 1)])
        return table.set_column(1, table.schema.field(name), swapped)

    rewrite(tmp_path / "out" / "part-00000-00000.parquet", change)
    found = verify(job)
    same = COLUMNS[name][0].equals(COLUMNS[name][3])
    rows = [problem.row for problem in found.problems if problem.column == name]
    assert rows == ([] if same else [0, 3])
    assert len(found.problems) == len(rows)


def test_repeated_column_names_and_prefixes_are_no_trouble(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([PROMPTS, PROMPTS, PROMPTS], names=["prompt", "x", "x"])
    named = twice.append_column("completion", PROMPTS)
    job = fabricate(tmp_path, {"a.parquet": named}, {"output.prefix": "our_"})
    assert verify(job).problems == []


def test_rows_whose_own_settings_are_wrong_have_one_sample(tmp_path: Path) -> None:
    own = pa.array([0.0, NAN, None, 2.0])
    job = fabricate(
        tmp_path,
        {"a.parquet": pa.table({"prompt": PROMPTS, "k": own})},
        {"input.columns": {"n": "k", "max_new_tokens": "k"}, "sampling.n": 3},
    )
    found = verify(job)
    # The texts from thin air have one token, two, three, four.
    assert {(p.row, p.message) for p in found.problems} == {
        (5, "completion_tokens is above max_new_tokens"),
        (6, "completion_tokens is above max_new_tokens"),
    }
    assert (found.errors, found.output_rows) == (2, 1 + 1 + 3 + 2)


@given(
    groups=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    wanted=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
)
def test_input_rows_are_read_forwards_once(
    groups: list[int], wanted: list[tuple[int, int]]
) -> None:
    rows = pa.table({"x": pa.array(range(sum(groups)), pa.int64())})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema) as writer:
        begin = 0
        for size in groups:
            writer.write_table(rows.slice(begin, size))
            begin += size
    source, row = InputRows(pq.ParquetFile(pa.BufferReader(sink.getvalue())), "x"), 0
    for skipped, count in wanted:
        read = [v for batch in source.read(row + skipped, count) for v in batch["x"].to_pylist()]
        assert (
            read
            == list(range(row + skipped, row + skipped + count))[: max(begin - row - skipped, 0)]
        )
        row += skipped + count


def ours(samples: list[int], errors: list[bool]) -> OurColumns:
    columns = OurColumns.__new__(OurColumns)
    columns.samples, columns.is_error = np.array(samples, np.int64), np.array(errors)
    return columns


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 32), max_size=4),
    broken=st.none() | st.integers(0, 31),
)
def test_samples_are_followed_across_batches(
    counts: list[int], cuts: list[int], broken: int | None
) -> None:
    samples = [sample for count in counts for sample in range(count)]
    wanted = [count for count in counts for _ in range(count)]
    if broken is not None:
        del samples[broken % len(samples)], wanted[broken % len(wanted)]
    if not samples:
        return
    order, told = SampleOrder(), []
    borders = sorted({0, len(samples), *(cut % len(samples) for cut in cuts)})
    for begin, end in pairwise(borders):
        piece = ours(samples[begin:end], [False] * (end - begin))
        told += list(order.take(piece, np.array(wanted[begin:end], np.int64), begin))
    told += list(order.end())
    is_whole_row = broken is not None and counts_of(counts)[broken % sum(counts)] == 1
    assert bool(told) == (broken is not None and not is_whole_row)
    assert order.num_rows == samples.count(0)


def counts_of(counts: list[int]) -> list[int]:
    """For each output row how many samples its input row has."""
    return [count for count in counts for _ in range(count)]


def test_a_refused_row_has_one_sample() -> None:
    order = SampleOrder()
    wanted = np.array([3, 3], np.int64)
    assert list(order.take(ours([0, 0], [True, False]), wanted, 0)) == []
    assert [row for row, _ in order.end()] == [1]


@contextmanager
def measured() -> Iterator[Callable[[], int]]:
    """Tells the most memory that Arrow and Python have had at once since then."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield lambda: int(pool.max_memory()) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


def test_memory_does_not_grow_with_the_number_of_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many footers are read at the same moment is chance; with one thread it is always one.
    monkeypatch.setattr(parts, "_AT_ONCE", 1)
    peaks = []
    for count in (100, 700):
        folder = tmp_path / str(count)
        folder.mkdir()
        table = pa.table({"prompt": [f"prompt {row}" for row in range(count)]})
        job = fabricate(folder, {"a.parquet": table}, {"output.chunk_rows": 2})
        with measured() as peak:
            found = verify(job)
            peaks.append(peak())
        assert (found.exit_code, found.rows) == (0, count)
    # Of each part its name is kept, 640 bytes with what holds it; a footer is more than that.
    assert peaks[1] - peaks[0] < (700 - 100) * 1024


@pytest.mark.parametrize("command", ["verify", "merge"])
def test_of_a_giant_part_batches_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    dice = np.random.default_rng(0)
    blobs = [dice.bytes(100_000) for _ in range(640)]
    table = pa.table({"prompt": ["one"] * 640, "blob": blobs})
    job, size = fabricate(tmp_path, {"a.parquet": table}, page_rows=8), table.nbytes
    del table, blobs
    monkeypatch.setattr(merging, "_GROUP_BYTES", 2**23)
    with measured() as peak:
        if command == "verify":
            assert verify(job).exit_code == 0
        else:
            merging.merge(job, str(tmp_path / "m.parquet"))
        assert peak() < 0.9 * size
