"""jobs/run_series.py: a directory for each run, and one exit code for all."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import run_series
from hypothesis import given
from hypothesis import strategies as st
from run_series import first_to_attend, plan
from scheduled import ROOT, Stage

SERIES = [sys.executable, str(ROOT / "jobs" / "run_series.py"), "job.toml", "--out", "out"]
TWO = ["--over", "sampling.temperature=0", "--over", "sampling.temperature=0.7"]


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "out" / "series.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_combination_has_a_directory_of_its_own() -> None:
    over = ["sampling.temperature=0", "model.name=a/b", "sampling.temperature=1", "model.name=c"]
    runs = plan(over, [Path("prompts/mon"), Path("prompts/tue")])
    assert len({run.name for run in runs}) == len(runs) == 8
    assert runs[0].name == "mon,temperature=0,name=a-b"
    assert runs[0].arguments == ("prompts/mon", "--set", over[0], "--set", over[1])


@pytest.mark.parametrize("over", [["temperature"], ["model.name=a/b", "model.name=a-b"]])
def test_what_cannot_be_told_apart_is_refused(over: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--over|same directory"):
        plan(over, [])


def test_a_sweep_passes_its_flags_on_and_keeps_a_line_for_every_run(tmp_path: Path) -> None:
    stage = Stage.build(tmp_path, codes={"temperature=0.7": 3}, status="nothing_to_do")
    kept = tmp_path / "out" / "temperature=0" / "_adaflash" / "summary.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"rows": 9, "tokens_per_s": 12.5}', encoding="utf-8")
    done = stage.run([*SERIES, *TWO, "--", "--grace", "60"])
    assert done.returncode == 3
    wanted = ["run", "--set", "sampling.temperature=0.7", "--config", "job.toml"]
    assert stage.calls()[1] == [*wanted, "--out", "out/temperature=0.7", "--grace", "60"]
    found = [(line["name"], line["exit_code"], line["summary"]["rows"]) for line in lines(tmp_path)]
    assert found == [("temperature=0", 0, 9), ("temperature=0.7", 3, 3)]
    last = {"status": "complete", "exit_code": 3, "runs": 2, "output": "out"}
    assert json.loads(done.stdout) == last
    assert "12.5" in done.stderr


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 75, 137])))
def test_the_exit_code_is_of_the_run_that_needs_attention_first(codes: list[int]) -> None:
    code = first_to_attend(codes)
    assert code in codes or (code == 1 and 137 in codes) or not codes
    assert (code == 75) == (75 in codes)
    assert (code == 0) == (set(codes) <= {0})
    assert first_to_attend([*codes, code]) == code


def test_one_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    stage = Stage.build(tmp_path, codes={"temperature=0.7": 0, "temperature=0": 137})
    done = stage.run([*SERIES, *TWO])
    assert done.returncode == 1
    assert [line["exit_code"] for line in lines(tmp_path)] == [137, 0]


@pytest.mark.parametrize(
    ("number", "group"),
    [
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGUSR1, False),
        (signal.SIGINT, True),
    ],
)
def test_a_signal_stops_the_run_under_way_once_and_begins_no_other(
    tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    stage = Stage.build(tmp_path, waits=True)
    stopped = stage.run_signalled([*SERIES, *TWO], number, group=group)
    assert stopped.code == 75
    assert stage.signals() == [number.name]
    assert stage.is_session_leader()
    assert len(stage.calls()) == 1
    assert [line["exit_code"] for line in lines(tmp_path)] == [75, 75]
    assert json.loads(stopped.out)["status"] == "interrupted"


def test_the_newest_folders_that_hold_prompts_are_run(tmp_path: Path) -> None:
    for name in ("1", "2", "3", ".4", "5"):
        (tmp_path / "prompts" / name).mkdir(parents=True)
        if name != "5":
            (tmp_path / "prompts" / name / "a.parquet").touch()
    found = run_series.folders_of_prompts(tmp_path / "prompts", 2)
    assert [path.name for path in found] == ["2", "3"]


def test_no_folder_yet_is_nothing_to_do(tmp_path: Path) -> None:
    stage = Stage.build(tmp_path)
    (tmp_path / "prompts").mkdir()
    done = stage.run([*SERIES, "--each-folder", "prompts"])
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "nothing_to_do"
    assert stage.calls() == []


@pytest.mark.parametrize("more", [[], ["--each-folder", "no/such"], ["--over", "temperature"]])
def test_usage_that_makes_no_sense_exits_2(tmp_path: Path, more: list[str]) -> None:
    assert Stage.build(tmp_path).run([*SERIES, *more]).returncode == 2
