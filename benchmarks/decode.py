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
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import Tokenizer
from turns import Worker

from adaflash_batch import models
from adaflash_batch.request import Prompt, Sampling
from adaflash_batch.text import Encoded, TextCodec

_HERE = Path(__file__).parent


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
    return encoded(model, texts)[0]


def encoded(model: Path, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    """Prompts through the chat template: as token ids, and as the texts of these."""
    codec = TextCodec.load(model, context=8192)
    prompts = [Prompt(0, row, row, text, Sampling()) for row, text in enumerate(texts)]
    ids = [item.token_ids for item in codec.encode_many(prompts) if isinstance(item, Encoded)]
    assert len(ids) == len(texts), "a prompt is longer than the model's context"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return ids, [tokenizer.decode(each, skip_special_tokens=False) for each in ids]


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
    arguments += ["--context", str(longest + options.max_new_tokens + 16)]
    pythons = {"ours": sys.executable, "transformers": sys.executable}
    if options.vllm_python:
        pythons["vllm"] = options.vllm_python
    workers = [Worker(name, python, arguments) for name, python in pythons.items()]
    try:
        levels = measure(workers, prompts, options)
    finally:
        for worker in workers:
            worker.end()
    if options.json:
        results = {"prompts": options.prompts.name, "levels": [level.as_dict() for level in levels]}
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
