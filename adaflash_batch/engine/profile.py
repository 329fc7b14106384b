"""A short measurement of what steps take here, for a machine and model that nothing is known of.

Passes are made over one page again and again: what they compute does not matter, and requests
write to their pages before they read them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.device_drafting import DeviceDrafter
from adaflash_batch.engine.drafting import DraftBatch, Drafter
from adaflash_batch.engine.machine import processor
from adaflash_batch.engine.packing import Packed
from adaflash_batch.engine.passes import Passes
from adaflash_batch.engine.sampling import ChoiceBlock
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import RowKey, Sampling

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Larger passes are made once, smaller ones until chance is gone from the median.
_REPEATS, _MANY_TOKENS = 3, 64
_MOST_SECONDS = 2.5
# What is known is looked over at sizes up to so many tokens, so often, the fastest time counting; a
# size that is further off than this from what the others are contradicts it.
_SMALL, _LOOKS, _FAR = 32, 3, 1.5
_PROMPT_SHARE = 64  # a prompt's piece wants logits of one token in so many


@torch.inference_mode()
def profile(
    cost: StepCost,
    target: Target,
    passes: Passes,
    drafter: Drafter | None,
    *,
    most_tokens: int,
    most_requests: int,
    clock: Callable[[], float],
) -> None:
    """Time passes of growing size and let `cost` observe them, then the drafter's.

    What was kept of the target's passes is only looked over, and forgotten where the machine
    contradicts it; drafts are measured anew every time. A price that was found on a busier machine
    would never be found wrong by steps: at that price nothing is drafted.

    Args:
        passes: with KV memory of one page or more that no request uses.
        most_tokens: of a step.
        most_requests: at once.
        clock: seconds.
    """
    num_tokens = target.num_forward_tokens
    _pass(passes, 1, 1)  # what is set up at first use is no step's cost
    if cost.is_known and not _agrees(cost, passes, most_tokens, clock):
        cost.forget()
    if not cost.is_known:
        _profile_target(cost, passes, most_tokens, clock)
    target.num_forward_tokens = num_tokens
    if drafter is not None:
        cost.forget_drafts()
        _profile_drafts(cost, drafter, most_requests, clock)


def _profile_target(
    cost: StepCost, passes: Passes, most_tokens: int, clock: Callable[[], float]
) -> None:
    for size, num_rows, seconds in _timed(passes, _passes(most_tokens), _MOST_SECONDS, clock):
        cost.observe_target(size, num_rows, size * PAGE, seconds)


def _agrees(cost: StepCost, passes: Passes, most_tokens: int, clock: Callable[[], float]) -> bool:
    """Whether small passes cost one another what is known of them; `cost` learns the pace."""
    sizes = [size for size in _SIZES if size <= min(most_tokens, _SMALL)]
    known = {size: max(float(cost.target(size, size, size * PAGE)), 1e-12) for size in sizes}
    ratios: dict[int, float] = {}
    looks = ((size, size) for size in sizes * _LOOKS)
    for size, _, seconds in _timed(passes, looks, _MOST_SECONDS / 4, clock):
        ratios[size] = min(ratios.get(size, math.inf), seconds / known[size])
    pace = statistics.median(ratios.values())
    cost.change_pace(pace)
    return all(pace / _FAR < ratio < pace * _FAR for ratio in ratios.values())


def _timed(
    passes: Passes,
    sizes: Iterable[tuple[int, int]],
    most_seconds: float,
    clock: Callable[[], float],
) -> Iterator[tuple[int, int, float]]:
    """Passes of (tokens, rows of logits), with the seconds of each, until they take too long."""
    began = clock()
    for size, num_rows in sizes:
        began += _warm_up(passes, size, num_rows, clock)
        yield size, num_rows, _pass(passes, size, num_rows)
        if clock() - began > most_seconds:
            return


def _profile_drafts(
    cost: StepCost, drafter: Drafter, most_requests: int, clock: Callable[[], float]
) -> None:
    drafter.draft(_batch(1))
    began = clock()
    for size in [size for size in _SIZES if size <= most_requests]:
        for _ in range(_REPEATS if size <= _MANY_TOKENS // 4 else 1):
            cost.observe_draft(size, _draft(drafter, size, clock))
        if clock() - began > _MOST_SECONDS / 4:
            break


def _warm_up(passes: Passes, num_tokens: int, num_rows: int, clock: Callable[[], float]) -> float:
    """Let kernels be compiled and a graph be made, where there are such; seconds that it took."""
    if not passes.runs_ahead:
        return 0.0
    began = clock()
    for _ in range(2):
        _pass(passes, num_tokens, num_rows)
    return clock() - began


def _draft(drafter: Drafter, num_requests: int, clock: Callable[[], float]) -> float:
    """Draft once; seconds."""
    if not isinstance(drafter, DeviceDrafter):
        began = clock()
        drafter.draft(_batch(num_requests))
        return clock() - began
    for _ in range(3):  # as it is, as a graph is made, and from it
        drafter.draft(_batch(num_requests))
    return drafter.take_seconds()[-1][1]


def _passes(most_tokens: int) -> Iterator[tuple[int, int]]:
    """(tokens, rows of logits): decoding wants all of them, a prompt few."""
    # Round by round: where the machine changes its pace, it does so for all sizes.
    for turn in range(_REPEATS):
        for size in [size for size in _SIZES if size <= most_tokens]:
            if turn == 0 or size <= _MANY_TOKENS:
                yield size, size
            if turn == 0 and size >= _MANY_TOKENS:
                yield size, size // _PROMPT_SHARE


def _pass(passes: Passes, num_tokens: int, num_rows: int) -> float:
    """As many requests as tokens, each at the last place of the first page; seconds."""
    ones = np.ones(num_tokens, dtype=np.int32)
    packed = Packed(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.full(num_tokens, PAGE - 1, dtype=np.int64),
        start=np.arange(num_tokens, dtype=np.int32),
        length=ones,
        context=ones * (PAGE - 1),
        rows=np.arange(num_rows, dtype=np.int64),
    )
    table = np.zeros((num_tokens, 1), dtype=np.int32)
    blocks = [ChoiceBlock(Sampling(), None, (), (0, 0), 0)] * num_rows
    begun = passes.begin(packed, table, blocks, np.empty(0, dtype=np.int32))
    begun.land()
    return begun.seconds


def _batch(num_requests: int) -> DraftBatch:
    return DraftBatch(
        keys=[RowKey(0, 0, 0)] * num_requests,
        anchors=[0] * num_requests,
        positions=np.ones(num_requests, dtype=np.int32),
        table=np.zeros((num_requests, 2), dtype=np.int32),
    )


def about(target: Target, drafter: str) -> str:
    """What the figures hold for: machine, kernels, shapes of target and drafter, as JSON."""
    device = target.device
    facts = {
        "machine": processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "attention": target.attention_note() or "fast",
        "kernels": target.kernels.kind,
        "products": target.product_kinds(),
        "dtype": str(target.dtype),
        "target": [target.name, target.num_layers, target.hidden_size, target.vocab_size],
        "drafter": drafter,
        "torch": torch.__version__,
    }
    return json.dumps(facts, sort_keys=True)
