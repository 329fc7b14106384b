"""An id column that identifies rows has no nulls and no repeats."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards import hashes, identity
from adaflash_batch.shards.identity import check_ids
from adaflash_batch.shards.inputs import Shard, resolve_inputs


def files(directory: Path, *columns: Any, **options: Any) -> list[Shard]:
    for number, column in enumerate(columns):
        table = pa.table({"id.x": pa.nulls(len(column)), "id": column})
        pq.write_table(table, directory / f"{number}.parquet", **options)
    return resolve_inputs([str(directory)])


@pytest.mark.parametrize(
    "columns",
    [
        [pa.array(["a", "b"]), pa.array(["c"], pa.large_string())],
        [pa.array([1, 2], pa.int8()), pa.array([2**64 - 1], pa.uint64())],
        [pa.array(["1"]), pa.array([1])],
        [pa.array([b"ab", b"cd"], pa.binary(2))],
        [pa.array([b"a" * 16, b"b" * 16], pa.uuid())],
        [pa.array(["a", "b"]).dictionary_encode(), pa.array([], pa.string())],
        [pa.array([], pa.null())],
    ],
)
def test_ids_that_identify(columns: list[Any], tmp_path: Path) -> None:
    check_ids(files(tmp_path, *columns), "id")


def test_repeat_in_another_file_names_both_rows(tmp_path: Path) -> None:
    texts = [f"id{row}" for row in range(50)]
    shards = files(tmp_path, pa.array(texts), pa.array(["new", "id33"], pa.string_view()))
    with pytest.raises(
        ConfigError, match=r"'id33' twice: in .*0\.parquet row 33 .*1\.parquet row 1"
    ):
        check_ids(shards, "id")


def test_repeat_in_one_file_over_row_groups(tmp_path: Path) -> None:
    shards = files(tmp_path, pa.array([*range(9), 4], pa.int32()), row_group_size=3)
    with pytest.raises(ConfigError, match=r"4 twice: in .* row 4 and in .* row 9"):
        check_ids(shards, "id")


def test_repeat_across_the_blocks_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_BLOCK", 2)
    for repeated in range(7):
        shards = files(tmp_path, pa.array([*range(7), repeated]))
        with pytest.raises(ConfigError, match=f"{repeated} twice"):
            check_ids(shards, "id")
    check_ids(files(tmp_path, pa.array(range(8))), "id")


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_every_row_of_a_bad_id_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(hashes, "_BLOCK", block)
    shards = files(tmp_path, pa.array([7, 8, 7, None, 7]), pa.array([8, 9, 7, None, 7]))
    found = {(bad.shard.index, bad.row): bad for bad in identity.bad_ids(shards, "id")}
    assert sorted(found) == [(0, 2), (0, 3), (0, 4), (1, 0), (1, 2), (1, 3), (1, 4)]
    assert len(list(identity.bad_ids(shards, "id"))) == len(found)
    assert found[0, 3].row_id is None
    assert found[1, 3].first is None
    assert found[1, 0].first == (shards[0], 1)
    assert found[1, 4].first == (shards[0], 0)


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_repeats_are_counted_across_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(hashes, "_BLOCK", block)
    with hashes.Hashes() as kept:
        assert kept.num_repeats() == 0
        for values in ([5, 1, 5], [], [5, 2**64 - 1, 1]):
            kept.add(np.array(values, dtype=np.uint64))
        assert kept.num_repeats() == 3
        assert sorted(value for some in kept.repeated() for value in some) == [1, 5]


def test_equal_hashes_of_different_ids_are_no_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "row_identity", lambda name, row, row_id: len(row_id))
    check_ids(files(tmp_path, pa.array(["a", "b", "cc"])), "id")
    with pytest.raises(ConfigError, match="'cc' twice"):
        check_ids(files(tmp_path, pa.array(["a", "b", "cc", "cc"])), "id")


def test_null_names_file_and_row(tmp_path: Path) -> None:
    shards = files(tmp_path, pa.array([1, 2]), pa.array([3, 4, None]))
    with pytest.raises(ConfigError, match=r"1\.parquet is null in row 2"):
        check_ids(shards, "id")


@pytest.mark.parametrize("wrong", [pa.float64(), pa.bool_(), pa.list_(pa.int8())], ids=str)
def test_type_that_cannot_identify(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot identify rows"):
        check_ids(files(tmp_path, pa.array([], wrong)), "id")


def test_missing_column(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'key'"):
        check_ids(files(tmp_path, pa.array([1])), "key")
