"""How a job ends: too many errors, a full disk, a new output in an old one's place, other runs."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import Listener, parts, read_rows, run, tiny_model_folder, write_rows

from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.errors import AdaflashError, ConfigError, LockedError
from adaflash_batch.shards.inputs import resolve_inputs
from adaflash_batch.shards.parquet import inspect_shard
from adaflash_batch.shards.portion import one_of
from adaflash_batch.shards.run_folder import RunFolder

CHUNK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twenty rows, of which those at 5, 9, 10 and 17 cannot be served."""
    rows = [None if n in (5, 9, 10, 17) else f"row {n}" for n in range(20)]
    return write_rows(tmp_path / "in.parquet", {"prompt": pa.array(rows), "id": list(range(20))})


def rejects(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out / "_adaflash" / "rejects.parquet").to_pylist()
    return rows


def keys(**more: object) -> dict[str, object]:
    usual = {"output.chunk_rows": CHUNK, "engine.concurrency": 2}
    return {**usual, **{k.replace("__", "."): v for k, v in more.items()}}


def test_rows_with_errors_are_there_once_more(tmp_path: Path, model: Path, source: Path) -> None:
    out = tmp_path / "out"
    assert run(source, model, out, keys()).exit_code == 3
    assert [(each["input"], each["row"]) for each in rejects(out)] == [
        ("in.parquet", row) for row in (5, 9, 10, 17)
    ]
    assert rejects(out)[1] == {
        "input": "in.parquet",
        "row": 9,
        "sample": 0,
        "kind": "null_prompt",
        "message": "the prompt is null",
        "prompt": None,
        "part": "part-00000-00002.parquet",
    }


def test_rows_are_counted_by_input_and_not_by_sample(tmp_path: Path, model: Path) -> None:
    longs = ["x", "y" * 300, None, "z" * 3000, "w"]
    source = write_rows(tmp_path / "in.parquet", {"prompt": longs, "n": [3, 2, 2, 1, 4]})
    out = tmp_path / "out"
    summary = run(source, model, out, keys(input__columns={"n": "n"}, output__chunk_rows=2))
    assert summary.fields["errors"] == 3
    found = [(each["row"], each["kind"], len(each["prompt"] or "")) for each in rejects(out)]
    assert found == [
        (1, "prompt_too_long", 300),
        (2, "null_prompt", 0),
        (3, "prompt_too_long", 2000),
    ]


