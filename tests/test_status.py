"""status: what is done, running and missing, while a job runs, after a kill, of an array."""

import json
import socket
import subprocess
import sys
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from folders import Listener, run, tiny_model_folder, write_rows
from pyarrow import fs
from reviewed_jobs import MORE, PROMPTS, Job, change_job, command, copied

from adaflash_batch.durable import held
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.runs import is_held, read_runs
from adaflash_batch.review.status import read_status
from adaflash_batch.review.status_view import format_bytes
from adaflash_batch.shards.run_folder import utc_now


def report(job: Job, name: str, **fields: Any) -> Path:
    """Write what a run says of itself; returns its lock file."""
    usual = {
        "name": name,
        "pid": 4711,
        "host": socket.gethostname(),
        "began": "2026-01-02T03:04:05+00:00",
        "updated": utc_now(),
        "state": "decoding",
        "exit_code": None,
        "message": None,
        "rows": 11,
        "rows_done": 6,
        "resumed_rows": 2,
        "errors": 0,
        "output_tokens": 80,
        "tokens_per_s": 40.0,
        "elapsed_s": 2.0,
        "drafter_version": 3,
    }
    runs = job.out / "_adaflash" / "runs"
    runs.mkdir(exist_ok=True)
    (runs / f"{name}.json").write_text(json.dumps(usual | fields))
    return runs / f"{name}.lock"


