"""What a drafter's folder holds, in lines for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.versions import VERSION, Version, VersionStore, read_version
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.training.card import count_layers, table

_TITLES = ("", "version", "parent", "created", "why", "rows", "updates", "held-out τ", "job")


def describe(folder: Path) -> Iterator[str]:
    """Member, shape, size, target, and how it was trained. Raises ConfigError for no drafter."""
    view = checkpoint.inspect(folder)
    config = view.config
    yield f"{folder}: a {config.member} drafter, sha256 {checkpoint.identity(folder)[:16]}"
    drafts = "the anchor's slot drafts too" if config.from_anchor else "the anchor's slot does not"
    yield f"block: {config.block_size} rows, {config.num_drafts} drafts ({drafts})"
    yield (
        f"net: {count_layers(config)}, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads of {config.head_dim} "
        f"({config.num_key_value_heads} for keys), MLP {config.intermediate_size}"
    )
    if config.markov_rank:
        yield f"Markov head: {config.markov_head_type}, rank {config.markov_rank}"
    if config.has_input_projection:
        yield "input projection: the last state and the anchor in every row; not a published part"
    if config.enable_confidence_head:
        yield "confidence head: how likely each draft is accepted behind those before it"
    if config.length_head:
        hidden = f", {config.length_head_width} wide" if config.length_head_width else ", linear"
        yield f"length head: {config.length_head}{hidden}; not a published part"
    if config.conv_kernel_size:
        yield (
            f"convolution of {config.conv_kernel_size} taps, selector of rank "
            f"{config.selector_rank} among {config.selector_top_k} candidates"
        )
    yield f"size: {view.num_parameters / 1e6:.1f} M parameters, {view.num_bytes / 2**20:.1f} MiB"
    yield (
        f"target: {config.num_target_layers} layers, hidden {config.hidden_size}, vocabulary "
        f"{config.vocab_size}; reads layers {', '.join(map(str, config.target_layer_ids))}; "
        f"mask token {config.mask_token_id}"
    )
    tokens = load_vocabulary(folder, config)
    if tokens is not None:
        yield f"draft vocabulary: {len(tokens)} of the target's {config.vocab_size} tokens"
    if (folder / VERSION).exists():
        yield _version(read_version(folder))
    yield from _training(view.own)


def describe_versions(folder: Path) -> Iterator[str]:
    """A line for each version in a folder of them, below a line of titles."""
    store = VersionStore(folder)
    current = store.current()
    rows: list[tuple[str, ...]] = [_TITLES]
    for number in store.numbers():
        rows.append(("*" if number == current else "", *_cells(store.read(number))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _cells(version: Version) -> tuple[str, ...]:
    learnt = version.learnt
    return (
        str(version.number),
        "-" if version.parent is None else str(version.parent),
        version.created,
        learnt.why,
        str(learnt.rows),
        str(learnt.updates),
        f"{_tau(learnt.tau_before)} -> {_tau(learnt.tau_after)}",
        learnt.job or "-",
    )


def _tau(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _version(version: Version) -> str:
    learnt = version.learnt
    after = "" if version.parent is None else f" after version {version.parent}"
    job = "" if learnt.job is None else f" by {learnt.job}"
    return (
        f"version {version.number}: {learnt.why}{after}{job} at {version.created}; "
        f"{learnt.rows} rows, {learnt.tokens} tokens, {learnt.updates} updates; "
        f"held-out τ {_tau(learnt.tau_before)} -> {_tau(learnt.tau_after)}"
    )


def _training(own: Mapping[str, Any]) -> Iterator[str]:
    summary = own.get("summary")
    if not isinstance(summary, dict):
        yield "training: not told"
        return
    yield f"trained for {own.get('target')}"
    held_out = summary.get("held_out") or {}
    yield "training: " + json.dumps({k: v for k, v in summary.items() if k != "held_out"})
    if held_out:
        yield from table(held_out)