def test_without_errors_there_is_no_such_file(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    stale = out / "_adaflash" / "rejects.parquet"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of another job")
    assert run(write_rows(tmp_path / "in.parquet", ["a"]), model, out).exit_code == 0
    assert not stale.exists()


@pytest.mark.parametrize(
    ("limit", "stops"), [("3", True), ("4", False), ("19%", True), ("20%", False)]
)
def test_too_many_errors_end_a_job(
    tmp_path: Path, model: Path, source: Path, limit: str, stops: bool
) -> None:
    out, listener = tmp_path / "out", Listener()
    summary = run(source, model, out, keys(run__max_errors=limit), listener=listener)
    assert summary.exit_code == (4 if stops else 3)
    assert summary.fields["status"] == ("error_limit" if stops else "complete")
    told = [line for line in listener.lines if f"--max-errors {limit} allows" in line]
    assert len(told) == stops
    # Also those of chunks that were never committed.
    assert [each["row"] for each in rejects(out)] == [5, 9, 10, 17]


def test_a_job_over_its_limit_goes_on_with_a_higher_one(
    tmp_path: Path, model: Path, source: Path
) -> None:
    out = tmp_path / "out"
    one = keys(run__max_errors="1", engine__concurrency=1)
    first = run(source, model, out, one)
    assert first.exit_code == 4
    assert 0 < len(parts(out)) < 5
    assert run(source, model, out, one).exit_code == 4
    assert run(source, model, out, keys(run__max_errors="50%")).exit_code == 3
    run(source, model, tmp_path / "whole", keys())
    assert read_rows(out) == read_rows(tmp_path / "whole")
    # All is there, and still too much of it is wrong.
    assert run(source, model, out, one).exit_code == 4


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode
    except FileNotFoundError:
        done = 1
    if done != 0:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_harms_nothing_committed(
    tmp_path: Path, model: Path, disk: Path
) -> None:
    # Incompressible, so that some parts fit and all do not.
    rows = [f"row {n}" for n in range(40)]
    blobs = [random.Random(n).randbytes(12_000) for n in range(40)]
    source = write_rows(tmp_path / "in.parquet", {"prompt": rows, "blob": blobs})
    blocks = {"output.chunk_rows": CHUNK}
    with pytest.raises(AdaflashError, match="no space left for") as caught:
        run(source, model, disk / "out", blocks)
    assert caught.value.hint is not None
    assert "unharmed" in caught.value.hint
    before = {path: path.read_bytes() for path in parts(disk / "out")}
    assert 0 < len(before) < 10
    assert not list((disk / "out").glob(".part-*"))
    resize = ["mount", "-o", "remount,size=8m", str(disk)]
    subprocess.run(resize, check=True)
    assert run(source, model, disk / "out", blocks).fields["status"] == "complete"
    assert {path: path.read_bytes() for path in before} == before
    run(source, model, tmp_path / "whole", blocks)
    assert read_rows(disk / "out") == read_rows(tmp_path / "whole")


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Decoding fails as by a bug, after so many steps."""
    real = Decoder.step

    def step(decoder: Decoder) -> Any:
        if decoder.num_steps >= after:
            raise ZeroDivisionError("a bug")
        return real(decoder)

    monkeypatch.setattr(Decoder, "step", step)


def test_a_new_output_replaces_the_old_one_when_it_is_whole(
    tmp_path: Path, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(source, model, out, keys())
    old = read_rows(out)
    other = keys(sampling__max_new_tokens=5, output__chunk_rows=7)
    with pytest.raises(ConfigError) as refused:
        run(source, model, out, other)
    assert "sampling.max_new_tokens: 8 -> 5" in refused.value.message
    assert "--fresh" in str(refused.value.hint)
    with monkeypatch.context() as patch:
        interrupt(patch, 25)
        with pytest.raises(ZeroDivisionError):
            run(source, model, out, {**other, "run.fresh": True})
    grown = [path.name for path in parts(out / "_adaflash" / "fresh")]
    assert grown
    assert read_rows(out) == old
    # Without --fresh the old output is still the job's.
    assert run(source, model, out, keys()).fields["status"] == "nothing_to_do"
    summary = run(source, model, out, {**other, "run.fresh": True})
    assert summary.fields["status"] == "complete"
    assert int(str(summary.fields["parts_written"])) + len(grown) == 3
    run(source, model, tmp_path / "whole", other)
    assert read_rows(out) == read_rows(tmp_path / "whole")
    assert not (out / "_adaflash" / "fresh").exists()
    assert (
        json.loads((out / "_adaflash" / "job.json").read_text())["spec"]["sampling"][
            "max_new_tokens"
        ]
        == 5
    )
    assert json.loads((out / "_adaflash" / "summary.json").read_text())["rows"] == 20
    assert run(source, model, out, other).fields["status"] == "nothing_to_do"


def test_a_new_output_of_another_job_is_begun_again(
    tmp_path: Path, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(source, model, out, keys())
    with monkeypatch.context() as patch:
        interrupt(patch, 40)
        with pytest.raises(ZeroDivisionError):
            run(source, model, out, keys(run__fresh=True, sampling__seed=1))
    run(source, model, out, keys(run__fresh=True, sampling__max_new_tokens=3))
    run(source, model, tmp_path / "whole", keys(sampling__max_new_tokens=3))
    assert read_rows(out) == read_rows(tmp_path / "whole")


def test_a_first_output_needs_no_other_place(
    tmp_path: Path, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 40)
        with pytest.raises(ZeroDivisionError):
            run(source, model, out, keys(run__fresh=True))
    begun = len(parts(out))
    assert begun > 0
    # The same command goes on with what it began.
    summary = run(source, model, out, keys(run__fresh=True))
    assert (summary.fields["parts_written"], len(parts(out))) == (5 - begun, 5)
    # And now it does all of it anew.
    assert run(source, model, out, keys(run__fresh=True)).fields["parts_written"] == 5


def test_rows_in_journals_belong_to_their_job(
    tmp_path: Path, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, large = tmp_path / "out", {"output.chunk_rows": 100, "engine.concurrency": 2}
    with monkeypatch.context() as patch:
        interrupt(patch, 20)
        with pytest.raises(ZeroDivisionError):
            run(source, model, out, large)
    assert parts(out) == []
    with pytest.raises(ConfigError, match=r"sampling\.seed: null -> 4"):
        run(source, model, out, {**large, "sampling.seed": 4})
    listener = Listener()
    run(source, model, out, {**large, "sampling.seed": 4, "run.fresh": True}, listener=listener)
    assert any("is of another job: its rows are done again" in line for line in listener.lines)
    run(source, model, tmp_path / "whole", {**large, "sampling.seed": 4})
    assert read_rows(out) == read_rows(tmp_path / "whole")


def test_journals_go_where_they_are_wanted(
    tmp_path: Path, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    given = {"output.chunk_rows": 100, "engine.concurrency": 2, "run.scratch": str(scratch)}
    with monkeypatch.context() as patch:
        interrupt(patch, 20)
        with pytest.raises(ZeroDivisionError):
            run(source, model, out, given)
    assert len(list(scratch.glob("*/journal/*.jsonl"))) == 1
    assert not (out / "_adaflash" / "journal").exists()
    assert int(str(run(source, model, out, given).fields["resumed_rows"])) > 0
    assert list(scratch.glob("*/journal/*.jsonl")) == []


def test_shares_of_a_job_meet_in_one_output(tmp_path: Path, model: Path, source: Path) -> None:
    out = tmp_path / "out"
    run(source, model, tmp_path / "whole", keys())
    for index in (2, 0, 1):
        share = keys(run__num_shards=3, run__shard_index=index)
        summary = run(source, model, out, share)
        assert summary.fields["status"] == "complete"
        assert run(source, model, out, share).fields["status"] == "nothing_to_do"
        name = f"summary-{index:05d}-of-00003.json"
        assert json.loads((out / "_adaflash" / name).read_text())["rows"] == summary.fields["rows"]
    assert read_rows(out) == read_rows(tmp_path / "whole")
    assert [each["row"] for each in rejects(out)] == [5, 9, 10, 17]


def test_more_shares_than_chunks_leave_some_with_nothing(
    tmp_path: Path, model: Path, source: Path
) -> None:
    for index in range(8):
        run(source, model, tmp_path / "out", keys(run__num_shards=8, run__shard_index=index))
    run(source, model, tmp_path / "whole", keys())
    assert read_rows(tmp_path / "out") == read_rows(tmp_path / "whole")


@pytest.mark.parametrize(
    ("living", "coming", "is_let_in"),
    [
        ((0, 1), (0, 1), False),
        ((0, 2), (0, 2), False),
        ((0, 2), (1, 2), True),
        ((0, 2), (0, 1), False),
        ((0, 1), (1, 2), False),
        ((1, 4), (0, 2), False),
        ((1, 4), (1, 2), True),
    ],
)
def test_runs_on_the_same_chunks_are_kept_out(
    tmp_path: Path,
    model: Path,
    source: Path,
    living: tuple[int, int],
    coming: tuple[int, int],
    is_let_in: bool,
) -> None:
    out = tmp_path / "out"
    infos = [inspect_shard(shard) for shard in resolve_inputs([str(source)])]
    folder = RunFolder(out / "_adaflash" / "runs", "out")
    share = keys()
    if coming[1] > 1:
        share |= {"run.shard_index": coming[0], "run.num_shards": coming[1]}
    with folder.joined(one_of(infos, CHUNK, *living), infos):
        if is_let_in:
            run(source, model, out, share)
        else:
            with pytest.raises(LockedError, match="is at work on"):
                run(source, model, out, share)
    run(source, model, out, share)


def test_another_job_stays_out_while_shares_are_at_work(
    tmp_path: Path, model: Path, source: Path
) -> None:
    out = tmp_path / "out"
    first = keys(run__num_shards=2, run__shard_index=0)
    infos = [inspect_shard(shard) for shard in resolve_inputs([str(source)])]
    run(source, model, out, first)
    for part in parts(out):
        part.unlink()
    other = keys(run__num_shards=2, run__shard_index=1, sampling__seed=3)
    with (
        RunFolder(out / "_adaflash" / "runs", "out").joined(one_of(infos, CHUNK, 0, 2), infos),
        pytest.raises(ConfigError, match=r"sampling\.seed: null -> 3"),
    ):
        run(source, model, out, other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"run.num_shards": 2}, "num-shards needs to know which"),
        ({"run.shard_index": 0}, "shard-index needs a number of shards"),
        ({"run.shards_from": "slurm"}, "shards-from needs a number of shards"),
        ({"run.num_shards": 2, "run.shard_index": 2}, "with 2 shards it is 0 to 1"),
        (
            {"run.num_shards": 2, "run.shard_index": 0, "run.shards_from": "slurm"},
            "exclude each other",
        ),
        ({"run.num_shards": 2, "run.shard_index": 0, "run.fresh": True}, "does not go with"),
        ({"run.max_errors": "lots"}, "a number of rows, like 100"),
        ({"run.max_errors": "101%"}, "a share of them, like 2.5%"),
        ({"run.grace": -1.0}, "greater than or equal to 0"),
    ],
)
def test_what_says_too_little_or_too_much_is_refused(
    tmp_path: Path, model: Path, source: Path, given: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(source, model, tmp_path / "out", given)
    assert not (tmp_path / "out").exists()
