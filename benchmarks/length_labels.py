"""Which label AdaFlash's scalar length head learns from: the one that its own widths cut, or not.

Usage: python benchmarks/length_labels.py --model DIR --drafter DIR --stream STORE[:TEXTS]
           --held-out STORE[:TEXTS] [--seeds 3] [--warm 4] [--rounds 12]
           [--set NAME=VALUE ...] [--save DIR] --out results.json

    truncated   what a verification of the width that the head asks for itself would show
    hindsight   what the text that followed shows, the same as a verification of the whole block

A fresh head on a frozen drafter is warmed up for some rounds with whole labels, as the paper's is.
Then it learns online, a round of updates a shard of texts, in the order of the stream
(learning_stream.py has the settings). After every round the held-out texts are walked
through as decoding would: a block at each anchor, as wide as the head says. Told are the mean width
of these steps, their distribution, accepted drafts, and tokens emitted a verified one. `--save`
keeps the heads of the first seed as drafters, for length_study.py to time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from learning_stream import Settings, Stream, entries, target_facts, target_table

from adaflash_batch.adapt.blocks import anchor_range
from adaflash_batch.adapt.evaluate import draft_behind
from adaflash_batch.adapt.objective import LengthLabel
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.growing import grow_length_head
from adaflash_batch.drafter.length import num_accepted
from adaflash_batch.engine.widths import adaflash_width
from adaflash_batch.exchange import Trajectory

LABELS: tuple[LengthLabel, ...] = ("truncated", "hindsight")
_AT_ONCE = 64


def blocks_of(stream: Stream, text: Trajectory) -> Iterator[tuple[int, float]]:
    """(accepted drafts of the whole block, what the head says) behind each generated token."""
    head, known = stream.head, anchor_range(text)
    anchors = torch.arange(max(text.prompt_length, known.start), known.stop)
    for part in torch.split(anchors, _AT_ONCE):
        right, told = draft_behind(
            stream.net,
            text,
            part,
            stream.table,
            lambda rows: F.linear(rows, head.weight),
            head.token_ids,
        )
        assert told.length is not None
        yield from zip(num_accepted(right).tolist(), told.length.tolist(), strict=True)


def walk(stream: Stream, texts: Sequence[Trajectory]) -> dict[str, Any]:
    """Decode the texts again, with widths by the head."""
    widths, accepted, steps = Counter[int](), 0, 0
    for text in texts:
        blocks, place = list(blocks_of(stream, text)), 0
        while place < len(blocks):
            whole, said = blocks[place]
            width = adaflash_width(said, stream.net.config.num_drafts)
            kept = min(whole, width)
            widths[width] += 1
            accepted, steps, place = accepted + kept, steps + 1, place + kept + 1
    verified = sum(width * count for width, count in widths.items())
    most = stream.net.config.num_drafts
    return {
        "width": round(verified / steps, 4),
        "tau": round(1 + accepted / steps, 4),
        "accepted_of_verified": round(accepted / verified, 4) if verified else None,
        "distribution": [round(widths[width] / steps, 4) for width in range(most + 1)],
    }


def learn(label: LengthLabel, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One head: the figures before the first round and after each."""
    settings = Settings(parameters="heads", seed=seed, objective="ce", rate=1e-3)
    settings.override(options.set)
    stream = Stream(options.model, options.grown, settings)
    held_out = [each.read() for each in entries(options.held_out, stream.layers)]
    stored = entries(options.stream, stream.layers)
    figures = []
    for number in range(-options.warm, options.rounds + 1):
        if number == 0:
            stream.learn_from(label)
        if number >= 0:
            figures.append(walk(stream, held_out))
            print(label, seed, number, figures[-1], flush=True)
        shard = stored[(number + options.warm) * settings.shard :][: settings.shard]
        if number < options.rounds:
            stream.learn_unjudged([each.read() for each in shard])
    if options.save and seed == 0:
        own = {"adaflash": dict(checkpoint.inspect(options.grown).own)}
        words = {f.name: f.read_bytes() for f in options.grown.glob("draft_vocabulary*")}
        checkpoint.save(stream.net, options.save / label, own, words)
    return figures


def grown(model: Path, drafter: Path, folder: Path) -> Path:
    """The drafter with a fresh scalar head."""
    view, facts = checkpoint.inspect(drafter), target_facts(model, drafter, target_table(model))
    net = checkpoint.load(drafter, facts, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    net = grow_length_head(net, generator, kind="adaflash", width=256).bfloat16()
    words = {f.name: f.read_bytes() for f in drafter.glob("draft_vocabulary*")}
    checkpoint.save(net, folder, {"adaflash": dict(view.own)}, words)
    return folder


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--stream", required=True, help="STORE[:TEXTS]")
    parser.add_argument("--held-out", required=True, help="STORE[:TEXTS]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=4, help="rounds")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--save", type=Path, help="folder for the heads of the first seed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(Settings().threads)
    options.grown = grown(options.model, options.drafter, options.out.with_suffix(".fresh"))
    found = {
        label: [learn(label, seed, options) for seed in range(options.seeds)] for label in LABELS
    }
    last = {
        f"{label} {name}": [statistics.fmean(v := [r[-1][name] for r in runs]), min(v), max(v)]
        for label, runs in found.items()
        for name in ("width", "tau")
    }
    print(json.dumps(last))
    settings = dataclasses.asdict(Settings())
    options.out.write_text(json.dumps({"settings": settings, "last": last, **found}, indent=1))


if __name__ == "__main__":
    main()
