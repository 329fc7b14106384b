"""Engines in processes of their own that take turns: only one of them runs at a time.

Between its turns a whole process group is stopped, since some engines wait in a busy loop.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

_HERE = Path(__file__).parent
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAST_WORDS = 2000  # characters of a dead engine's log that are looked at


class EngineDied(Exception):
    """An engine ended or answered with an error; the message says how."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a turn took of the machine.

    Attributes:
        cores: of the engine, on average.
        others: cores that anything else kept busy meanwhile; other virtual machines count.
    """

    cores: float
    others: float


class Worker:
    """An engine's process, stopped but for its turns.

    Attributes:
        startup_s: until it could answer.
        log: what it printed.
    """

    def __init__(
        self, name: str, python: str, arguments: Sequence[str], log: Path | None = None
    ) -> None:
        self.name, self.log = name, log
        command = [python, str(_HERE / "engines.py"), name, *arguments]
        began = time.perf_counter()
        with open(os.devnull if log is None else log, "w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._read()
        self.startup_s = time.perf_counter() - began
        self._signal(signal.SIGSTOP)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command, wait for the answer."""
        self._signal(signal.SIGCONT)
        stdin = cast(IO[str], self._process.stdin)
        with suppress(BrokenPipeError):  # what became of it is read
            stdin.write(json.dumps(command) + "\n")
            stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def measure(self, command: dict[str, Any]) -> tuple[dict[str, Any], Use]:
        """`ask`, and what the turn took of the machine."""
        before, busy, began = self._cpu_s(), busy_s(), time.perf_counter()
        answer = self.ask(command)
        seconds = time.perf_counter() - began
        own, all_s = self._cpu_s() - before, busy_s() - busy
        return answer, Use(own / seconds, max(all_s - own, 0.0) / seconds)

    @property
    def peak_bytes(self) -> int:
        """Most memory that its processes held so far, what they share with others included."""
        return sum(_peak_bytes(pid) for pid in _group(self._process.pid))

    def end(self) -> None:
        """End it and what it started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _cpu_s(self) -> float:
        return sum(_cpu_s(pid) for pid in _group(self._process.pid))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended: reading says so
            os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            code = self._process.wait()
            raise EngineDied(f"ended with exit code {code}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineDied(answer["error"])
        return answer

    def _last_words(self) -> str:
        if self.log is None:
            return "it has no log"
        words = self.log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
        return next((line for line in reversed(words.splitlines()) if line.strip()), "no message")


def die_with_parent() -> None:
    """For a child that was just begun: a stopped process would outlive everybody."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def busy_s() -> float:
    """Seconds that all cores together were not idle, as far as this machine knows."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    ticks = [int(each) for each in first[1:9]]  # user nice system idle iowait irq softirq steal
    return (sum(ticks) - ticks[3] - ticks[4]) * _TICK_S


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name, from the state on; none if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _group(leader: int) -> list[int]:
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in numbers if (fields := _stat(pid)) and int(fields[2]) == leader]


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
