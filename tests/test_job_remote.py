"""A job whose output is an object store: one put a part, no rename, journals on a local disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from folders import read_rows, run, tiny_model_folder, write_rows
from pyarrow import fs

from adaflash_batch import models
from adaflash_batch.errors import AdaflashError, LockedError
from adaflash_batch.shards import inputs, locations, writer
from adaflash_batch.shards.inputs import resolve_inputs
from adaflash_batch.shards.parquet import inspect_shard
from adaflash_batch.shards.portion import one_of
from adaflash_batch.shards.run_folder import RunFolder

CHUNK = 4


class Store(fs.FileSystemHandler):  # type: ignore[misc]
    """A folder that behaves like an object store: what is put is there whole, and never renamed."""

    def __init__(self, folder: Path) -> None:
        self._real = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
        self.puts: list[str] = []
        self.failing: Callable[[str], bool] = lambda path: False

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def get_type_name(self) -> str:
        return "store"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._real.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._real.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._real.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._real.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._real.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError("an object store renames nothing")

    def copy_file(self, src: str, dest: str) -> None:
        self._real.copy_file(src, dest)

    def open_input_stream(self, path: str) -> Any:
        return self._real.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._real.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self.puts.append(path)
        if self.failing(path):
            raise OSError("the store is gone")
        return self._real.open_output_stream(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """What `bucket://` names from now on."""
    (tmp_path / "bucket").mkdir()
    handler = Store(tmp_path / "bucket")
    filesystem = fs.PyFileSystem(handler)
    real = locations.locate

    def locate(text: str) -> tuple[Any, str]:
        is_in_store = text.startswith("bucket://")
        return (filesystem, text.removeprefix("bucket://")) if is_in_store else real(text)

    for module in (inputs, writer):
        monkeypatch.setattr(module, "locate", locate)
    monkeypatch.setattr(models, "cache_root", lambda: tmp_path / "cache")
    return handler


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [None if n == 5 else f"row {n}" for n in range(20)]
    return write_rows(tmp_path / "in.parquet", {"prompt": pa.array(rows)})


KEYS: dict[str, object] = {"output.chunk_rows": CHUNK, "engine.concurrency": 2}


def test_a_part_is_one_put_and_what_fails_is_done_again(
    tmp_path: Path, model: Path, source: Path, store: Store
) -> None:
    given = {**KEYS, "output.directory": "bucket://out"}
    store.failing = lambda path: path.endswith("part-00000-00003.parquet")
    with pytest.raises(AdaflashError, match="cannot write out/part-00000-00003"):
        run(source, model, Path("unused"), given)
    journals = [*(tmp_path / "cache" / "scratch").glob("*/journal/*.jsonl")]
    assert [path.name for path in journals] == ["00000-00003.jsonl"]
    store.failing, store.puts = lambda path: False, []
    summary = run(source, model, Path("unused"), given)
    assert (summary.fields["status"], summary.fields["resumed_rows"]) == ("complete", 16)
    # A name each for the parts that were missing, and no other name for them before.
    assert [path for path in store.puts if "part-" in path] == [
        f"out/part-00000-0000{n}.parquet" for n in (3, 4)
    ]
    run(source, model, tmp_path / "whole", KEYS)
    assert read_rows(tmp_path / "bucket" / "out") == read_rows(tmp_path / "whole")
    assert (tmp_path / "bucket" / "out" / "_adaflash" / "rejects.parquet").exists()
    assert not [*(tmp_path / "cache" / "scratch").glob("*/journal/*.jsonl")]


def test_runs_of_one_machine_keep_each_other_out(
    tmp_path: Path, model: Path, source: Path, store: Store
) -> None:
    given = {**KEYS, "output.directory": "bucket://out", "run.scratch": str(tmp_path / "scratch")}
    run(source, model, Path("unused"), given)
    (runs,) = (tmp_path / "scratch").glob("*/runs")
    infos = [inspect_shard(shard) for shard in resolve_inputs([str(source)])]
    with (
        RunFolder(runs, "bucket://out").joined(one_of(infos, CHUNK, 0, 1), infos),
        pytest.raises(LockedError, match="at work on bucket://out"),
    ):
        run(source, model, Path("unused"), given)


def test_a_new_output_in_a_store_takes_the_old_ones_place(
    tmp_path: Path, model: Path, source: Path, store: Store
) -> None:
    given = {**KEYS, "output.directory": "bucket://out"}
    run(source, model, Path("unused"), given)
    run(source, model, Path("unused"), {**given, "sampling.max_new_tokens": 3, "run.fresh": True})
    run(source, model, tmp_path / "whole", {**KEYS, "sampling.max_new_tokens": 3})
    assert read_rows(tmp_path / "bucket" / "out") == read_rows(tmp_path / "whole")
