"""Runs of a job as they report themselves, and whether they live."""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.shards.run_folder import read_report

RunState = Literal["running", "finished", "interrupted", "failed", "died"]

# Runs report every few seconds. One whose lock cannot be seen from here counts as alive this long.
_SILENCE_S = 60.0
_AT_WORK = ("loading", "decoding", "stopping")
_ENDED: dict[str, RunState] = {"complete": "finished", "interrupted": "interrupted"}


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the job, or of a slice of it.

    Attributes:
        name: `all`, or `00002-of-00008`.
        state: `running`; `finished` to its end; `interrupted` or `failed` (the error limit, too) as
            it says itself; or `died`: it says that it is at work, and nobody holds its lock.
        said: the state that it reports: loading, decoding, stopping, complete, interrupted, ...
        message: why it ended, where it says.
        age_s: seconds since its last report.
        rows, rows_done, resumed_rows: of its slice; what earlier runs had done is in rows_done.
        rows_per_s: since it began to decode, None before.
    """

    name: str
    state: RunState
    said: str
    host: str | None
    pid: int | None
    began: str | None
    age_s: float | None
    rows: int
    rows_done: int
    resumed_rows: int
    tokens_per_s: float | None
    rows_per_s: float | None
    drafter_version: int | None
    exit_code: int | None
    message: str | None

    @property
    def time_left_s(self) -> float | None:
        """Seconds until its slice is done at its speed, None where that is not known."""
        if self.state != "running" or not self.rows_per_s:
            return None
        return max(self.rows - self.rows_done, 0) / self.rows_per_s


def read_runs(job: JobOutput, now: datetime | None = None) -> list[Run]:
    """All runs that left a report where it is seen from here, by name."""
    now = datetime.now(UTC) if now is None else now
    runs = []
    for path in sorted(job.runs.glob("[!.]*.json")):
        said = read_report(path)
        if said is not None:
            runs.append(_run(path.stem, said, path.with_suffix(".lock"), now))
    return runs


def is_held(lock: Path) -> bool:
    """Whether a living process holds a lock file.

    It is asked for shared, without waiting, and let go at once: two that look do not get into each
    other's way, and a run that begins in that moment waits a little longer than it takes. A file
    that cannot be opened is held by nobody: whoever holds a lock has made its file before.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a filesystem without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _run(name: str, said: dict[str, Any], lock: Path, now: datetime) -> Run:
    state, host = str(said.get("state")), said.get("host")
    age_s = _age(said.get("updated"), now)
    rows_done, resumed = _count(said.get("rows_done")), _count(said.get("resumed_rows"))
    elapsed = said.get("elapsed_s")
    speed = (rows_done - resumed) / elapsed if isinstance(elapsed, int | float) and elapsed else 0.0
    return Run(
        name=name,
        state=_state(state, _lives(lock, host, age_s)),
        said=state,
        host=host,
        pid=said.get("pid"),
        began=said.get("began"),
        age_s=age_s,
        rows=_count(said.get("rows")),
        rows_done=rows_done,
        resumed_rows=resumed,
        tokens_per_s=said.get("tokens_per_s"),
        rows_per_s=speed if speed > 0 else None,
        drafter_version=said.get("drafter_version"),
        exit_code=said.get("exit_code"),
        message=said.get("message"),
    )


def _lives(lock: Path, host: object, age_s: float | None) -> bool:
    if is_held(lock):
        return True
    # A network filesystem may keep locks to the machine that took them.
    is_elsewhere = host != socket.gethostname()
    return is_elsewhere and age_s is not None and age_s < _SILENCE_S


def _state(said: str, lives: bool) -> RunState:
    if said in _AT_WORK:
        return "running" if lives else "died"
    return _ENDED.get(said, "failed")


def _age(updated: object, now: datetime) -> float | None:
    try:
        then = datetime.fromisoformat(str(updated))
    except ValueError:
        return None
    then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
    return max((now - then).total_seconds(), 0.0)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
