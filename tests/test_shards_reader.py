"""Chunks of rows from files of every shape, in bounded memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaflash_batch.errors import InputError
from adaflash_batch.request import Sampling
from adaflash_batch.shards import parquet
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.reader import Chunk, inspect_shard, num_chunks, read_chunks

MIB = 1 << 20


def write(path: Path, table: Any, **options: Any) -> Shard:
    pq.write_table(table, path, **options)
    return Shard(0, path.name, str(path))


def rows(num_rows: int) -> Any:
    return pa.table({"prompt": [f"p{row}" for row in range(num_rows)], "x": range(num_rows)})


def chunks(shard: Shard, chunk_rows: int, **options: Any) -> list[Chunk]:
    content = ContentColumn("prompt", "text")
    defaults: dict[str, Any] = {"columns": {}, "sampling": Sampling()}
    return list(read_chunks(shard, content, chunk_rows, **(defaults | options)))


def noise(num_rows: int, row_bytes: int) -> Any:
    generator = np.random.default_rng(0)
    return pa.table({"prompt": [generator.bytes(row_bytes // 2).hex() for _ in range(num_rows)]})


@pytest.mark.parametrize("group_rows", [1, 3, 10, 100])
@pytest.mark.parametrize("chunk_rows", [1, 4, 10, 23, 24])
def test_chunks_do_not_depend_on_row_groups(
    group_rows: int, chunk_rows: int, tmp_path: Path
) -> None:
    shard = write(tmp_path / "a.parquet", rows(23), row_group_size=group_rows)
    read = chunks(shard, chunk_rows)
    assert [chunk.index for chunk in read] == list(range(num_chunks(23, chunk_rows)))
    for chunk in read:
        end = min(23, chunk.first_row + chunk_rows)
        assert chunk.first_row == chunk.index * chunk_rows
        assert chunk.table["x"].to_pylist() == list(range(chunk.first_row, end))
        assert [p.row for p in chunk.prompts] == list(range(chunk.first_row, end))
        assert [p.content for p in chunk.prompts] == [
            f"p{row}" for row in range(chunk.first_row, end)
        ]


def test_file_without_rows_has_no_chunks(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.parquet", rows(0))
    assert inspect_shard(shard).num_rows == 0
    assert chunks(shard, 5) == []
    groupless = tmp_path / "b.parquet"
    pq.ParquetWriter(groupless, rows(0).schema).close()
    assert chunks(Shard(0, "b", str(groupless)), 5) == []


def test_row_groups_that_only_skipped_chunks_use_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write(tmp_path / "a.parquet", rows(40), row_group_size=4)
    asked: list[int] = []
    original = parquet.read_batches

    def spy(file: Any, **options: Any) -> Any:
        asked.extend(options["row_groups"])
        return original(file, **options)

    monkeypatch.setattr("adaflash_batch.shards.reader.read_batches", spy)
    read = chunks(shard, 6, skip=lambda index: index not in (1, 4))
    assert [chunk.index for chunk in read] == [1, 4]
    assert [chunk.table["x"][0].as_py() for chunk in read] == [6, 24]
    assert asked == [1, 2, 6, 7]


def test_everything_skipped_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write(tmp_path / "a.parquet", rows(9))
    monkeypatch.delattr("adaflash_batch.shards.reader.read_batches")
    assert chunks(shard, 2, skip=lambda _: True) == []


def test_one_large_row_group_is_streamed(tmp_path: Path) -> None:
    table = noise(1500, 40_000)
    # A page is decoded whole, and Arrow looks at its size only after each write batch.
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": 16}
    shard = write(tmp_path / "a.parquet", table, **options)
    assert pq.read_metadata(shard.path).num_row_groups == 1
    del table
    before = pa.total_allocated_bytes()
    held = [
        pa.total_allocated_bytes() - before
        for _ in read_chunks(
            shard, ContentColumn("prompt", "text"), 50, columns={}, sampling=Sampling()
        )
    ]
    assert Path(shard.path).stat().st_size > 55 * MIB
    assert len(held) == 30
    assert max(held) < 24 * MIB


def test_text_repeated_in_every_row_does_not_make_batches_large(tmp_path: Path) -> None:
    # In the file it is stored once, so the size of the row group says nothing.
    table = pa.table({"prompt": pa.array(["x" * 100_000] * 2000)})
    shard = write(tmp_path / "a.parquet", table)
    del table
    before = pa.total_allocated_bytes()
    held = [
        pa.total_allocated_bytes() - before
        for _ in read_chunks(
            shard, ContentColumn("prompt", "text"), 20, columns={}, sampling=Sampling()
        )
    ]
    assert max(held) < 24 * MIB


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"prompt\nhello\n", b"PAR1" + b"\0" * 64 + b"PAR1"]
)
def test_file_that_is_not_parquet_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad file.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad file\.parquet"):
        inspect_shard(Shard(0, path.name, str(path)))


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_truncated_file_is_refused_by_name(kept: float, tmp_path: Path) -> None:
    shard = write(tmp_path / "a.parquet", noise(50, 100))
    path = Path(shard.path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(InputError, match=r"a\.parquet"):
        inspect_shard(shard)


def test_damage_between_the_rows_is_reported_by_name(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.parquet", noise(500, 100), row_group_size=100)
    path = Path(shard.path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 5000] = b"\xff" * 5000
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet"):
        chunks(shard, 50)


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.parquet", tmp_path):
        with pytest.raises(InputError, match=path.name):
            inspect_shard(Shard(0, path.name, str(path)))


def test_digest_follows_the_content_and_not_the_name(tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    texts = [f"prompt {row:06d}" for row in range(1000)]
    first = write(tmp_path / "a.parquet", pa.table({"prompt": texts}), **options)
    copy = write(tmp_path / "b.parquet", pa.table({"prompt": texts}), **options)
    texts[500] = "PROMPT 000500"  # same lengths, so the same footer
    edited = write(tmp_path / "c.parquet", pa.table({"prompt": texts}), **options)
    assert inspect_shard(first).digest == inspect_shard(copy).digest
    assert Path(first.path).stat().st_size == Path(edited.path).stat().st_size
    assert inspect_shard(first).digest != inspect_shard(edited).digest


def test_digest_of_a_large_file_reads_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write(tmp_path / "a.parquet", noise(2000, 1000), compression="none")
    monkeypatch.setattr(parquet, "_DIGEST_BLOCK", 1024)
    before = inspect_shard(shard).digest
    path = Path(shard.path)
    content = bytearray(path.read_bytes())
    step = -(-len(content) // 64)
    content[10 * step + 5] ^= 1
    path.write_bytes(content)
    assert inspect_shard(shard).digest != before


def test_schema_keeps_metadata_and_nullability(tmp_path: Path) -> None:
    field = pa.field("prompt", pa.large_string(), nullable=False, metadata={"unit": "text"})
    table = pa.table({"prompt": pa.array(["a"], pa.large_string())})
    table = table.cast(pa.schema([field], metadata={"pandas": "{}"}))
    shard = write(tmp_path / "a.parquet", table)
    assert inspect_shard(shard).schema.equals(table.schema, check_metadata=True)
    assert chunks(shard, 1)[0].table.schema.equals(table.schema, check_metadata=True)
