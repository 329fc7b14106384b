"""How many drafts to verify: every policy against plain decoding, in one process and run.

Usage: python benchmarks/length_study.py --drafter DIR [--prompts FILE.parquet ...]
           [--concurrency 1 4 8 16 32 64 128] [--policies off fixed:1 survival ...] [--rounds 3]
           [--depth 4] [--max-new-tokens 64] [--threads 2] [--seed 0] [--json FILE]

    off         plain decoding, what all others are compared with
    fixed:n     n drafts of every block
    adaflash    what the scalar head of the paper says; for a drafter that has one
    survival    what is expected to be fastest for the batch, from the drafter's blocks alone
    lookup      the same from lookups alone
    both        the same from both sources
    oracle      survival, told beforehand which drafts are right: the bound

Greedy, end-of-sequence ignored. At each concurrency every policy has one decoder that lives through
all rounds, the first of which is not counted: it has seen as much as any job's. In a round all take
turns, in an order of chance, on the same prompts, `--depth` for each place: with drafts texts end
at different times, and only a queue keeps the places filled then, as in a job. `speed` is the
tokens a second over those of `off` of the same round, `low` and `high` the least and the most of
the rounds; `cpu` is the same by seconds of the processor, which other processes disturb less; τ is
over all steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from decode import token_ids

from adaflash_batch import models
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.assembly import load_net
from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import BlockDrafter, Draft, DraftBatch, Drafter
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.target import Target
from adaflash_batch.request import Completion, Request, RowKey, Sampling
from adaflash_batch.stats import SpeculationCounts

_HERE = Path(__file__).parent
_POLICIES = ["off", "fixed:1", "fixed:2", "fixed:3", "fixed:5", "fixed:7", "survival", "lookup"]
_POLICIES += ["both", "oracle"]


class Oracle:
    """A drafter that is told the texts: it says of every draft whether it is right."""

    def __init__(self, inner: Drafter, texts: dict[RowKey, list[int]]) -> None:
        self._inner, self._texts = inner, texts
        self.version, self.block_size = inner.version, inner.block_size
        self.tapped_layers = inner.tapped_layers
        self.absorb, self.adopt = inner.absorb, inner.adopt

    def draft(self, batch: DraftBatch) -> list[Draft]:
        """Those of the drafter."""
        drafts, positions = self._inner.draft(batch), batch.positions.tolist()
        return [
            Draft(draft.token_ids, self._survival(key, position, draft.token_ids))
            for draft, key, position in zip(drafts, batch.keys, positions, strict=True)
        ]

    def _survival(self, key: RowKey, position: int, drafts: list[int]) -> list[float]:
        following, survival, right = self._texts.get(key, [])[position + 1 :], [], 1.0
        for index, token in enumerate(drafts):
            right *= index < len(following) and following[index] == token
            survival.append(right)
        return survival


@dataclass(slots=True)
class Contender:
    """A policy with its decoder.

    Attributes:
        texts: for the oracle, prompts and completions by request.
    """

    name: str
    decoder: Decoder
    texts: dict[RowKey, list[int]] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    num_different: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Medians of the rounds."""
        counts = self.counts
        figures = {
            "tau": counts.emitted_per_step,
            "tau_block": counts.emitted_per_block_step,
            "tau_lookup": counts.emitted_per_lookup_step,
            "speed": statistics.median(self.speeds),
            "low": min(self.speeds),
            "high": max(self.speeds),
            "cpu": statistics.median(self.cpu),
            "verified_per_step": counts.verified / counts.steps if counts.steps else None,
        }
        rounded = {k: None if v is None else round(v, 3) for k, v in figures.items()}
        return {"policy": self.name, **rounded, "texts_different": self.num_different}


@dataclass(frozen=True, slots=True)
class Ground:
    """What all contenders share."""

    target: Target
    net: DFlash
    vocabulary: torch.Tensor | None
    cost: StepCost
    concurrency: int
    kv_tokens: int

    def contender(self, name: str) -> Contender:
        """By its name in the usage."""
        texts: dict[RowKey, list[int]] = {}
        has_blocks, most = name not in ("off", "lookup"), None
        widths, number = name.partition(":")[::2]
        if widths == "fixed":
            most = int(number)
        is_wide = widths in ("fixed", "adaflash")
        policy = Policy(widths if is_wide else "survival", most, only_if_it_pays=not is_wide)  # type: ignore[arg-type]

        def drafter(num_pages: int) -> Drafter:
            blocks = BlockDrafter(self.net, self.target, num_pages, token_ids=self.vocabulary)
            return Oracle(blocks, texts) if name == "oracle" else blocks

        decoder = Decoder(
            self.target,
            drafter=drafter if has_blocks else None,
            lookup=Lookup(max_tokens=1_000_000) if name in ("lookup", "both") else None,
            policy=policy,
            cost=self.cost,
            max_running=self.concurrency,
            token_budget=max(1024, 64 * self.concurrency),
            kv_tokens=self.kv_tokens,
        )
        return Contender(name, decoder, texts)


