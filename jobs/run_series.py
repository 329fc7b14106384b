"""Run one job file several times, each time into a directory of its own.

    # An evaluation sweep: every combination of the values
    python jobs/run_series.py jobs/evaluation.toml --out out/evaluation \\
        --over sampling.temperature=0 --over sampling.temperature=0.7 -- --grace 60
    # Every night's folder of prompts; those that are done cost a look
    python jobs/run_series.py jobs/nightly.toml --out completions --each-folder prompts

What follows `--` goes to every `adaflash-batch run`. What is done is not done again: `run` itself
sees to that. DIR/series.jsonl has a line for every run, the last line on stdout sums up in JSON.
A signal is handed on to the run under way, and no other one begins.

Exit code: that of the run that needs attention first. 75 (interrupted: run again) comes before 1,
2, 5, 4, then 3 (some rows carry errors), then 0. Anything else counts as 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

INTERRUPTED = 75
_ATTENTION = (INTERRUPTED, 1, 2, 5, 4, 3, 0)
_STATUS = {0: "complete", 3: "complete", 4: "error_limit", INTERRUPTED: "interrupted"}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the series: what its directory is called, and what sets it apart."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: its exit code, and the last line that it printed, empty if that is not JSON."""

    run: Run
    exit_code: int
    last_line: dict[str, Any]


class Child:
    """The run under way, to which signals are handed on."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._is_handed_on = False
        self._process: subprocess.Popen[str] | None = None
        for number in _SIGNALS:
            signal.signal(number, self._hand_on)

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Its exit code and what it printed; stderr is ours."""
        # In a session of its own, it hears of a Ctrl-C once, from us: twice would mean at once.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            self._process = process
            # It may have come before the line above.
            if self.signal is not None and not self._is_handed_on:
                process.send_signal(self.signal)
            printed = process.communicate()[0]
        self._process = None
        return process.returncode, printed

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        if self._process is not None:
            self._is_handed_on = True
            self._process.send_signal(number)


def plan(over: Iterable[str], folders: Sequence[Path]) -> list[Run]:
    """Every combination of a folder and of a value for each key.

    Args:
        over: `section.key=value`; the values of one key are tried in turn.
        folders: of prompts; empty where the job file names them.

    Raises:
        ValueError: a pair is malformed, or two runs would share a directory.
    """
    axes = [[Run(folder.name, (str(folder),)) for folder in folders]] if folders else []
    by_key: dict[str, list[Run]] = {}
    for pair in over:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--over {pair} is not SECTION.KEY=VALUE")
        name = f"{key.rpartition('.')[2]}={re.sub(r'[^A-Za-z0-9._-]+', '-', value)}"
        by_key.setdefault(key, []).append(Run(name, ("--set", pair)))
    runs = [_joined(choice) for choice in itertools.product(*axes, *by_key.values())]
    shared = [name for name, count in Counter(run.name for run in runs).items() if count > 1]
    if shared:
        raise ValueError(f"two runs would have the same directory, {shared[0]}")
    return runs


def _joined(choice: Sequence[Run]) -> Run:
    arguments = itertools.chain.from_iterable(part.arguments for part in choice)
    return Run(",".join(part.name for part in choice), tuple(arguments))


def folders_of_prompts(parent: Path, newest: int) -> list[Path]:
    """The last folders by name that hold Parquet files; `.name` and `_name` are not ready yet."""
    found = [
        path
        for path in sorted(parent.iterdir())
        if path.is_dir() and not path.name.startswith((".", "_")) and any(path.glob("*.parquet"))
    ]
    return found[-newest:]


def run_all(job: Path, out: Path, runs: Sequence[Run], flags: Sequence[str]) -> list[Outcome]:
    """Run one after the other; `series.jsonl` grows with them. After a signal none begins."""
    out.mkdir(parents=True, exist_ok=True)
    child, outcomes = Child(), list[Outcome]()
    for run in runs:
        print(f"== {run.name}", file=sys.stderr, flush=True)
        command = ["adaflash-batch", "run", *run.arguments, "--config", str(job)]
        outcomes.append(_run_one(child, run, [*command, "--out", str(out / run.name), *flags]))
        _write_lines(out, outcomes)
    return outcomes


