"""The shell recipes do what they say, with stand-ins for the runner and for Slurm."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from scheduled import RECIPES, Stage

ARRAY = str(RECIPES / "slurm" / "array.sbatch")
POD = str(RECIPES / "kubernetes" / "run-in-pod.sh")
CRON = str(RECIPES / "cron" / "cron-run.sh")
TASK = {
    "SLURM_JOB_ID": "907",
    "SLURM_ARRAY_JOB_ID": "907",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "8",
}


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 4), (5, 5), (75, 75), (137, 137)]
)
def test_a_slurm_task_and_a_pod_pass_the_code_on_but_for_errors_in_rows(
    tmp_path: Path, code: int, expected: int
) -> None:
    stage = Stage.build(tmp_path, code, variables=TASK)
    slurm = stage.run([ARRAY, "--config", "a job.toml"])
    assert slurm.returncode == expected
    assert stage.run([POD, "adaflash-batch", "run"]).returncode == expected
    own = ["--shards-from", "slurm", "--num-shards", "8", "--grace", "90"]
    assert stage.calls() == [["run", "--config", "a job.toml", *own], ["run"]]
    assert stage.requeued() == (["requeue 907_3"] if code == 75 else [])


def test_a_slurm_task_hands_the_early_signal_on_once_and_goes_back_into_the_queue(
    tmp_path: Path,
) -> None:
    stage = Stage.build(tmp_path, waits=True, variables=TASK)
    stopped = stage.run_signalled([ARRAY], signal.SIGUSR1)
    assert stopped.code == 75
    assert stopped.had_ended
    assert stage.signals() == ["SIGUSR1"]
    assert stage.requeued() == ["requeue 907_3"]


def test_a_slurm_task_that_is_cancelled_does_not_come_back(tmp_path: Path) -> None:
    stage = Stage.build(tmp_path, waits=True, variables=TASK)
    stopped = stage.run_signalled([ARRAY], signal.SIGTERM, group=True)
    assert stopped.code == 75
    assert stopped.had_ended
    assert stage.signals() == ["SIGTERM"]
    assert stage.requeued() == []


def test_a_runner_that_the_signal_kills_before_it_listens_is_requeued(tmp_path: Path) -> None:
    stage = Stage.build(tmp_path, variables=TASK)
    stage.add("adaflash-batch", f"#!/bin/sh\ntouch {tmp_path}/ready\nexec sleep 60\n")
    assert stage.run_signalled([ARRAY], signal.SIGUSR1).code == 75
    assert stage.requeued() == ["requeue 907_3"]


def test_a_slurm_task_is_not_requeued_for_ever(tmp_path: Path) -> None:
    counts = {"SLURM_RESTART_COUNT": "4", "MAX_RESTARTS": "4"}
    stage = Stage.build(tmp_path, 75, variables={**TASK, **counts})
    done = stage.run([ARRAY])
    assert done.returncode == 75
    assert stage.requeued() == []
    assert "4 times" in done.stderr


def test_the_first_process_of_a_pod_hands_the_signal_on_once(tmp_path: Path) -> None:
    stage = Stage.build(tmp_path, waits=True)
    stopped = stage.run_signalled([POD, "adaflash-batch", "run"], signal.SIGTERM)
    assert stopped.code == 75
    assert stopped.had_ended
    assert stage.signals() == ["SIGTERM"]


@pytest.mark.parametrize("code", [0, 75])
def test_cron_hears_nothing_of_a_run_that_needs_nobody(tmp_path: Path, code: int) -> None:
    stage = Stage.build(tmp_path, code)
    done = stage.run([CRON, "logs/nightly.log", "adaflash-batch", "run", "two words"])
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert stage.calls() == [["run", "two words"]]
    log = (tmp_path / "logs" / "nightly.log").read_text("utf-8")
    assert "words to stderr" in log
    assert '"rows": 3' in log


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 137])
def test_cron_mails_what_somebody_should_read(tmp_path: Path, code: int) -> None:
    stage = Stage.build(tmp_path, code)
    done = stage.run([CRON, "nightly.log", "adaflash-batch", "run"])
    assert done.returncode == code
    assert '"rows": 3' in done.stdout
    assert ("words to stderr" in done.stdout) == (code != 3)
