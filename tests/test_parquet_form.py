"""What Arrow's own Parquet writer cannot write is written, and reads back as it was."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaflash_batch.shards.parquet_form import write_parquet
from adaflash_batch.shards.stored_views import stored_array, stored_type

VIEW = pa.string_view()
STRUCT = pa.struct([pa.field("x", VIEW, metadata={"unit": "text"}), ("y", pa.binary_view())])
A, B = {"x": "a", "y": b"1"}, {"x": "a text that is longer than a view", "y": None}
VIEWS = [
    (STRUCT, [A, None, B, {"x": None, "y": b""}]),
    (pa.struct([("z", STRUCT)]), [{"z": A}, None, {"z": None}, {"z": B}]),
    (pa.list_(STRUCT), [[A], None, [], [B, None]]),
    (pa.large_list(STRUCT), [[A], None, [], [B, None]]),
    (pa.list_view(STRUCT), [[A, B], None, [None], [B]]),
    (pa.large_list_view(STRUCT), [[A], [], [B, None], None]),
    (pa.list_(STRUCT, 2), [[A, B], None, [None, A], [B, B]]),
    (pa.map_(pa.string(), STRUCT), [[("k", A)], None, [], [("k", B), ("l", None)]]),
    (pa.map_(VIEW, pa.list_(STRUCT)), [[("k", [A, None])], None, [], [("l", None), ("k", [B])]]),
    (pa.struct([("z", pa.list_(VIEW))]), [{"z": ["a", None]}, None, {"z": None}, {"z": ["b"]}]),
]


def read_back(table: Any, path: Path) -> Any:
    with open(path, "wb") as file:
        write_parquet(table, file)
    found = pq.read_table(path)
    assert found.schema.equals(pq.read_schema(path), check_metadata=True)
    return found


@pytest.mark.parametrize(("arrow_type", "rows"), VIEWS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("length", [1, 2, 9])
def test_views_within_structs_stay_what_they_are(
    arrow_type: Any, rows: list[Any], start: int, length: int, tmp_path: Path
) -> None:
    schema = pa.schema([pa.field("c", arrow_type, metadata={"a": "b"})], metadata={"k": "v"})
    whole = pa.table({"c": pa.array(rows, arrow_type)}, schema=schema)
    table = whole.slice(start, length)
    found = read_back(pa.concat_tables([table, whole]), tmp_path / "x.parquet")
    assert found["c"].to_pylist() == rows[start : start + length] + rows
    assert found.schema.field("c").metadata == {b"a": b"b"}
    assert found.schema.metadata == {b"k": b"v"}
    # Names of list items become Parquet's own; all else of the type stays.
    assert stored_type(found.schema.field("c").type) != found.schema.field("c").type
    (chunk,) = table["c"].chunks
    assert stored_array(chunk, stored_type(arrow_type)).to_pylist() == table["c"].to_pylist()


def test_text_in_views_need_not_be_utf8(tmp_path: Path) -> None:
    wrong = pa.array([b"ok", b"\xff\xfe", None], pa.binary_view()).view(VIEW)
    table = pa.table({"c": pa.StructArray.from_arrays([wrong], ["x"])}).slice(1)
    found = read_back(table, tmp_path / "x.parquet")
    assert found.schema.equals(table.schema)
    (chunk,) = found["c"].chunks
    assert chunk.field(0).cast(pa.large_binary()).to_pylist() == [b"\xff\xfe", None]


def test_dictionaries_that_exceed_their_index_together(tmp_path: Path) -> None:
    parts = [[f"{part}-{entry}" for entry in range(100)] for part in range(3)]
    pieces = [
        pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), pa.array(part))
        for part in parts
    ]
    table = pa.table({"c": pa.chunked_array(pieces), "n": range(300)}, metadata={"k": "v"})
    found = read_back(table.slice(50), tmp_path / "x.parquet")
    assert found.schema.equals(table.schema, check_metadata=True)
    assert found["c"].to_pylist() == [entry for part in parts for entry in part][50:]
    assert found["n"].to_pylist() == list(range(50, 300))


def test_dictionaries_that_fit_become_one(tmp_path: Path) -> None:
    pieces = [pa.array([letter, "z"]).dictionary_encode() for letter in "ab"]
    table = pa.table({"c": pa.chunked_array(pieces)})
    assert read_back(table, tmp_path / "x.parquet").equals(table.unify_dictionaries())
    assert pq.read_metadata(tmp_path / "x.parquet").num_row_groups == 1
