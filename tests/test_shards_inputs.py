"""What a person may name as input, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from adaflash_batch.errors import AdaflashError, ConfigError, InputError
from adaflash_batch.shards import inputs as inputs_module
from adaflash_batch.shards.inputs import resolve_inputs
from adaflash_batch.shards.locations import locate, path_matches
from adaflash_batch.shards.reader import inspect_shard


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": [name]}), path)


def names(*inputs: str | Path) -> list[str]:
    shards = resolve_inputs([str(item) for item in inputs])
    assert [shard.index for shard in shards] == list(range(len(shards)))
    for shard in shards:
        assert shard.filesystem.get_file_info(shard.path).type == fs.FileType.File
    return [shard.name for shard in shards]


def test_file_is_named_by_its_base_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "deep/a.parquet")
    assert names(tmp_path / "deep/a.parquet") == ["a.parquet"]
    monkeypatch.chdir(tmp_path / "deep")
    assert names("a.parquet") == names("./a.parquet") == ["a.parquet"]


def test_directory_is_searched_to_any_depth_without_hidden_names(tmp_path: Path) -> None:
    put(tmp_path, "b.parquet", "a/z.parquet", "a/c/x.PARQUET", "spark.parquet/part-0.parquet")
    put(tmp_path, ".hidden.parquet", "_tmp.parquet", "_adaflash/x.parquet", ".git/x.parquet")
    (tmp_path / "README.md").write_text("no")
    expected = ["a/c/x.PARQUET", "a/z.parquet", "b.parquet", "spark.parquet/part-0.parquet"]
    assert names(tmp_path) == names(f"{tmp_path}/") == expected


def test_order_and_names_do_not_depend_on_the_order_of_inputs(tmp_path: Path) -> None:
    put(tmp_path, "x/one.parquet", "y/one.parquet", "y/two.parquet")
    files = [tmp_path / "y/two.parquet", tmp_path / "x/one.parquet", tmp_path / "y/one.parquet"]
    assert names(*files) == names(*reversed(files))
    assert names(*files) == ["x/one.parquet", "y/one.parquet", "y/two.parquet"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.parquet", ["a1.parquet", "a2.parquet"]),
        ("a[2-9].parquet", ["a2.parquet"]),
        ("a?.parquet", ["a1.parquet", "a2.parquet"]),
        ("**/*.parquet", ["a1.parquet", "a2.parquet", "d/e/f.parquet"]),
        ("**", ["a1.parquet", "a2.parquet", "d/e/f.parquet"]),
        ("d*", ["d/e/f.parquet"]),
        ("*/*/f.parquet", ["d/e/f.parquet"]),
        ("_*.parquet", ["_b.parquet"]),
    ],
)
def test_globs(pattern: str, expected: list[str], tmp_path: Path) -> None:
    put(tmp_path, "a1.parquet", "a2.parquet", "_b.parquet", "d/e/f.parquet", ".g/h.parquet")
    assert names(f"{tmp_path}/{pattern}") == expected
    assert names(f"file://{tmp_path}/{pattern}".replace("?", "[0-9]")) == expected


@pytest.mark.parametrize(
    "name", ["a b.parquet", "żółć-ไทย.parquet", "x[1]*.parquet", "100%.parquet"]
)
def test_unusual_file_names(name: str, tmp_path: Path) -> None:
    put(tmp_path, f"in put/{name}")
    assert names(tmp_path / "in put" / name) == [name]
    assert names(tmp_path) == [f"in put/{name}"]
    escaped = name.replace("%", "%25")
    assert names(f"file://{tmp_path}/in put/{escaped}") == [name]
    assert inspect_shard(resolve_inputs([str(tmp_path)])[0]).num_rows == 1


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/a.parquet") == ["a.parquet"]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    put(tmp_path, "real/a.parquet")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "real")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/same.parquet").symlink_to(tmp_path / "real/a.parquet")
    assert names(tmp_path / "in") == ["link/a.parquet", "same.parquet"]


def test_other_filesystems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remote = fs._MockFileSystem()
    remote.create_dir("bucket/data/_skip", recursive=True)
    for path in ("bucket/data/a.parquet", "bucket/data/b.parquet", "bucket/data/_skip/c.parquet"):
        with remote.open_output_stream(path) as stream:
            pq.write_table(pa.table({"prompt": [path]}), stream)

    def locate_mock(text: str) -> tuple[Any, str]:
        return (remote, text.removeprefix("mock://")) if "://" in text else locate(text)

    monkeypatch.setattr(inputs_module, "locate", locate_mock)
    assert names("mock://bucket/data") == ["a.parquet", "b.parquet"]
    assert names("mock://bucket/data/b*.parquet") == ["b.parquet"]
    put(tmp_path, "a.parquet")
    both = names("mock://bucket/data", tmp_path / "a.parquet")
    assert both == [f"local{tmp_path}/a.parquet", "mock/bucket/data/a.parquet", *both[2:]]
    assert len(set(both)) == 3


def test_s3_addresses_are_understood_without_being_asked() -> None:
    filesystem, path = locate("s3://bucket/with space/a[1].parquet?region=eu-west-1")
    assert filesystem.type_name == "s3"
    assert path == "bucket/with space/a[1].parquet"


@pytest.mark.parametrize(
    ("named", "error", "words"),
    [
        (["missing.parquet"], InputError, "no file or directory missing.parquet"),
        (["x*.parquet"], InputError, "no file matches x"),
        (["nowhere/*.parquet"], InputError, "no file matches"),
        (["empty"], InputError, "has no .*parquet file"),
        (["a.parquet", "a.parquet"], ConfigError, "named twice"),
        (["a.parquet", "."], ConfigError, r"by a\.parquet and by \."),
        (["a.parquet", "sub/../a.parquet"], ConfigError, "named by"),
        (["link/b.parquet", "sub/b.parquet"], ConfigError, "named by"),
        (["a.parquet", "file://{here}/a.parquet"], ConfigError, "named by"),
        ([], ConfigError, "no input"),
        ([""], ConfigError, "empty"),
        (["gopher://x/y.parquet"], ConfigError, "gopher"),
        (["pipe"], InputError, "neither a file nor a directory"),
    ],
)
def test_refused_inputs(
    named: list[str],
    error: type[AdaflashError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "a.parquet", "sub/b.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("sub")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(error, match=words):
        resolve_inputs([name.format(here=tmp_path) for name in named])


def test_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"bad\xff.parquet")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system only takes UTF-8 names")
    with pytest.raises(InputError, match=r"bad\\xff\.parquet"):
        resolve_inputs([str(tmp_path)])
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        resolve_inputs([os.fsdecode(b"bad\xff.parquet")])


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("/d/out/part.parquet", "/d/**/*.parquet", True),
        ("/d/part.parquet", "/d/**/*.parquet", True),
        ("/d/out/part.parquet", "/d/*.parquet", False),
        ("/d/_out/part.parquet", "/d/*/*.parquet", False),
        ("/d/out/part.parquet", "/d/**", True),
        ("/e/part.parquet", "/d/**", False),
    ],
)
def test_path_matches(path: str, pattern: str, fits: bool) -> None:
    assert path_matches(path, pattern) is fits
