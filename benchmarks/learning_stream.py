"""What learning brings: texts go by in a job's order, each shard first measured, then learnt from.

The texts were decoded once and stored (`drafter train --decode-only`), so that objectives and
remedies against forgetting can be compared on the very same stream, with the learner of `run`.

Usage: python benchmarks/learning_stream.py --model DIR --drafter DIR --stream STORE[:TEXTS] ...
           [--old STORE[:TEXTS] ...] [--set NAME=VALUE ...] --out results.jsonl
TEXTS is a number of the first ones, or FROM-TO, counted from 0 and without TO.

τ of a shard is that of a whole walk through its texts (adapt/evaluate.py) with the weights that
would be served when it begins. `--old` texts are never learnt from: their τ after each shard is
the forgetting curve. Only learning is timed. One JSON line is added to `--out`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from adaflash_batch import model_files
from adaflash_batch.adapt.evaluate import Acceptance, evaluate
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import LengthLabel, Objective
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.publishing import MailboxPublisher
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.round_report import RoundReport
from adaflash_batch.adapt.scoring import Scorer
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.adapt.trajectory_store import StoredTrajectory, Taps, TrajectoryStore
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.exchange import Trajectory, TrajectoryMailbox, WeightsMailbox

GIB = 2**30


@dataclasses.dataclass
class Settings:
    """What may be varied."""

    objective: str = "opd"
    ce_weight: float = 0.8
    clip: float | None = None
    gamma: float = 4.0
    rate: float = 5e-4
    optimiser: str = "muon"
    parameters: str = "all"
    rank: int = 8
    anchors: int = 16
    batch: int = 8
    updates: int = 16
    replay: float = 0.5
    averaging: float = 0.0
    pull: float = 0.0
    shard: int = 64
    measured: int = 16
    seed: int = 0
    threads: int = 1
    compute: str = "bfloat16"

    def override(self, pairs: Sequence[str]) -> None:
        """Lay NAME=VALUE over them."""
        for name, _, value in (pair.partition("=") for pair in pairs):
            if not hasattr(self, name):
                raise SystemExit(f"no such setting: {name}")
            kind = type(getattr(self, name))
            setattr(self, name, float(value) if name == "clip" else kind(value))


class Stream:
    """A drafter that learns from texts as they go by."""

    def __init__(self, model: Path, folder: Path, settings: Settings) -> None:
        table = target_table(model)
        facts = target_facts(model, folder, table)
        self.settings, self.table = settings, table
        self.head = Head(table)
        ids = load_vocabulary(folder, checkpoint.inspect(folder).config)
        if ids is not None:
            self.head = Head.restricted(table, ids)
        self.net = checkpoint.load(folder, facts, dtype=torch.bfloat16).requires_grad_(False)
        self._inbox, self._outbox = TrajectoryMailbox(8 * GIB), WeightsMailbox()
        self._core = self._updates(checkpoint.load(folder, facts, dtype=torch.float32))
        self._trainer = self._rounds()
        self._num_updates = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose states the drafter reads."""
        return self.net.config.target_layer_ids

    def _updates(self, net: DFlash, label: LengthLabel = "hindsight") -> DrafterTrainer:
        s = self.settings
        objective = Objective(s.objective, ce_weight=s.ce_weight, clip=s.clip, length_label=label)  # type: ignore[arg-type]
        return DrafterTrainer(
            net,
            embedding=self.table,
            head=self.head,
            objective=objective,
            gamma=s.gamma,
            anchors=s.anchors,
            weight_decay=0.0,
            compute=getattr(torch, s.compute),
            optimiser=s.optimiser,  # type: ignore[arg-type]
            parameters=s.parameters,  # type: ignore[arg-type]
            rank=s.rank,
        )

    def _rounds(self) -> OnlineTrainer:
        s = self.settings
        pool = ReplayPool(
            seed=s.seed,
            recent_bytes=GIB // 4,
            replay_bytes=2 * GIB,
            held_back_bytes=GIB // 16,
            replay_share=s.replay,
        )
        plan = RoundPlan(
            updates=s.updates,
            batch=s.batch,
            rate=s.rate,
            least_new=s.shard // 2,
            averaging=s.averaging,
            pull=s.pull,
            seed=s.seed,
        )
        scorer = Scorer(self.net, embedding=self.table, head=self.head)
        publisher = MailboxPublisher(self._outbox)
        return OnlineTrainer(self._core, self._inbox, pool, scorer, publisher, plan)

    def measure(self, texts: Sequence[Trajectory]) -> float | None:
        """τ with the weights that are served now."""
        newest = self._outbox.take()
        if newest is not None:
            self._serve(newest.tensors)
        head = self.head
        together = Acceptance.of(
            evaluate(
                self.net,
                text,
                self.table,
                lambda hidden: F.linear(hidden, head.weight),
                token_ids=head.token_ids,
            )
            for text in texts
        )
        return together.walked.emitted_per_step

    @torch.no_grad()
    def _serve(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.net.named_parameters():
            parameter.copy_(weights[name])

    def learn_from(self, label: LengthLabel) -> None:
        """From now on length heads learn from this label; all else goes on."""
        before = self._core
        self._core = self._updates(copy.deepcopy(before.net), label)
        self._core.restore(before.state())
        self._trainer = self._rounds()

    def learn_unjudged(self, texts: Sequence[Trajectory]) -> None:
        """Updates on these texts alone, served at once; for heads, which change no draft."""
        s = self.settings
        for _ in range(s.updates):
            dice = random.Random(f"{s.seed} {self._num_updates}")
            generator = torch.Generator().manual_seed(dice.randrange(2**62))
            self._core.update(dice.sample(texts, min(s.batch, len(texts))), generator, s.rate)
            self._num_updates += 1
        self._serve(dict(self._core.net.named_parameters()))

    def learn(self, texts: Sequence[Trajectory]) -> tuple[float, RoundReport | None]:
        """Learn from a shard; the seconds it took and what came of it."""
        for text in texts:
            self._inbox.put(text)
        began = time.monotonic()
        self._trainer.collect()
        report = self._trainer.run_round() if self._trainer.is_ready else None
        return time.monotonic() - began, report


def target_facts(model: Path, drafter: Path, table: Tensor) -> TargetFacts:
    """Of the target, as far as a drafter for it wants to know."""
    config = checkpoint.inspect(drafter).config
    layers = max(config.num_target_layers, max(config.target_layer_ids) + 1)
    return TargetFacts(len(table), table.shape[1], layers, str(model), None)


def target_table(model: Path) -> Tensor:
    """The embedding of a target whose lm_head is the same matrix."""
    for path in model_files.weight_files(model):
        with safe_open(path, framework="pt") as file:
            if "model.embed_tokens.weight" in file.keys():  # noqa: SIM118
                table: Tensor = file.get_tensor("model.embed_tokens.weight")
                return table.bfloat16()
    raise SystemExit(f"{model} has no model.embed_tokens.weight")


def entries(source: str, layers: tuple[int, ...]) -> list[StoredTrajectory]:
    """Texts of a folder of chunks, FOLDER[:TEXTS]; facts.json is beside it."""
    path, _, wanted = source.partition(":")
    facts = json.loads((Path(path).parent / "facts.json").read_text())
    taps = Taps(tuple(facts["target_layers"]), layers)
    found = TrajectoryStore(Path(path), 2**60, print, taps=taps).entries()
    begin, _, end = wanted.rpartition("-")
    return found[int(begin or 0) : int(end)] if wanted else found


def run(model: Path, folder: Path, streams: list[str], olds: list[str], settings: Settings) -> Any:
    """Let the streams go by, one after another; the record of it."""
    stream = Stream(model, folder, settings)
    old = {source: [e.read() for e in entries(source, stream.layers)] for source in olds}
    record: list[dict[str, Any]] = [
        {"old": {name: stream.measure(texts) for name, texts in old.items()}}
    ]
    print(record[0], flush=True)
    for number, source in enumerate(streams):
        stored = entries(source, stream.layers)
        for begin in range(0, len(stored) - settings.shard + 1, settings.shard):
            texts = [entry.read() for entry in stored[begin : begin + settings.shard]]
            texts = [dataclasses.replace(t, key=t.key._replace(shard=number)) for t in texts]
            tau = stream.measure(texts[: settings.measured])
            seconds, report = stream.learn(texts)
            taus = {name: stream.measure(kept) for name, kept in old.items()}
            line = {"stream": source, "tau": tau, "seconds": round(seconds, 2), "old": taus}
            record.append({**line, "round": report and dataclasses.asdict(report)})
            print(line, report and report.describe(), flush=True)
    return {"settings": dataclasses.asdict(settings), "streams": streams, "shards": record}


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--stream", action="append", required=True, help="STORE[:TEXTS]")
    parser.add_argument("--old", action="append", default=[], help="STORE[:TEXTS]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--name", default="", help="of the run, in the results")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    settings = Settings()
    settings.override(given.set)
    torch.set_num_threads(settings.threads)
    found = run(given.model, given.drafter, given.stream, given.old, settings)
    with given.out.open("a") as file:
        file.write(json.dumps({"name": given.name, **found}) + "\n")


if __name__ == "__main__":
    main()
