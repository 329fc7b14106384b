"""Real processes that are told to stop, that meet on one output, or that share a job out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from folders import parts, read_rows, tiny_model_folder, write_rows

from adaflash_batch.shards.journal import read_journal

COMMAND = Path(sys.executable).with_name("adaflash-batch")
NUM_ROWS = 400
# Decodes for minutes, so that only a signal ends it.
ENDLESS = ("--max-new-tokens", "90000", "--ignore-eos", "--kv-memory", "64MiB")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of a long context and prompts."""
    folder = tmp_path_factory.mktemp("place")
    tiny_model_folder(folder / "model", max_position_embeddings=100_000)
    write_rows(folder / "in.parquet", [f"row {n} " + "la" * (n % 7) for n in range(NUM_ROWS)])
    write_rows(folder / "few.parquet", ["one", "two", "three"])
    return folder


def command(place: Path, name: str, *arguments: str, source: str = "in.parquet") -> list[str]:
    usual = (
        "--model",
        "model",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--no-chat-template",
        "--no-lookup",
    )
    given = ("--max-new-tokens", "24", "--temperature", "1", "--concurrency", "8")
    return [str(COMMAND), "run", source, "--out", name, *usual, *given, *arguments]


@contextmanager
def started(
    place: Path, name: str, *arguments: str, env: Mapping[str, str] = os.environ, **named: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(place, name, *arguments, **named),
        cwd=place,
        env=dict(env) | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, the last line on stdout, and stderr."""
    out, err = process.communicate(timeout=100)
    assert "Traceback" not in err, err
    last: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert last["exit_code"] == process.returncode, err
    return process.returncode, last, err


def until(process: subprocess.Popen[str], holds: Any) -> None:
    """Wait until something holds of what a process leaves on disk."""
    while not holds():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def report_of(place: Path, name: str, run: str = "all") -> dict[str, Any]:
    path = place / name / "_adaflash" / "runs" / f"{run}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def num_journaled(place: Path, name: str) -> int:
    paths = (place / name / "_adaflash" / "journal").glob("0*.jsonl")
    return sum(len(read_journal(path).rows) for path in paths)


@pytest.fixture(scope="module")
def whole(place: Path) -> list[dict[str, Any]]:
    """The rows of a run that nobody stopped."""
    with started(place, "whole") as process:
        code, last, err = ended(process)
    assert (code, last["status"]) == (0, "complete"), err
    return read_rows(place / "whole")


def test_a_signal_finishes_what_is_decoded_and_the_next_run_the_rest(
    place: Path, whole: list[dict[str, Any]]
) -> None:
    kept = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        with started(place, "told") as process:
            until(process, lambda kept=kept: num_journaled(place, "told") >= kept + 20)
            process.send_signal(number)
            code, last, err = ended(process)
        assert (code, last["status"]) == (75, "interrupted")
        assert f"stopping after {number.name}" in err
        assert last["resumed_rows"] == kept
        assert last["open_rows"] == num_journaled(place, "told")
        assert parts(place / "told") == []
        assert kept + 20 <= num_journaled(place, "told") < NUM_ROWS
        kept = num_journaled(place, "told")
        report = report_of(place, "told")
        assert (report["state"], report["exit_code"]) == ("interrupted", 75)
        assert report["rows_done"] == kept
    with started(place, "told") as process:
        code, last, _ = ended(process)
    assert (code, last["status"], last["resumed_rows"]) == (0, "complete", kept)
    assert read_rows(place / "told") == whole
    assert report_of(place, "told")["state"] == "complete"


def test_the_grace_period_ends_what_does_not_finish(place: Path) -> None:
    with started(place, "grace", *ENDLESS, "--grace", "1", source="few.parquet") as process:
        until(process, lambda: report_of(place, "grace").get("output_tokens", 0) > 0)
        process.terminate()
        code, last, err = ended(process)
    assert (code, last["status"], last["missing_rows"]) == (75, "interrupted", 3), err


def test_a_second_signal_stops_at_once(place: Path) -> None:
    with started(place, "twice", *ENDLESS, "--grace", "3600", source="few.parquet") as process:
        until(process, lambda: report_of(place, "twice").get("output_tokens", 0) > 0)
        process.terminate()
        until(process, lambda: report_of(place, "twice").get("state") == "stopping")
        process.terminate()
        code, last, err = ended(process)
    assert (code, last["status"]) == (75, "interrupted")
    assert "error: interrupted\nhint: run the same command again to go on" in err
    assert report_of(place, "twice")["state"] == "interrupted"


def test_a_signal_while_it_loads_stops_at_once(place: Path) -> None:
    with started(place, "early") as process:
        until(process, lambda: report_of(place, "early").get("state") == "loading")
        process.terminate()
        code, last, _ = ended(process)
    assert code == 75
    # It had begun to decode if the machine was that fast.
    assert last["status"] == "interrupted"


def test_of_two_runs_on_one_output_one_works_and_the_other_names_it(
    place: Path, whole: list[dict[str, Any]]
) -> None:
    with started(place, "both") as first, started(place, "both") as second:
        results = {process.pid: ended(process) for process in (first, second)}
    (worked,) = [pid for pid, (code, _, _) in results.items() if code == 0]
    (waited,) = [result for result in results.values() if result[0] == 75]
    assert waited[1]["status"] == "locked"
    assert f"another run is at work on both: process {worked} on " in waited[2]
    assert read_rows(place / "both") == whole


def test_a_lock_of_a_dead_run_is_taken_over(place: Path, whole: list[dict[str, Any]]) -> None:
    with started(place, "dead") as process:
        until(process, lambda: num_journaled(place, "dead") > 0)
        process.kill()
        process.communicate()
    assert (place / "dead" / "_adaflash" / "runs" / "all.lock").exists()
    assert report_of(place, "dead")["state"] in ("loading", "decoding")
    with started(place, "dead") as process:
        code, _, err = ended(process)
    assert code == 0, err
    assert read_rows(place / "dead") == whole


def test_an_array_shares_one_output(place: Path, whole: list[dict[str, Any]]) -> None:
    shared = ("--chunk-rows", "40", "--num-shards", "3", "--shards-from", "slurm")
    environments = [dict(os.environ) | {"SLURM_ARRAY_TASK_ID": str(index)} for index in range(3)]
    with (
        started(place, "array", *shared, env=environments[0]) as first,
        started(place, "array", *shared, env=environments[1]) as second,
        started(place, "array", *shared, env=environments[2]) as third,
    ):
        results = [ended(process) for process in (first, second, third)]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert [last["rows"] for _, last, _ in results] == [120, 120, 160]
    assert read_rows(place / "array") == whole
    with started(place, "array", "--chunk-rows", "40") as process:
        code, last, _ = ended(process)
    assert (code, last["status"], last["rows"]) == (0, "nothing_to_do", NUM_ROWS)