def _run_one(child: Child, run: Run, command: Sequence[str]) -> Outcome:
    if child.signal is not None:
        return Outcome(run, INTERRUPTED, {})
    code, printed = child.run(command)
    if code < 0:
        # Killed before it listened to signals, it had done nothing.
        code = INTERRUPTED if child.signal is not None else 128 - code
    return Outcome(run, code, _last_line(printed))


def _last_line(printed: str) -> dict[str, Any]:
    try:
        value = json.loads(printed.strip().rpartition("\n")[2])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _figures(out: Path, outcome: Outcome) -> dict[str, Any]:
    """What the run came to: of one that found nothing to do, what the earlier one did."""
    path = out / outcome.run.name / "_adaflash" / "summary.json"
    try:
        kept = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        kept = {}
    is_idle = outcome.last_line.get("status") == "nothing_to_do"
    return {**outcome.last_line, **kept} if is_idle else {**kept, **outcome.last_line}


def _write_lines(out: Path, outcomes: Sequence[Outcome]) -> None:
    lines = [
        json.dumps(
            {
                "name": outcome.run.name,
                "arguments": outcome.run.arguments,
                "exit_code": outcome.exit_code,
                "status": outcome.last_line.get("status"),
                "summary": _figures(out, outcome),
            }
        )
        for outcome in outcomes
    ]
    whole = out / "series.jsonl.new"
    whole.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    whole.replace(out / "series.jsonl")


def _print_table(out: Path, outcomes: Sequence[Outcome]) -> None:
    width = max(len(outcome.run.name) for outcome in outcomes)
    print(f"{'run':{width}}  exit     rows   errors  tokens/s", file=sys.stderr)
    for outcome in outcomes:
        figures = _figures(out, outcome)
        rows, errors, speed = (figures.get(key) for key in ("rows", "errors", "tokens_per_s"))
        cells = [f"{'-' if value is None else value:>8}" for value in (rows, errors, speed)]
        line = f"{outcome.run.name:{width}}  {outcome.exit_code:4} {' '.join(cells)}"
        print(line, file=sys.stderr)


def first_to_attend(codes: Iterable[int]) -> int:
    """The exit code of a series with these; 0 of an empty one."""
    known = [code if code in _ATTENTION else 1 for code in codes]
    return min(known, key=_ATTENTION.index, default=0)


def _arguments(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own, flags = list(given), list[str]()
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    words = argparse.ArgumentParser(description="Run one job file several times.")
    words.add_argument("job", type=Path, help="job file in TOML")
    words.add_argument("--out", type=Path, required=True, help="directory of their directories")
    words.add_argument("--over", action="append", default=[], metavar="SECTION.KEY=VALUE")
    words.add_argument("--each-folder", type=Path, metavar="DIR", help="a run for each in it")
    words.add_argument("--newest", type=int, default=7, help="of these folders (default: 7)")
    parsed = words.parse_args(own)
    if not parsed.over and parsed.each_folder is None:
        words.error("give --over or --each-folder")
    return parsed, flags


def main(given: Sequence[str]) -> int:
    """Run the series; the exit code."""
    asked, flags = _arguments(given)
    try:
        folders = folders_of_prompts(asked.each_folder, asked.newest) if asked.each_folder else []
        has_runs = folders or asked.each_folder is None
        runs = plan(asked.over, folders) if has_runs else []
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outcomes = run_all(asked.job, asked.out, runs, flags)
    if outcomes:
        _print_table(asked.out, outcomes)
    code = first_to_attend(outcome.exit_code for outcome in outcomes)
    idle = all(outcome.last_line.get("status") == "nothing_to_do" for outcome in outcomes)
    status = "nothing_to_do" if code == 0 and idle else _STATUS.get(code, "failed")
    last = {"status": status, "exit_code": code, "runs": len(outcomes), "output": str(asked.out)}
    print(json.dumps(last))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
