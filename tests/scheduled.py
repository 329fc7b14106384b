"""What the tests of jobs/ share: stand-ins for commands, and a script that is signalled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "jobs" / "recipes"

# Keeps its arguments and the signals that it gets, and exits 75 on one, as the real one does. The
# code may depend on a word among the arguments.
_RUNNER = """#!{python}
import json, os, signal, sys
from pathlib import Path

folder = Path("{folder}")
said = json.loads((folder / "said").read_text())
awaited = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
with open(folder / "calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
print("words to stderr", file=sys.stderr, flush=True)
words = " ".join(sys.argv)
code = next((code for word, code in said["codes"].items() if word in words), said["code"])
if said["waits"]:
    (folder / "ready").touch()
    with open(folder / "signals", "a") as signals:
        # After the first there is time for a second one, which must not come.
        for seconds in (30, 0.3):
            if heard := signal.sigtimedwait(awaited, seconds):
                print(signal.Signals(heard.si_signo).name, file=signals, flush=True)
    code = 75
    (folder / "ended").write_text("in its own session" if os.getsid(0) == os.getpid() else "")
print(json.dumps({{"status": said["status"], "exit_code": code, "rows": 3}}), flush=True)
if code > 128:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
    os.kill(os.getpid(), code - 128)
sys.exit(code)
"""
_SCONTROL = """#!/bin/sh
echo "$@" >>{folder}/scontrol-calls
"""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A script that was signalled: how it ended, and whether the runner had ended before it."""

    code: int
    out: str
    had_ended: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """A directory with stand-ins for `adaflash-batch` and Slurm's `scontrol`.

    Attributes:
        folder: where scripts are run.
        variables: further ones of their environment.
    """

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        folder: Path,
        code: int = 0,
        *,
        codes: Mapping[str, int] | None = None,
        waits: bool = False,
        status: str = "complete",
        variables: Mapping[str, str] | None = None,
    ) -> Stage:
        """A runner that exits with `code`, or by words in its arguments, or waits for a signal."""
        said = {"code": code, "codes": dict(codes or {}), "waits": waits, "status": status}
        (folder / "said").write_text(json.dumps(said), encoding="utf-8")
        stage = cls(folder, variables or {})
        stage.add("adaflash-batch", _RUNNER.format(python=sys.executable, folder=folder))
        stage.add("scontrol", _SCONTROL.format(folder=folder))
        return stage

    def add(self, name: str, script: str) -> None:
        """Put another command on the PATH."""
        path = self.folder / name
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        """The environment in which the stand-ins are found first."""
        found = [str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {**os.environ, "PATH": os.pathsep.join(found), **self.variables}

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        return subprocess.run(
            command,
            env=self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def run_signalled(
        self, command: Sequence[str], number: signal.Signals, *, group: bool = False
    ) -> Stopped:
        """Run it, and signal it alone, or its whole process group, once the runner waits."""
        with subprocess.Popen(
            command,
            env=self.environment(),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            self._wait_for("ready", process)
            if group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            code = process.wait(timeout=60)
            had_ended = (self.folder / "ended").exists()
            return Stopped(code, process.communicate()[0], had_ended)

    def _wait_for(self, name: str, process: subprocess.Popen[str]) -> None:
        """Wait until a file is there, as long as the process lives."""
        while not (self.folder / name).exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)

    def calls(self) -> list[list[str]]:
        """The arguments of every call of the runner."""
        return [json.loads(line) for line in self._lines("calls")]

    def signals(self) -> list[str]:
        """The signals that the runner got."""
        return self._lines("signals")

    def is_session_leader(self) -> bool:
        """Whether the runner that was signalled had a session of its own."""
        return bool((self.folder / "ended").read_text("utf-8"))

    def requeued(self) -> list[str]:
        """The arguments of every call of `scontrol`."""
        return self._lines("scontrol-calls")

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text("utf-8").splitlines() if path.exists() else []
