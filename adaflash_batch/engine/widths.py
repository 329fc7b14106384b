"""How many drafts of each request enter the target, chosen for the whole batch at once.

A step over R requests emits R tokens and, of every draft verified, S more: the chance that it and
all drafts before it are right (its survival). The n largest S of the batch cost what any n drafts
cost, so the best step is one of the prefixes of their descending order; all are looked at, since
costs are staircases and the first fall says little. Drafts are argmax ones, so no choice of widths
can change a text (DSpark, arXiv 2607.05147, stops at the first fall since its drafts are sampled).

# R requests, K drafts of a request at most
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_LEAST_SECONDS = 1e-12


@dataclass(frozen=True, slots=True)
class Widths:
    """A choice, and what it promises.

    Attributes:
        widths: drafts to verify of each request.
        emitted: tokens that the step is expected to emit.
        seconds: that it is expected to take.
        plain_seconds: that it would take if nothing were verified.
    """

    widths: list[int]
    emitted: float
    seconds: float
    plain_seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens a second."""
        return self.emitted / max(self.seconds, _LEAST_SECONDS)


def choose_widths(
    survivals: Sequence[Sequence[float]] | Floats, seconds: Callable[[Integers], Floats]
) -> Widths:
    """The widths of most expected tokens a second.

    Of equal choices it takes the one with the fewest drafts; of equal drafts those further ahead in
    their blocks, then those of the requests that come first.

    Args:
        survivals: of each request, how likely drafts 0..i are all right; where one is higher than
            that before it, it counts as that one. Lists, or an array [R, K].
        seconds: what the step takes with n drafts in it, for an array of n; never less for more.
    """
    table = _table(survivals)
    return _best(table, seconds(np.arange(table.size + 1)))


def _best(table: Floats, seconds: Floats) -> Widths:
    """The choice, of rows [R, K] that fall and seconds [R * K + 1]."""
    # Drafts in the order of their places in the block: a stable sort keeps that among equals.
    flat = table.T.ravel()
    order = np.argsort(-flat, kind="stable")
    order = order[: int(np.count_nonzero(flat > 0.0))]
    emitted = len(table) + np.concatenate(([0.0], np.cumsum(flat[order])))
    taken = np.maximum(seconds[: len(emitted)], _LEAST_SECONDS)
    best = int(np.argmax(emitted / taken))
    widths = np.bincount(order[:best] % max(len(table), 1), minlength=len(table))
    return Widths(widths.tolist(), float(emitted[best]), float(taken[best]), float(taken[0]))


def adaflash_width(length: float, num_drafts: int) -> int:
    """Drafts to verify by AdaFlash's scalar head: clamp(floor(b * k), 1, k), less the anchor.

    Args:
        length: b, the share of the block that is worth verifying. The block of k = `num_drafts` + 1
            tokens counts the anchor, and so does the head's label, (accepted + 1) / k: a width of 1
            in the paper (arXiv 2607.23219) is the anchor alone, which is no draft.
    """
    block = num_drafts + 1
    # Products like 0.29 * 100 come out below the whole number that they stand for.
    return min(max(int(length * block + 1e-9), 1), block) - 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """For whom the drafter is run, and the step that is expected to come of it.

    Attributes:
        requests: their places in the batch, ascending.
        step: with the widths that the expectations lead to.
        without: the step that is expected if it runs for nobody.
    """

    requests: list[int]
    step: Widths
    without: Widths


def who_drafts(
    drafted: Sequence[Sequence[float]],
    free: Sequence[Sequence[float]],
    draft_seconds: Callable[[Integers], Floats],
    seconds: Callable[[Integers], Floats],
) -> Drafting:
    """For which requests a pass of the drafter pays, before it has run.

    Looked at are the m requests whose drafts are expected to bring most over what they have for
    free, for m of 0, the powers of two, and all. Of equal choices it takes the fewest requests.

    Args:
        drafted: the survival to be expected of each request's drafts, by what was seen of late.
        free: that of the drafts which each has without the drafter (lookup); empty where none.
        draft_seconds: what drafting for m requests takes, for an array of m.
        seconds: what the step takes besides with n drafts in it, see `choose_widths`.
    """
    bought, owned = _table(drafted), _table(free)
    gains = bought.sum(axis=1) - owned.sum(axis=1)
    order = np.argsort(-gains, kind="stable")[: int(np.count_nonzero(gains > 0.0))]
    sizes = _levels(len(order))
    prices = draft_seconds(np.array(sizes, dtype=np.int64)).tolist()
    verifying = seconds(np.arange(max(bought.shape[1], owned.shape[1]) * len(owned) + 1))
    best: Drafting | None = None
    without: Widths | None = None
    for size, price in zip(sizes, prices, strict=True):
        chosen = np.sort(order[:size])
        step = _best(_mixed(bought, owned, chosen), verifying + (price if size else 0.0))
        without = without or step  # the first size is 0
        if best is None or step.speed > best.step.speed:
            best = Drafting(chosen.tolist(), step, without)
    assert best is not None
    return best


def _mixed(bought: Floats, owned: Floats, chosen: Integers) -> Floats:
    """The survival of each request, of its own drafts or of the drafter's."""
    table = np.zeros((len(owned), max(owned.shape[1], bought.shape[1])))
    table[:, : owned.shape[1]] = owned
    table[chosen] = 0.0
    table[chosen, : bought.shape[1]] = bought[chosen]
    return table


def _levels(most: int) -> list[int]:
    """0, the powers of two below the most, and the most."""
    return [
        0,
        *(1 << power for power in range(max(most - 1, 0).bit_length())),
        *[most] * (most > 0),
    ]


def _table(survivals: Sequence[Sequence[float]] | Floats) -> Floats:
    """[R, K], each row falling from at most 1 on, with zeros behind those that are shorter.

    What is not a number counts as 0.
    """
    if not isinstance(survivals, np.ndarray):
        lengths = np.fromiter(map(len, survivals), dtype=np.int64, count=len(survivals))
        padded = np.zeros((len(survivals), int(lengths.max(initial=0))))
        is_there = np.arange(padded.shape[1]) < lengths[:, None]
        padded[is_there] = np.fromiter(chain.from_iterable(survivals), dtype=np.float64)
        survivals = padded
    bounded = np.clip(np.nan_to_num(survivals, nan=0.0), 0.0, 1.0)
    falling: Floats = np.minimum.accumulate(bounded, axis=1)
    return falling
