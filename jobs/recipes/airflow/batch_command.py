"""Run adaflash-batch for a scheduler: its words to a log, its last line and exit code as data.

Knows nothing of Airflow, so that it can be tried without one; lies beside the DAG.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What a scheduler should do after a run."""

    DONE = "done"
    DONE_WITH_ROW_ERRORS = "done, but some rows carry errors"
    RUN_AGAIN = "did not come to its end; run it again"
    GIVE_UP = "running it again would change nothing"


def verdict(exit_code: int) -> Verdict:
    """Of an exit code: 75, what is unexpected and what was killed are worth another try."""
    known = {
        0: Verdict.DONE,
        3: Verdict.DONE_WITH_ROW_ERRORS,
        2: Verdict.GIVE_UP,
        4: Verdict.GIVE_UP,
        5: Verdict.GIVE_UP,
    }
    return known.get(exit_code, Verdict.RUN_AGAIN)


class BatchCommand:
    """A run of adaflash-batch, in a session of its own.

    Schedulers signal whole process groups. So it hears of a stop once, from `stop`; a second signal
    would make it stop at once.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False

    def run(self, log: Callable[[str], object]) -> tuple[int, dict[str, Any]]:
        """Hand every line of its stderr to `log`; its exit code and its last line as JSON.

        An exception from outside, like a task's time limit, stops it in order and is passed on.
        """
        with (
            tempfile.TemporaryFile("w+") as printed,
            subprocess.Popen(
                self._command,
                stdout=printed,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            ) as process,
        ):
            self._process = process
            try:
                self._hand_over(process, log)
            except BaseException:
                self.stop()
                self._hand_over(process, log)
                raise
            printed.seek(0)
            return process.returncode, _as_json(printed.read().strip().rpartition("\n")[2])

    def stop(self) -> None:
        """Ask it to stop in order, once however often this is called."""
        if self._process is not None and not self._is_stopping:
            self._is_stopping = True
            self._process.terminate()

    def _hand_over(self, process: subprocess.Popen[str], log: Callable[[str], object]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log(line.rstrip("\n"))
        process.wait()


def _as_json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
