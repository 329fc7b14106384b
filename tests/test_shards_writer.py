"""A part is there whole or not at all, and what was committed stays."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from adaflash_batch.errors import AdaflashError, ConfigError
from adaflash_batch.request import Completion, Prompt, RowError, RowKey, Sampling
from adaflash_batch.shards.inputs import Shard, resolve_inputs
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.schema import OutputRow
from adaflash_batch.shards.writer import (
    PART_NAME,
    TEMPORARY_NAME,
    PartFooter,
    Totals,
    make_footer,
    part_name,
    prepare_output,
    sum_rows,
    write_part,
)
from adaflash_batch.stats import SpeculationCounts

counters = st.integers(0, 2**40)
speculation_counts = st.builds(
    SpeculationCounts,
    steps=counters,
    drafted=counters,
    verified=counters,
    accepted=counters,
    accepted_hist=st.lists(counters, max_size=4),
    drafter_first=st.none() | counters,
    drafter_last=st.none() | counters,
)
totals = st.builds(Totals, *[counters] * 6, counts=speculation_counts)
footers = st.builds(
    PartFooter,
    st.text(),
    st.text(),
    st.text(),
    counters,
    counters,
    counters,
    totals,
    st.none() | counters,
)
FOOTER = PartFooter("job", "a b/żó.parquet", "d1", 3, 12, 120, Totals(num_rows=2), 17)
TABLE = pa.table({"prompt": ["x", "y"]})


@given(footers)
def test_footer_comes_back_as_it_was(footer: PartFooter) -> None:
    metadata = footer.to_metadata() | {b"pandas": b"{}"}
    assert PartFooter.from_metadata(metadata) == footer


@pytest.mark.parametrize("key", sorted(FOOTER.to_metadata()))
def test_damaged_footer_is_no_footer(key: bytes) -> None:
    metadata = FOOTER.to_metadata()
    assert PartFooter.from_metadata(metadata | {key: b"{"}) is None
    del metadata[key]
    is_new = key == b"adaflash.sequence"  # parts were written before there was one
    assert (PartFooter.from_metadata(metadata) is None) == (not is_new)


def test_no_footer_and_another_format() -> None:
    assert PartFooter.from_metadata(None) is None
    assert PartFooter.from_metadata({b"pandas": b"{}"}) is None
    assert PartFooter.from_metadata(FOOTER.to_metadata() | {b"adaflash.format": b"99"}) is None
    assert PartFooter.from_metadata(FOOTER.to_metadata() | {b"adaflash.new": b"1"}) is None


@given(totals, totals)
def test_totals_add_up(first: Totals, second: Totals) -> None:
    both = first + second
    assert both.num_output_rows == first.num_output_rows + second.num_output_rows
    assert both.truncated_tokens == first.truncated_tokens + second.truncated_tokens
    assert both.counts.drafted == first.counts.drafted + second.counts.drafted
    assert first + Totals() == first


def test_sums_count_what_the_columns_say() -> None:
    key = RowKey(0, 0, 0)
    counts = SpeculationCounts()
    counts.record(7, 5, 3)
    rows = [
        OutputRow("t", Completion(key, [1, 2], "stop", 10, 4, counts)),
        OutputRow("t", Completion(key, [1], "error", 10, 4, counts, error=RowError("e", "m"))),
        OutputRow(None, RowError("null_prompt", "m")),
    ]
    summed = sum_rows(2, rows)
    assert summed == Totals(2, 3, 2, 10, 2, 4, counts)
    prompts = [Prompt(3, 120 + i, i, "p", Sampling()) for i in range(2)]
    chunk = Chunk(Shard(3, FOOTER.shard_name, "/x"), 12, 120, TABLE, prompts)
    made = make_footer(chunk, rows, fingerprint="job", shard_digest="d1", drafter_version=17)
    assert made == PartFooter("job", FOOTER.shard_name, "d1", 3, 12, 120, summed, 17)


def test_part_names() -> None:
    assert part_name(3, 12) == "part-00003-00012.parquet"
    for name in (part_name(3, 12), part_name(123456, 7654321)):
        assert PART_NAME.fullmatch(name)
    assert part_name(1, 2) < part_name(1, 10) < part_name(2, 0)


def test_written_part_has_rows_footer_and_the_inputs_metadata(tmp_path: Path) -> None:
    metadata = {"pandas": '{"a": 1}', "adaflash.fingerprint": '"older job"', "adaflash.x": "1"}
    write_part(str(tmp_path), "p.parquet", TABLE.replace_schema_metadata(metadata), FOOTER)
    assert [path.name for path in tmp_path.iterdir()] == ["p.parquet"]
    file = pq.ParquetFile(tmp_path / "p.parquet")
    assert file.read().column("prompt").to_pylist() == ["x", "y"]
    assert file.metadata.metadata[b"pandas"] == b'{"a": 1}'
    assert b"adaflash.x" not in file.metadata.metadata
    assert PartFooter.from_metadata(file.metadata.metadata) == FOOTER
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_writing_twice_replaces(tmp_path: Path) -> None:
    write_part(str(tmp_path), "p.parquet", TABLE, FOOTER)
    write_part(str(tmp_path), "p.parquet", TABLE.slice(1), FOOTER)
    assert pq.read_table(tmp_path / "p.parquet")["prompt"].to_pylist() == ["y"]
    assert len(list(tmp_path.iterdir())) == 1


def test_order_of_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    synced, replaced = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if target != tmp_path:
            assert pq.read_table(target).equals(TABLE)
            assert TEMPORARY_NAME.fullmatch(target.name)
        done.append("directory" if target == tmp_path else "file")
        synced(descriptor)

    def spy_replace(old: Path, new: Path) -> None:
        done.append("rename")
        replaced(old, new)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_part(str(tmp_path), part_name(0, 0), TABLE, FOOTER)
    assert done == ["file", "rename", "directory"]


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield 50_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_write_that_stops_half_way_leaves_what_was_there(
    tmp_path: Path, file_size_limit: int
) -> None:
    write_part(str(tmp_path), "p.parquet", TABLE, FOOTER)
    before = (tmp_path / "p.parquet").read_bytes()
    large = pa.table({"prompt": [os.urandom(1000).hex() for _ in range(file_size_limit // 500)]})
    with pytest.raises(AdaflashError, match=r"p\.parquet") as caught:
        write_part(str(tmp_path), "p.parquet", large, FOOTER)
    assert "already committed is unharmed" in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["p.parquet"]
    assert (tmp_path / "p.parquet").read_bytes() == before


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EROFS, "no permission"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_disk_fault_ends_in_a_clear_message(
    number: int, words: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(AdaflashError, match=words):
        write_part(str(tmp_path), "p.parquet", TABLE, FOOTER)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_writing_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_part(str(tmp_path), "p.parquet", TABLE, FOOTER)
    assert list(tmp_path.iterdir()) == []


def test_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(AdaflashError, match="cannot write"):
        write_part(str(tmp_path / "gone"), "p.parquet", TABLE, FOOTER)


def test_other_filesystems() -> None:
    remote = fs._MockFileSystem()
    remote.create_dir("bucket/out", recursive=True)
    write_part("bucket/out", "p.parquet", TABLE, FOOTER, remote)
    with remote.open_input_file("bucket/out/p.parquet") as source:
        assert pq.read_table(source).equals(TABLE)
    assert len(remote.get_file_info(fs.FileSelector("bucket/out"))) == 1
    with pytest.raises(AdaflashError, match="cannot write"):
        write_part("bucket/gone", "p.parquet", TABLE, FOOTER, remote)


def shards_of(*inputs: Path | str) -> list[Shard]:
    return resolve_inputs([str(item) for item in inputs])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("a.parquet", "sub/b.parquet"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(TABLE, path)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("named", "output", "words"),
    [
        (["data"], "data", "holds the input file"),
        (["data"], ".", "holds the input file"),
        (["data/a.parquet"], "data", "holds the input file"),
        (["data/a.parquet"], "data/sub/..", "holds the input file"),
        (["data/a.parquet"], "link", "holds the input file"),
        (["data"], "data/out", "is inside the input"),
        (["data"], "data/sub/new/deep", "holds|is inside the input"),
        (["data"], "link/out", "is inside the input"),
        (["link"], "data/out", "is inside the input"),
        (["data/**/*.parquet"], "data/out", "is inside the input"),
        (["data/**/*.parquet"], "data/x/out", "is inside the input"),
        (["data/*/*.parquet"], "data/out", "is inside the input"),
        (["data/*"], "data/out", "is inside the input"),
        (["d*/"], "data-out", "is inside the input"),
        (["data/a.parquet"], "data/a.parquet", "is a file"),
        (["data/a.parquet"], "data/a.parquet/out", "cannot write"),
        (["data/a.parquet"], "/proc/nothing/out", "cannot write"),
    ],
)
def test_output_that_would_mix_with_the_input(
    named: list[str],
    output: str,
    words: str,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data.parent)
    Path("link").symlink_to("data")
    with pytest.raises(ConfigError, match=words):
        prepare_output(output, shards_of(*named))
    assert not (data / "out").exists()


@pytest.mark.parametrize(
    ("named", "output"),
    [
        (["data"], "out"),
        (["data"], "data-out"),
        (["data/a.parquet"], "data/out"),
        (["data/*.parquet"], "data/out"),
        (["data/sub/*.parquet"], "data/out/deep dir/ż"),
        (["data/a.parquet"], "data/a.parquet-out"),
    ],
)
def test_output_beside_the_input(
    named: list[str], output: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    for _ in range(2):
        filesystem, path = prepare_output(output, shards_of(*named))
        assert path == str(data.parent / output)
        assert filesystem.get_file_info(path).type == fs.FileType.Directory
        assert list(Path(path).iterdir()) == []


def test_output_as_uri(data: Path) -> None:
    _, path = prepare_output(f"file://{data.parent}/out dir", shards_of(data))
    assert Path(path).is_dir()
    with pytest.raises(ConfigError, match="is inside"):
        prepare_output(f"file://{data}/out", shards_of(data))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_read_only_output(data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot write to the output directory"):
        prepare_output(str(tmp_path / "out"), shards_of(data))
