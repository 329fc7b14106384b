"""Who is at work on an output: a lock and a report for each run, in `_adaflash/runs/`.

runs/all.lock, runs/00002-of-00008.lock   held while that run lives, by the system
runs/all.json, ...                        what it says of itself, replaced whole now and then
runs/lock                                 held for a moment by whoever comes
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adaflash_batch.durable import held
from adaflash_batch.errors import AdaflashError, ConfigError, LockedError
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.portion import Portion, one_of, read_name

RUNS = "runs"
REPORT_EVERY_S = 5.0
# All tasks of an array may come at once, and each reads what is there. Others may hold a run's lock
# for a moment to see whether it lives.
_DOOR_WAIT_S, _LOCK_WAIT_S = 600.0, 2.0


class RunReport:
    """What a run says of itself, for `status`; texts and rows never depend on it.

    Args:
        path: of the file.
        fields: that stay as they are.
    """

    def __init__(self, path: Path, fields: dict[str, object]) -> None:
        self._path = path
        self._fields = fields
        self._written = -REPORT_EVERY_S

    def tell(self, *, now: bool = False, **fields: object) -> None:
        """Take what has changed; it is written every few seconds, or at once if asked for."""
        self._fields |= fields
        clock = time.monotonic()
        if not now and clock - self._written < REPORT_EVERY_S:
            return
        self._written = clock
        self._fields["updated"] = utc_now()
        scratch = self._path.with_name(f".{self._path.name}.partial")
        # A full disk ends a job where its rows are written, not here.
        with suppress(OSError):
            scratch.write_text(json.dumps(self._fields) + "\n", "utf-8")
            scratch.replace(self._path)


class RunFolder:
    """The runs of one output.

    Args:
        folder: a local one; made if it is not there.
        output: how a person names the output, for messages.
    """

    def __init__(self, folder: Path, output: str) -> None:
        self._folder, self._output = folder, output
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {folder}: {error.strerror}",
                "name a folder that can be written to, with --out or --scratch",
            ) from error

    @contextmanager
    def door(self) -> Iterator[None]:
        """Whoever comes to the output comes alone; LockedError after ten minutes."""
        why = f"another process is coming to {self._output} and does not get in"
        with held(self._folder / "lock", wait_s=_DOOR_WAIT_S, why=why):
            yield

    @contextmanager
    def joined(self, portion: Portion, infos: Sequence[ShardInfo]) -> Iterator[RunReport]:
        """Be the run of a portion. Begin it within `door()`.

        Raises LockedError if a living run does some of the same chunks.
        """
        for name in self.living():
            found = read_name(name)
            # What cannot be told apart is taken for the same.
            if found is None or portion.overlaps(one_of(infos, portion.chunk_rows, *found)):
                raise self._locked(name)
        why = self._locked(portion.name).message
        with held(self._lock(portion.name), wait_s=_LOCK_WAIT_S, why=why):
            report = RunReport(self._folder / f"{portion.name}.json", _introduction(portion))
            report.tell(now=True)
            try:
                yield report
            except BaseException as error:
                report.tell(now=True, **_failure(error))
                raise

    def living(self) -> list[str]:
        """Names of the portions that are being run; call it within `door()`."""
        return [path.stem for path in sorted(self._folder.glob("*.lock")) if _is_held(path)]

    def _lock(self, name: str) -> Path:
        return self._folder / f"{name}.lock"

    def _locked(self, name: str) -> LockedError:
        what = "another run" if name == "all" else f"the run of shard {name}"
        told = read_report(self._folder / f"{name}.json")
        who = ""
        if told is not None:
            who = f": process {told.get('pid')} on {told.get('host')}, since {told.get('began')}"
        return LockedError(
            f"{what} is at work on {self._output}{who}",
            "run the same command again when it has ended",
        )


def read_report(path: Path) -> dict[str, Any] | None:
    """What a run said of itself last; None if there is nothing whole."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def utc_now() -> str:
    """The time, as reports have it: ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _introduction(portion: Portion) -> dict[str, object]:
    return {
        "name": portion.name,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "began": utc_now(),
        "state": "loading",
        "exit_code": None,
        "message": None,
        "rows": portion.num_rows,
    }


def _failure(error: BaseException) -> dict[str, object]:
    if isinstance(error, KeyboardInterrupt):
        return {"state": "interrupted", "exit_code": 75, "message": str(error)}
    code = error.exit_code if isinstance(error, AdaflashError) else 1
    return {"state": "failed", "exit_code": code, "message": str(error)}


def _is_held(path: Path) -> bool:
    try:
        with held(path, why=""):
            return False
    except LockedError:
        return True
