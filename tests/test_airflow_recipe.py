"""The Airflow recipe, with a stand-in for the few names of Airflow that it uses."""

from __future__ import annotations

import logging
import runpy
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar

import pytest
from batch_command import BatchCommand, Verdict, verdict
from scheduled import RECIPES, Stage

DAG_FILE = RECIPES / "airflow" / "adaflash_nightly.py"


class AirflowException(Exception):
    """Airflow tries again."""


class AirflowFailException(AirflowException):
    """Airflow does not."""


class BaseOperator:
    """Remembers what each is made with."""

    made: ClassVar[list[dict[str, Any]]] = []
    log = logging.getLogger("task")

    def __init__(self, **kwargs: Any) -> None:
        self.made.append(kwargs)


class DAG:
    """The same, and a context manager."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **kwargs: Any) -> None:
        self.made.append(kwargs)

    def __enter__(self) -> DAG:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def dag_file(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the DAG file defines when Airflow runs it."""
    sdk, exceptions = ModuleType("airflow.sdk"), ModuleType("airflow.sdk.exceptions")
    vars(sdk).update(DAG=DAG, BaseOperator=BaseOperator)
    vars(exceptions).update(
        AirflowException=AirflowException, AirflowFailException=AirflowFailException
    )
    for module in (ModuleType("airflow"), sdk, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return runpy.run_path(str(DAG_FILE))


@pytest.fixture
def operator(dag_file: dict[str, Any]) -> Any:
    """The operator's class in it."""
    return dag_file["AdaflashBatchOperator"]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage.build(tmp_path)
    monkeypatch.setenv("PATH", stage.environment()["PATH"])
    return stage


def test_each_night_has_folders_of_its_own_and_one_run_at_a_time(operator: Any) -> None:
    dag, task = DAG.made[-1], BaseOperator.made[-1]
    assert dag["catchup"] is False
    assert dag["max_active_runs"] == 1
    assert task["retries"] > 0
    assert operator.template_fields == ("arguments",)


def test_the_dag_gives_the_runner_a_job(dag_file: dict[str, Any]) -> None:
    words = dag_file["complete"].arguments
    assert words[0] == "run"
    assert sum("{{ ds }}" in word for word in words) == 2
    flags = dict(word.split("=") for word in words[2:])
    assert (RECIPES.parent / Path(flags["--config"]).name).is_file()
    assert int(flags["--grace"]) > 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, Verdict.DONE),
        (1, Verdict.RUN_AGAIN),
        (2, Verdict.GIVE_UP),
        (3, Verdict.DONE_WITH_ROW_ERRORS),
        (4, Verdict.GIVE_UP),
        (5, Verdict.GIVE_UP),
        (75, Verdict.RUN_AGAIN),
        (-9, Verdict.RUN_AGAIN),
    ],
)
def test_every_exit_code_has_a_verdict(code: int, expected: Verdict) -> None:
    assert verdict(code) is expected


def test_a_task_logs_what_is_said_and_returns_the_last_line(
    stage: Stage, operator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    task = operator(arguments=["run", "prompts"], task_id="complete")
    assert task.execute({}) == {"status": "complete", "exit_code": 0, "rows": 3}
    assert stage.calls() == [["run", "prompts"]]
    assert "words to stderr" in caplog.text


def test_errors_in_rows_are_a_warning(
    tmp_path: Path, stage: Stage, operator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Stage.build(tmp_path, 3)
    assert operator(arguments=["run"]).execute({})["exit_code"] == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("code", [1, 2, 4, 5, 75, 137])
def test_airflow_tries_again_what_can_succeed_and_nothing_else(
    tmp_path: Path, stage: Stage, operator: Any, code: int
) -> None:
    Stage.build(tmp_path, code)
    with pytest.raises(AirflowException) as caught:
        operator(arguments=["run"]).execute({})
    assert isinstance(caught.value, AirflowFailException) == (code in (2, 4, 5))


def test_a_task_that_is_killed_stops_the_run_once(
    tmp_path: Path, stage: Stage, operator: Any
) -> None:
    Stage.build(tmp_path, waits=True)
    task = operator(arguments=["run"])

    def kill() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        task.on_kill()
        # Not before the first is heard: two at once would look like one.
        while not stage.signals():
            time.sleep(0.01)
        task.on_kill()

    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(AirflowException, match="75"):
        task.execute({})
    killer.join()
    assert stage.signals() == ["SIGTERM"]


def test_a_time_limit_stops_the_run_in_order_and_is_passed_on(tmp_path: Path) -> None:
    stage = Stage.build(tmp_path, waits=True)
    heard: list[str] = []

    def log(line: str) -> None:
        heard.append(line)
        if len(heard) == 1:
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        BatchCommand([str(tmp_path / "adaflash-batch"), "run"]).run(log)
    assert stage.signals() == [signal.SIGTERM.name]
