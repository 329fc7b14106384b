"""Where a step's milliseconds go, against its matrix products alone, measured on the spot.

Usage:
    python benchmarks/step_profile.py [--concurrency 1 8 32 64] [--drafter DIR] [--prompts FILE ...]
        [--rounds 3] [--threads 2] [--processor] [--json FILE] [--job ROWS]

Demo model, bf16, greedy, 128 new tokens, end-of-sequence ignored. Plain decoding and decoding as a
job does it (drafter, lookup, learning) take turns on the same prompts. Only steps without prefill
count. A part's time is without that of the parts within it, `python` is what none of them took.
`floor` is the time of the packed matrix products alone, in turn and with nothing between them, at
as many rows as a step had on average.

--job runs the command in this process over so many rows instead and tells reading, tokenising,
text, writing and progress apart from steps.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from engines import Ours, OursSpeculating
from peers import Prompts

from adaflash_batch import models
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.target import Target

_HERE = Path(__file__).parent
_DATA = _HERE.parent / "data"
_PACKAGE = "adaflash_batch"
Parts = dict[str, list[tuple[str, str | None, str]]]
# Where each part's time is taken: module, class or none, function.
_STEP_PARTS: Parts = {
    "model around layers": [("engine.target", "Target", "forward")],
    "choosing tokens": [("engine.passes", None, "choose")],
    "drafter": [("engine.drafting", "BlockDrafter", "draft")],
    "drafter's context": [
        ("engine.drafting", "BlockDrafter", "absorb"),
        ("engine.late_context", "LateContext", "add"),
    ],
    "lookup": [("engine.lookup", "Lookup", "propose"), ("engine.lookup", "Lookup", "finish")],
    "what to verify": [("engine.speculation", "Speculator", "choose")],
    "learning from outcomes": [
        ("engine.speculation", "Speculator", name) for name in ("settle", "extend", "observe")
    ],
    "keeping": [("engine.keeping", "Keeping", "keep")],
    "scheduling": [
        ("engine.scheduler", "Scheduler", name)
        for name in ("plan_decoding", "plan_prefill", "prefill_ahead")
    ],
    "packing": [("engine.decoder", None, "pack_items")],
    "committing": [("engine.decoder", "Decoder", "_commit")],
}
_JOB_PARTS: Parts = {
    "steps": [("engine.decoder", "Decoder", "step")],
    "learning": [("learning", "JobLearning", "after_step")],
    "reading, tokenising": [("job_decoding", "RowDecoding", "_refill")],
    "text of completions": [("text", "TextCodec", "decode")],
    "writing": [("shards.output", "Output", "commit")],
    "journals, chunks": [("shards.open_chunks", "OpenChunks", "put")],
    "progress": [
        ("report.live", "Reporter", "update"),
        ("shards.run_folder", "RunReport", "tell"),
        ("job_decoding", "RowDecoding", "_progress"),
    ],
    "loading": [("job_decoding", "RowDecoding", "_load")],
}


# Parts that are not taken apart: the drafter's matrix products are its own.
_WHOLE = {"drafter", "drafter's context", "output layer"}


@dataclass(slots=True)
class Clock:
    """Seconds by part, each without what is inside of it."""

    now: Callable[[], float] = time.perf_counter
    seconds: Counter[str] = field(default_factory=Counter)
    _stack: list[float] = field(default_factory=list)
    _is_within_whole: bool = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time taken."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_within_whole:
                return function(*args, **kwargs)
            self._is_within_whole = part in _WHOLE
            began = self.now()
            self._stack.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                taken = self.now() - began
                self._is_within_whole = False
                self.seconds.update({part: taken - self._stack.pop()})
                if self._stack:
                    self._stack[-1] += taken

        return run


@contextmanager
def taken_apart(
    clock: Clock, parts: dict[str, list[tuple[str, str | None, str]]]
) -> Iterator[None]:
    """While this lasts, the time of these functions is taken."""
    before: list[tuple[Any, str, Any]] = []
    for part, places in parts.items():
        for module, owner, name in places:
            holder: Any = importlib.import_module(f"{_PACKAGE}.{module}")
            holder = holder if owner is None else getattr(holder, owner)
            before.append((holder, name, getattr(holder, name)))
            setattr(holder, name, clock.timed(part, getattr(holder, name)))
    try:
        yield
    finally:
        for holder, name, function in reversed(before):
            setattr(holder, name, function)


@dataclass(slots=True)
class Steps:
    """What steps without prefill took in one decoding."""

    number: int = 0
    seconds: float = 0.0
    tokens: int = 0
    parts: Counter[str] = field(default_factory=Counter)


@contextmanager
def head_apart(clock: Clock, target: Target) -> Iterator[None]:
    """While this lasts, the output layer is none of the other matrix products."""
    head: Any = target._model.get_output_embeddings()
    head.forward = clock.timed("output layer", head.forward)
    try:
        yield
    finally:
        del head.forward


def profiled(engine: Any, command: dict[str, Any], now: Callable[[], float]) -> Steps:
    """Decode, taking steps apart."""
    clock, found, step = Clock(now), Steps(), Decoder.step

    def taken(self: Decoder) -> Any:
        prefilled, passed = self.num_prefilled, self.target.num_forward_tokens
        running, before = self.num_running, Counter(clock.seconds)
        layers = Counter(self.target.layer_seconds)
        began = now()
        completions = step(self)
        seconds = now() - began
        if self.num_prefilled == prefilled and running == len(command["prompts"]):
            found.number += 1
            found.seconds += seconds
            found.tokens += self.target.num_forward_tokens - passed
            within = Counter(self.target.layer_seconds) - layers
            found.parts.update(clock.seconds - before)
            found.parts.update(within)
            found.parts["model around layers"] -= sum(within.values())
        return completions

    with head_apart(clock, engine.target), taken_apart(clock, _STEP_PARTS):
        Decoder.step = taken  # type: ignore[method-assign]
        try:
            engine.generate(command)
        finally:
            Decoder.step = step  # type: ignore[method-assign]
    return found


def as_row(name: str, concurrency: int, turns: list[tuple[Steps, float]]) -> dict[str, Any]:
    """Milliseconds of a step by part: medians over the rounds."""
    parts = {part for steps, _ in turns for part in steps.parts}
    row: dict[str, Any] = {"engine": name, "concurrency": concurrency}
    row["tokens"] = round(statistics.median(s.tokens / s.number for s, _ in turns), 1)
    row["step_ms"] = _ms(s.seconds / s.number for s, _ in turns)
    row["floor_ms"] = _ms(floor for _, floor in turns)
    over = (s.seconds / s.number / floor for s, floor in turns)
    row["step_over_floor"] = round(statistics.median(over), 3)
    by_part = {part: _ms(s.parts[part] / s.number for s, _ in turns) for part in parts}
    rest = _ms((s.seconds - sum(s.parts.values())) / s.number for s, _ in turns)
    by_part["python"] = rest
    row["parts_ms"] = dict(sorted(by_part.items(), key=lambda each: -each[1]))
    return row


def _ms(seconds: Iterator[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)


def measure_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every concurrency, plain and as a job does it."""
    last = Prompts.place(max(options.concurrency), options.rounds - 1, options.rounds)
    prompts = Prompts(options.model, options.prompts, last.stop)
    context = prompts.longest + options.max_new_tokens + 16
    plain = Ours(options.model, context)
    drafting = OursSpeculating(
        options.model,
        options.drafter,
        threads=options.threads,
        context=context,
        most=max(options.concurrency),
    )
    now = time.thread_time if options.processor else time.perf_counter
    rows = []
    for concurrency in options.concurrency:
        turns: dict[str, list[tuple[Steps, float]]] = {"plain": [], "as a job": []}
        for turn in range(options.rounds):
            ids = prompts.ids[Prompts.place(concurrency, turn, options.rounds)]
            command = {"prompts": ids, "max_new_tokens": options.max_new_tokens}
            for name, engine in (("plain", plain), ("as a job", drafting)):
                steps = profiled(engine, command, now)
                if steps.number:
                    floor = plain.floor(max(round(steps.tokens / steps.number), 1), now)
                    turns[name].append((steps, floor))
        for name, measured in turns.items():
            if measured:
                rows.append(as_row(name, concurrency, measured))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_job(options: argparse.Namespace) -> dict[str, Any]:
    """The command over many rows, in this process."""
    from adaflash_batch.cli import main as command

    clock = Clock()
    prompts = Prompts(options.model, options.prompts, options.job)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(pa.table({"prompt": prompts.texts}), folder / "in.parquet")
        arguments = ["run", str(folder / "in.parquet"), "--out", str(folder / "out")]
        arguments += ["--model", str(options.model), "--drafter", str(options.drafter)]
        arguments += ["--prompt-column", "prompt", "--temperature", "0", "--ignore-eos"]
        arguments += ["--threads", str(options.threads)]
        arguments += ["--max-new-tokens", str(options.max_new_tokens)]
        began = time.perf_counter()
        with taken_apart(clock, _JOB_PARTS):
            try:
                command(arguments)
            except SystemExit as end:
                if end.code:
                    raise
        seconds = time.perf_counter() - began
        summary = json.loads((folder / "out" / "_adaflash" / "summary.json").read_text())
    parts: dict[str, float] = {p: round(taken, 3) for p, taken in clock.seconds.most_common()}
    parts["python"] = round(seconds - sum(parts.values()), 3)
    decode_s = seconds - clock.seconds["loading"]
    share = round(clock.seconds["steps"] / decode_s, 4)
    kept = {key: summary[key] for key in ("tokens_per_s", "elapsed_s", "setup_s")}
    return {"rows": options.job, "seconds": parts, "share_of_steps": share, **kept}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    drafter = _DATA / "drafters" / "smollm2-135m-instruct"
    parser.add_argument("--model", default=models.DEFAULT_MODEL)
    parser.add_argument("--drafter", type=Path, default=drafter)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[_DATA / "prompts.parquet"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor",
        action="store_true",
        help="processor's time, for one thread on a busy machine",
    )
    parser.add_argument("--job", type=int, metavar="ROWS", help="profile a whole job")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.model = models.locate(options.model, notify=lambda line: print(line, file=sys.stderr))
    found: Any = measure_job(options) if options.job else measure_steps(options)
    if options.job:
        print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