def test_a_finished_job_is_complete(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    found = read_status(job.opened())
    assert (found.rows, found.rows_committed, found.rows_missing, found.exit_code) == (11, 11, 0, 0)
    assert (found.parts, found.parts_expected, found.notes) == (5, 5, [])
    assert found.error_kinds == {"null_prompt": 1, "empty_prompt": 1}
    summary = json.loads((job.out / "_adaflash" / "summary.json").read_text())
    assert found.completion_tokens == summary["completion_tokens"]
    assert [(each.name, each.state) for each in found.runs] == [("all", "finished")]
    assert found.part_bytes == sum(path.stat().st_size for path in job.out.glob("part-*"))
    code, out, _ = command(capfd, "status", job.out, "--json")
    assert (code, out.count("\n")) == (0, 1)
    said = json.loads(out)
    assert (said["complete"], said["rows_missing"], said["errors"]) == (True, 0, 2)
    code, out, _ = command(capfd, "status", job.out)
    assert code == 0
    assert "11 of 11 rows committed (100.0%): complete" in out
    assert "2: null_prompt 1, empty_prompt 1" in out


def test_nothing_is_written_and_no_lock_is_made(job: Job) -> None:
    before = {p: p.stat().st_mtime_ns for p in job.out.rglob("*")}
    read_status(job.opened())
    assert {p: p.stat().st_mtime_ns for p in job.out.rglob("*")} == before


def test_missing_rows_exit_75(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.part(0, 2).unlink()
    found = read_status(job.opened())
    assert (found.rows_committed, found.rows_missing, found.exit_code) == (10, 1, 75)
    code, out, _ = command(capfd, "status", job.out)
    assert code == 75
    assert "10 of 11 rows committed (90.9%): not complete" in out
    assert "run the same command again to go on" in out


def test_a_part_that_does_not_count_is_told(job: Job) -> None:
    job.part(0, 2).write_bytes(b"torn")
    job.part(1, 1).rename(job.part(1, 0))
    found = read_status(job.opened())
    assert found.rows_committed == 6
    assert any(note.startswith("part-00000-00002.parquet does not count") for note in found.notes)
    assert any("has the wrong name" in note for note in found.notes)


def test_what_journals_hold_is_what_the_next_run_need_not_do(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    files = [
        write_rows(tmp_path / "a.parquet", PROMPTS),
        write_rows(tmp_path / "b.parquet", MORE),
    ]
    keys = {"output.chunk_rows": 4, "sampling.n": 2, "engine.concurrency": 3}
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(files, model, out, keys, listener=Listener(dies_after=30))
    found = read_status(JobOutput.open(str(out)))
    assert found.rows_in_journals > 0
    assert found.rows_committed > 0
    assert found.rows_missing == 11 - found.rows_committed - found.rows_in_journals
    assert [each.state for each in found.runs] == ["interrupted"]
    summary = run(files, model, out, keys)
    assert summary.fields["resumed_rows"] == found.rows_committed + found.rows_in_journals
    assert read_status(JobOutput.open(str(out))).exit_code == 0


def test_journals_of_committed_chunks_and_of_other_jobs_do_not_count(job: Job) -> None:
    journals = job.out / "_adaflash" / "journal"
    journals.mkdir(exist_ok=True)
    body = b'{"format":1,"fingerprint":"x","shard_digest":"","first_row":0,"num_rows":3}'
    (journals / "00000-00000.jsonl").write_bytes(b"%08x %s\n" % (zlib.crc32(body), body))
    job.part(0, 0).unlink()
    assert read_status(job.opened()).rows_in_journals == 0


def test_the_lock_tells_the_living_from_the_dead(job: Job) -> None:
    lock = report(job, "all")
    assert [each.state for each in read_runs(job.opened())] == ["died"]
    with held(lock, why=""):
        assert is_held(lock)
        found = read_status(job.opened())
        assert [each.state for each in found.runs] == ["running"]
        assert (found.tokens_per_s, found.drafter_version) == (40.0, 3)
        # 4 rows in 2 seconds, 5 to go.
        assert found.time_left_s == pytest.approx(2.5)
    assert not is_held(lock)
    assert [each.state for each in read_runs(job.opened())] == ["died"]


def test_a_killed_process_holds_no_lock(job: Job) -> None:
    lock = report(job, "all")
    program = (
        "import sys; from filelock import FileLock; "
        "lock = FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(lock)],
        stdin=subprocess.PIPE,  # closed when this ends, however that is
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert is_held(lock)
        process.kill()
        process.wait()
    assert not is_held(lock)
    assert read_runs(job.opened())[0].state == "died"


def test_looking_leaves_a_lock_free_for_a_run(tmp_path: Path) -> None:
    lock = tmp_path / "all.lock"
    assert not is_held(lock)
    assert not lock.exists()
    with held(lock, why=""):
        pass
    assert not is_held(lock)
    with held(lock, wait_s=0.0, why="status still holds it"):
        assert is_held(lock)


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("complete", "finished"),
        ("interrupted", "interrupted"),
        ("error_limit", "failed"),
        ("failed", "failed"),
        ("loading", "died"),
        ("stopping", "died"),
    ],
)
def test_states(job: Job, said: str, state: str) -> None:
    report(job, "all", state=said)
    assert [each.state for each in read_runs(job.opened())] == [state]


def test_a_run_elsewhere_whose_lock_is_not_seen_lives_while_it_reports(job: Job) -> None:
    report(job, "all", host="elsewhere")
    assert [each.state for each in read_runs(job.opened())] == ["running"]
    later = datetime.now(UTC) + timedelta(minutes=5)
    runs = read_runs(job.opened(), now=later)
    assert [each.state for each in runs] == ["died"]
    assert runs[0].age_s == pytest.approx(300, abs=30)


def test_an_array_is_seen_whole(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    (job.out / "_adaflash" / "runs" / "all.json").unlink()
    job.part(1, 1).unlink()
    first = report(job, "00000-of-00004", rows=3, rows_done=1, resumed_rows=0)
    report(job, "00002-of-00004", state="complete", tokens_per_s=9.0)
    third = report(job, "00003-of-00004", rows=3, rows_done=2, resumed_rows=0, elapsed_s=10.0)
    with held(first, why=""), held(third, why=""):
        found = read_status(job.opened())
        assert [each.state for each in found.runs] == ["running", "finished", "running"]
        assert found.idle_slices == [1]
        assert found.tokens_per_s == 80.0
        assert found.time_left_s == pytest.approx(5.0)
        _, out, _ = command(capfd, "status", job.out)
    assert "1 that no run is at work on: 1" in out
    assert "80.0 tokens/s, about 5s left" in out
    assert "4711" in out


def test_a_damaged_report_is_passed_over(job: Job) -> None:
    lock = report(job, "all")
    lock.with_suffix(".json").write_text('{"state": "deco')
    report(job, "00000-of-00002", updated="soon", rows=None, elapsed_s="x", tokens_per_s=None)
    runs = read_runs(job.opened())
    assert [(each.name, each.age_s, each.rows, each.rows_per_s) for each in runs] == [
        ("00000-of-00002", None, 0, None)
    ]
    assert read_status(job.opened()).exit_code == 0


def test_an_output_that_is_being_made_anew_is_shown(
    job: Job, finished: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh = copied(finished, job.folder / "new")
    change_job(fresh, lambda said: said)
    fresh.part(0, 0).unlink()
    fresh.out.rename(job.out / "_adaflash" / "fresh")
    found = read_status(job.opened())
    assert found.rows_committed == 11
    assert found.fresh is not None
    assert (found.fresh.rows_missing, found.exit_code) == (3, 75)
    code, out, _ = command(capfd, "status", job.out)
    assert code == 75
    assert "a new output is being made" in out
    assert "8 of 11 rows committed" in out


def test_other_filesystems_are_read_through_pyarrow(job: Job) -> None:
    elsewhere = fs.SubTreeFileSystem(str(job.folder), fs.LocalFileSystem())
    found = read_status(JobOutput("s3://bucket/out", elsewhere, "out"))
    assert (found.rows_committed, found.exit_code) == (11, 0)
    assert any("on this machine" in note for note in found.notes)
    assert read_status(JobOutput.open(job.out.as_uri())).rows_committed == 11


def test_a_directory_without_a_job_exits_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for each in ("status", "verify"):
        code, out, err = command(capfd, each, tmp_path)
        assert (code, out) == (2, "")
        assert "holds no job" in err
        assert "hint: name the directory" in err


def test_sizes_are_told_for_people() -> None:
    sizes = [0, 1023, 1536, 3 * 2**30, 2**50]
    assert [format_bytes(size) for size in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "3.0 GiB",
        "1024.0 TiB",
    ]
