"""Plain decoding: the bare engine against what else decodes on this machine, in one run.

Usage:
    python benchmarks/decode.py [--prompts FILE.parquet] [--vllm-python VENV/bin/python]
        [--concurrency 1 8 32 64] [--rounds 3] [--json FILE]

Demo model, bf16, 2 threads, greedy, 128 new tokens, end-of-sequence ignored. Each engine lives in a
process of its own and they take turns on the same token ids, fresh prompts each round; the figures
are medians, the ratios medians of the rounds' ratios. `step / floor` is the median step without
prefill over the time of its matrix products alone, measured in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import pyarrow.parquet as pq

from adaflash_batch import models
from adaflash_batch.request import Prompt, Sampling
from adaflash_batch.text import Encoded, TextCodec

_HERE = Path(__file__).parent


@dataclass(slots=True)
class Worker:
    """An engine's process."""

    name: str
    process: subprocess.Popen[str]

    @staticmethod
    def start(name: str, python: str, arguments: Sequence[str]) -> Worker:
        """Start it and wait until it has loaded."""
        command = [python, str(_HERE / "engines.py"), name, *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        worker = Worker(name, process)
        worker._read()
        return worker

    def ask(self, command: dict[str, Any]) -> dict[str, float]:
        """Send a command, wait for the answer."""
        stdin = cast(IO[str], self.process.stdin)
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        line = cast(IO[str], self.process.stdout).readline()
        if not line:
            raise SystemExit(f"{self.name} died with exit code {self.process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


@dataclass(slots=True)
class Level:
    """Results at one concurrency."""

    concurrency: int
    speeds: dict[str, list[float]] = field(default_factory=dict)
    steps_over_floor: list[float] = field(default_factory=list)

    def add(self, name: str, answer: dict[str, float]) -> None:
        """Take one engine's round."""
        self.speeds.setdefault(name, []).append(answer["tokens"] / answer["seconds"])

    def as_dict(self) -> dict[str, Any]:
        """Medians."""
        ours = self.speeds["ours"]
        return {
            "concurrency": self.concurrency,
            "tokens_per_s": {n: round(statistics.median(v), 1) for n, v in self.speeds.items()},
            "ours_over": {
                name: round(statistics.median(a / b for a, b in zip(ours, v, strict=True)), 3)
                for name, v in self.speeds.items()
                if name != "ours"
            },
            "step_over_floor": round(statistics.median(self.steps_over_floor), 3),
        }


def token_ids(model: Path, file: Path, count: int) -> list[list[int]]:
    """The first prompts of a file through the chat template."""
    texts = pq.read_table(file, columns=["prompt"])["prompt"].to_pylist()
    texts = (texts * (count // len(texts) + 1))[:count]
    codec = TextCodec.load(model, context=8192)
    prompts = [Prompt(0, row, row, text, Sampling()) for row, text in enumerate(texts)]
    encoded = codec.encode_many(prompts)
    return [item.token_ids for item in encoded if isinstance(item, Encoded)]


def measure(
    workers: Sequence[Worker], prompts: list[list[int]], options: argparse.Namespace
) -> list[Level]:
    """All levels, the engines taking turns."""
    for worker in workers:
        worker.ask({"prompts": prompts[:2], "max_new_tokens": 8})
    levels = []
    for concurrency in options.concurrency:
        level = Level(concurrency)
        for turn in range(options.rounds):
            part = prompts[turn * concurrency : (turn + 1) * concurrency]
            order = [*workers[turn % len(workers) :], *workers[: turn % len(workers)]]
            for worker in order:
                answer = worker.ask({"prompts": part, "max_new_tokens": options.max_new_tokens})
                level.add(worker.name, answer)
                if worker.name == "ours":
                    floor = worker.ask({"floor": concurrency})["seconds"]
                    level.steps_over_floor.append(answer["step"] / floor)
        print(json.dumps(level.as_dict()), flush=True)
        levels.append(level)
    return levels


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=models.DEFAULT_MODEL)
    parser.add_argument("--prompts", type=Path, default=_HERE.parent / "data" / "prompts.parquet")
    parser.add_argument("--vllm-python", help="Python of a virtual environment with vLLM")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    model = models.locate(options.model, notify=print)
    prompts = token_ids(model, options.prompts, max(options.concurrency) * options.rounds)
    longest = max(map(len, prompts))
    arguments = ["--model", str(model), "--threads", str(options.threads)]
    arguments += ["--longest", str(longest)]
    pythons = {"ours": sys.executable, "transformers": sys.executable}
    if options.vllm_python:
        pythons["vllm"] = options.vllm_python
    workers = [Worker.start(name, python, arguments) for name, python in pythons.items()]
    levels = measure(workers, prompts, options)
    if options.json:
        results = {"prompts": options.prompts.name, "levels": [level.as_dict() for level in levels]}
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