def decode(decoder: Decoder, requests: Sequence[Request]) -> tuple[list[Completion], float, float]:
    """As many at once as it takes, each to its longest; the seconds, and the processor's."""
    began, began_cpu, done = time.perf_counter(), time.process_time(), list[Completion]()
    for request in requests:
        decoder.add(request)
    while decoder.has_work:
        done += decoder.step()
    return done, time.perf_counter() - began, time.process_time() - began_cpu


def play(contenders: Sequence[Contender], requests: Sequence[Request], dice: random.Random) -> None:
    """One round: `off` first in the list and in turn, since the oracle asks for its texts."""
    plain, seconds, cpu = decode(contenders[0].decoder, requests)
    known = {each.key: each.token_ids for each in plain}
    prompts = {each.key: each.token_ids for each in requests}
    others = list(contenders[1:])
    dice.shuffle(others)
    for contender in others:
        contender.texts.clear()
        contender.texts.update({key: prompts[key] + known[key] for key in known})
        done, taken, taken_cpu = decode(contender.decoder, requests)
        contender.speeds.append(seconds / taken)
        contender.cpu.append(cpu / taken_cpu)
        for each in done:
            contender.counts.add(each.counts)
            contender.num_different += each.token_ids != known[each.key]
    contenders[0].speeds.append(1.0)
    contenders[0].cpu.append(1.0)


def study(ground: Ground, prompts: list[list[int]], options: argparse.Namespace) -> list[Any]:
    """All rounds at one concurrency."""
    contenders = [ground.contender(name) for name in options.policies]
    dice, sampling = (
        random.Random(options.seed),
        Sampling(max_new_tokens=options.max_new_tokens, ignore_eos=True),
    )
    for turn in range(options.rounds + 1):
        size = ground.concurrency * options.depth
        part = prompts[turn * size :][:size]
        requests = [
            Request(RowKey(turn, row, 0), ids, sampling, identity=row)
            for row, ids in enumerate(part)
        ]
        play(contenders, requests, dice)
        if turn == 0:  # of the setting up
            for each in contenders:
                each.speeds, each.cpu, each.num_different = [], [], 0
                each.counts = SpeculationCounts()
    return [{"concurrency": ground.concurrency, **each.as_dict()} for each in contenders]


def _distinct(model: Path, path: Path, count: int) -> list[list[int]]:
    """Prompts of which none comes twice: its text would be looked up from beginning to end."""
    found = [list(ids) for ids in dict.fromkeys(map(tuple, token_ids(model, path, 2 * count)))]
    if len(found) < count:
        raise SystemExit(f"{path} has {len(found)} different prompts, {count} are needed")
    return found[:count]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=models.DEFAULT_MODEL)
    demo = _HERE.parent / "data"
    parser.add_argument("--drafter", type=Path, default=demo / "drafters" / "smollm2-135m-instruct")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[demo / "prompts.parquet"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--policies", nargs="+", default=_POLICIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=4, help="requests of a round for each slot")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    options.policies = ["off", *(name for name in options.policies if name != "off")]
    torch.set_num_threads(options.threads)
    model = models.locate(options.model, notify=print)
    target = Target.load(model, options.model, dtype=torch.bfloat16)
    net = load_net(options.drafter, target)
    vocabulary = load_vocabulary(options.drafter, net.config)
    cost, results = StepCost(), []
    for concurrency in options.concurrency:
        for path in options.prompts:
            count = concurrency * options.depth * (options.rounds + 1)
            prompts = _distinct(model, path, count)
            longest = max(map(len, prompts)) + options.max_new_tokens + 64
            ground = Ground(target, net, vocabulary, cost, concurrency, concurrency * longest)
            if not cost.is_known:
                ground.contender("survival").decoder.profile()
            for row in study(ground, prompts, options):
                results.append({"prompts": path.stem, **row})
                print(json.dumps(results[-1]), flush=True)
    if options.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=_HERE, capture_output=True, text=True
        ).stdout.strip()
        about = {"options": {k: str(v) for k, v in vars(options).items()}, "commit": commit}
        about["machine"] = platform.processor() or platform.machine()
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
