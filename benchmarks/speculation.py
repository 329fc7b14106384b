"""What drafting costs and gains: a step and the speed with drafters, over plain decoding.

Usage:
    python benchmarks/speculation.py [--drafter DIR ...] [--shape layers=2,block_size=8 ...]
        [--prompts FILE.parquet] [--concurrency 1 2 4 8 32] [--width 1 2 4 7] [--rounds 3]
        [--json FILE]

Demo model, bf16, 2 threads, greedy, end-of-sequence ignored, one process. A `--drafter` is a
checkpoint; a `--shape` is a drafter of random weights, whose drafts are never right: only what its
steps cost is of interest. Plain decoding and every drafter at every width take turns on the same
prompts, fresh ones each round. `step` is the median step without prefill over plain decoding's,
`speed` the tokens per second over plain decoding's, prefill and all else included; both are medians
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode import token_ids
from engines import decode_all

from adaflash_batch import models
from adaflash_batch.adapt.new_drafter import build_config, member_fields, shape_like
from adaflash_batch.drafter.config import build_target_layer_ids
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.assembly import load_net
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.target import Target
from adaflash_batch.stats import SpeculationCounts

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to measure; `net` None is plain decoding."""

    name: str
    net: DFlash | None = None
    token_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One decoding of a round's prompts."""

    tokens: int
    seconds: float
    step: float
    counts: SpeculationCounts


@dataclass(slots=True)
class Result:
    """A drafter at one width and concurrency."""

    name: str
    concurrency: int
    width: int
    steps: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    def add(self, turn: Turn, plain: Turn) -> None:
        """Take a round."""
        self.steps.append(turn.step / plain.step)
        self.speeds.append(turn.tokens / turn.seconds / (plain.tokens / plain.seconds))
        self.counts.add(turn.counts)

    def as_dict(self) -> dict[str, Any]:
        """Medians."""
        tau = self.counts.emitted_per_step
        return {
            "drafter": self.name,
            "concurrency": self.concurrency,
            "width": self.width,
            "step": round(statistics.median(self.steps), 3),
            "tau": None if tau is None else round(tau, 3),
            "speed": round(statistics.median(self.speeds), 3),
        }


def decode(
    target: Target, candidate: Candidate, width: int, prompts: list[list[int]], most: int
) -> Turn:
    """Decode prompts at once, each to its longest."""
    longest = max(map(len, prompts)) + most + 64
    drafter = None
    if candidate.net is not None:
        drafter = partial(BlockDrafter, candidate.net, target, token_ids=candidate.token_ids)
    decoder = Decoder(
        target,
        drafter=drafter,
        policy=Policy("fixed", width or None),
        max_running=len(prompts),
        token_budget=max(1024, 64 * len(prompts)),
        kv_tokens=len(prompts) * longest,
    )
    began = time.perf_counter()
    completions, step = decode_all(decoder, prompts, most)
    assert step is not None
    seconds, counts = time.perf_counter() - began, SpeculationCounts()
    for completion in completions:
        counts.add(completion.counts)
    return Turn(sum(len(each.token_ids) for each in completions), seconds, step, counts)


def checkpoint(folder: Path, target: Target) -> Candidate:
    """A drafter from disk."""
    net = load_net(folder, target)
    return Candidate(str(folder), net, load_vocabulary(folder, net.config))


def random_drafter(text: str, target: Target) -> Candidate:
    """A drafter of a shape like `layers=2,block_size=8,member=dspark,rank=32,vocabulary=8192`."""
    given = dict(part.split("=") for part in text.split(","))
    member, rank = given.pop("member", "dflash"), int(given.pop("rank", 64))
    vocabulary, features = int(given.pop("vocabulary", 0)), int(given.pop("features", 3))
    names = {"layers": "num_hidden_layers", "projection": "has_input_projection"}
    shape = shape_like(target.text_config)
    shape |= member_fields(member, rank, shape["hidden_size"], shape["vocab_size"])
    shape["target_layer_ids"] = build_target_layer_ids(target.num_layers, features)
    given_numbers = {names.get(name, name): int(value) for name, value in given.items()}
    config = build_config(mask_token_id=0, **shape, **given_numbers)
    config = dataclasses.replace(config, has_input_projection=bool(config.has_input_projection))
    net = initialise(config, torch.Generator().manual_seed(0)).to(target.dtype)
    tokens = torch.arange(vocabulary) if vocabulary else None
    return Candidate(text, net.requires_grad_(False).fuse(), tokens)


def measure(
    target: Target, drafters: Sequence[Candidate], prompts: list[list[int]], options: Any
) -> list[Result]:
    """All of them, taking turns."""
    results = []
    for concurrency in options.concurrency:
        level = [
            (drafter, Result(drafter.name, concurrency, width))
            for drafter in drafters
            for width in _widths(drafter, options.width)
        ]
        for turn in range(options.rounds):
            part = prompts[turn * concurrency : (turn + 1) * concurrency]
            for drafter, result in level:
                # Plain decoding beside each, since the machine changes its pace.
                plain = decode(target, Candidate("plain"), 0, part, options.max_new_tokens)
                turned = decode(target, drafter, result.width, part, options.max_new_tokens)
                result.add(turned, plain)
        for _, result in level:
            print(json.dumps(result.as_dict()), flush=True)
            results.append(result)
    return results


def _widths(drafter: Candidate, wanted: list[int]) -> list[int]:
    assert drafter.net is not None
    most = drafter.net.config.num_drafts
    return sorted({min(width, most) for width in wanted}) if wanted else [most]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=models.DEFAULT_MODEL)
    parser.add_argument("--prompts", type=Path, default=_HERE.parent / "data" / "prompts.parquet")
    parser.add_argument("--drafter", type=Path, nargs="*", default=[])
    parser.add_argument("--shape", nargs="*", default=[], help="of a drafter of random weights")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--width", type=int, nargs="*", default=[], help="the whole block if none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = models.locate(options.model, notify=print)
    target = Target.load(model, options.model, dtype=torch.bfloat16)
    drafters = [checkpoint(folder, target) for folder in options.drafter]
    drafters += [random_drafter(text, target) for text in options.shape]
    prompts = token_ids(model, options.prompts, max(options.concurrency) * options.rounds)
    results = measure(target, drafters, prompts, options)
    if options.json:
        rows = [result.as_dict() for result in results]
        written = {"prompts": options.prompts.name, "results": rows}
        options.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
