"""Seconds against a count (tokens, requests): a curve that never falls, learnt as it is used.

What was observed is kept, the last of each bin of counts: every count up to 32 is a bin, above it
16 make an octave and end where tiles of matrix kernels do, so that a staircase is seen as one. A
bin's level is a median, levels that fall are pooled (isotonic regression in the L1 norm), between
bins it is linear and beyond them a linear law goes on. What is spent on other work that steps of
one count differ in (keys read, rows of logits) is told from differences within bins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_FINE = 32
_PER_OCTAVE = 16
_NUM_BINS = _FINE + 9 * _PER_OCTAVE  # up to 16384
_END = float(1 << 20)
_REMEMBERED = 24
# Settled observations that make a bin's level one to measure others by.
_ENOUGH = 3
# A count between two such bins is known too, where they are no further apart than this.
_NEAR = 1.5
_REFIT_EVERY = 8
# Counts at which the part of the cost that grows is the fixed one's equal, before much is seen.
_EVEN = 64.0
# How much that is trusted against what is seen, and the slopes' zero against differences in bins.
_LAW_TRUST = 0.25
_SLOPE_TRUST = 0.2
# Differences within a bin count up to this share of its level, so that no outlier makes a slope.
_MOST_DIFFERENCE = 0.5
_LEAST_SHARE = 0.05


def bin_of(count: int) -> int:
    """The bin of a count, which is 1 or more."""
    if count <= _FINE:
        return count - 1
    octave = (count - 1).bit_length() - _FINE.bit_length()
    place = (count - 1 - (_FINE << octave)) // ((_FINE << octave) // _PER_OCTAVE)
    return min(_FINE + _PER_OCTAVE * octave + place, _NUM_BINS - 1)


class CostCurve:
    """seconds(count, work) = level(count) + slopes · work, on a machine of constant speed.

    Args:
        num_works: kinds of work besides the count; their slopes are never negative.
    """

    def __init__(self, num_works: int = 0) -> None:
        shape = (_NUM_BINS, _REMEMBERED)
        self._seconds = np.full(shape, np.inf)
        self._counts = np.zeros(shape)
        self._work = np.zeros((*shape, num_works))
        self._settled = np.zeros(shape, dtype=np.bool_)
        self._seen = np.zeros(_NUM_BINS, dtype=np.int64)
        self._slopes = np.zeros(num_works)
        self._x, self._y = np.array([1.0, _END]), np.zeros(2)
        # The same, for single counts.
        self._points: tuple[list[float], list[float]] = self._x.tolist(), self._y.tolist()
        self._known = np.zeros(0)  # counts of the bins with enough that is settled
        self._unfitted = 0

    @property
    def num_seen(self) -> int:
        """Observations so far."""
        return int(self._seen.sum())

    def add(self, count: int, work: Sequence[float], seconds: float) -> tuple[int, int]:
        """Keep an observation; it says little until `settle` has said what it is worth."""
        row = bin_of(count)
        place = row, int(self._seen[row]) % _REMEMBERED
        self._seen[row] += 1
        self._seconds[place], self._counts[place], self._work[place] = seconds, count, work
        self._settled[place] = False
        self._unfitted += _REFIT_EVERY if self._settled[row].sum() < _ENOUGH else 1
        return place

    def settle(self, place: tuple[int, int], seconds: float) -> None:
        """What an observation was on a machine of constant speed is certain now."""
        self._seconds[place], self._settled[place] = seconds, True
        if self._settled[place[0]].sum() <= _ENOUGH:
            self._unfitted += _REFIT_EVERY

    def is_near(self, count: int) -> bool:
        """Whether enough was seen at this count, or close by on both sides."""
        self._refit()
        after = int(np.searchsorted(self._known, count))
        around = self._known[max(after - 1, 0) : after + 1]
        if any(bin_of(round(each)) == bin_of(count) for each in around.tolist()):
            return True
        return len(around) == 2 and bool(around[0] <= count <= around[1] <= _NEAR * around[0])

    def seconds(self, counts: npt.ArrayLike, works: Sequence[npt.ArrayLike] = ()) -> Floats:
        """Predictions for arrays that broadcast together; 0 before anything was seen."""
        self._refit()
        total: Floats = np.interp(np.asarray(counts, dtype=np.float64), self._x, self._y)
        for slope, work in zip(self._slopes.tolist(), works, strict=True):
            total = total + slope * np.asarray(work, dtype=np.float64)
        return total

    def at(self, count: int) -> float:
        """`seconds` of one count without other work: numpy takes many times as long for one."""
        self._refit()
        x, y = self._points
        after = min(max(bisect_left(x, count), 1), len(x) - 1)
        share = (count - x[after - 1]) / (x[after] - x[after - 1])
        return y[after - 1] + min(max(share, 0.0), 1.0) * (y[after] - y[after - 1])

    def rows(self, most: int) -> list[list[float]]:
        """The last that was observed in each bin, oldest first: count, seconds, work."""
        found = []
        for row in np.nonzero(self._seen)[0].tolist():
            seen = int(self._seen[row])
            for turn in range(max(seen - most, seen - _REMEMBERED, 0), seen):
                place = row, turn % _REMEMBERED
                pair = [float(self._counts[place]), float(self._seconds[place])]
                found.append([*pair, *self._work[place].tolist()])
        return found

    def _refit(self) -> None:
        if self._unfitted < _REFIT_EVERY:
            return
        self._unfitted = 0
        bins = np.nonzero(self._seen)[0]
        used = np.isfinite(self._seconds[bins])
        is_known = self._settled[bins].sum(axis=1) >= _ENOUGH
        used &= self._settled[bins] | ~is_known[:, None]
        weights = used.sum(axis=1)
        if len(self._slopes):
            self._fit_slopes(bins, used)
        levels = _medians(self._without_work(bins), used)
        x = (self._counts[bins] * used).sum(axis=1) / weights
        self._known = x[is_known]
        self._x, self._y = _with_ends(x, rising(levels, weights))
        self._points = self._x.tolist(), self._y.tolist()

    def _without_work(self, bins: npt.NDArray[np.int64]) -> Floats:
        seconds = self._seconds[bins]
        rest: Floats = np.maximum(seconds - self._work[bins] @ self._slopes, _LEAST_SHARE * seconds)
        return rest

    def _fit_slopes(self, bins: npt.NDArray[np.int64], used: Bools) -> None:
        """Least squares of differences within bins, as shares of the bin's level."""
        level = _medians(self._seconds[bins], used)[:, None]
        rest = self._without_work(bins)
        rest = np.where(used, rest - _medians(rest, used)[:, None], 0.0) / level
        work = self._work[bins] / level[:, :, None]
        center = (work * used[:, :, None]).sum(axis=1) / used.sum(axis=1)[:, None]
        work = (work - center[:, None, :])[used]
        clipped = np.clip(rest[used], -_MOST_DIFFERENCE, _MOST_DIFFERENCE) + work @ self._slopes
        squares = work.T @ work + np.diag(_SLOPE_TRUST * (center**2).mean(axis=0) + 1e-30)
        self._slopes = _non_negative(squares, work.T @ clipped)


def _non_negative(squares: Floats, products: Floats) -> Floats:
    """Solve the normal equations; a slope that would be negative is left out."""
    slopes, free = np.zeros(len(products)), np.ones(len(products), dtype=np.bool_)
    while free.any():
        solved = np.linalg.solve(squares[np.ix_(free, free)], products[free])
        if (solved >= 0.0).all():
            slopes[free] = solved
            break
        free[np.nonzero(free)[0][int(solved.argmin())]] = False
    return slopes


def _medians(values: Floats, used: Bools) -> Floats:
    """The lower median of each row's used values: of two, the step that nothing disturbed."""
    ordered = np.sort(np.where(used, values, np.inf), axis=1)
    middle = (used.sum(axis=1) - 1) // 2
    medians: Floats = ordered[np.arange(len(values)), middle]
    return medians


def rising(levels: Floats, weights: npt.NDArray[np.int64]) -> Floats:
    """The curve that never falls with the least sum of weighted absolute differences."""
    blocks: list[list[tuple[float, int]]] = []
    heights: list[float] = []
    for pair in zip(levels.tolist(), weights.tolist(), strict=True):
        block, height = [pair], pair[0]
        while heights and heights[-1] > height:
            heights.pop()
            block = blocks.pop() + block
            height = _weighted_median(block)
        blocks.append(block)
        heights.append(height)
    return np.repeat(heights, [len(block) for block in blocks])


def _weighted_median(pairs: list[tuple[float, int]]) -> float:
    ordered = sorted(pairs)
    below = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(below, below[-1] / 2.0)][0]


def _with_ends(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The points with one more on each side, by a linear law through those of that side."""
    first = _slope(x, y, 0, x <= 4.0 * x[0])
    first = min(first, float(y[0] / x[0]))  # so that nothing costs less than in proportion
    last = _slope(x, y, -1, x >= x[-1] / 4.0)
    left, right = y[0] - first * (x[0] - 1.0), y[-1] + last * (_END - x[-1])
    if x[0] <= 1.0:
        return np.append(x, _END), np.append(y, right)
    return np.concatenate(([1.0], x, [_END])), np.concatenate(([left], y, [right]))


def _slope(x: Floats, y: Floats, end: int, near: Bools) -> float:
    """Least squares through the end point, drawn towards what is usual."""
    dx, dy = x[near] - x[end], y[near] - y[end]
    trust = _LAW_TRUST * x[end] ** 2
    usual = y[end] / (x[end] + _EVEN)
    return float((dx @ dy + trust * usual) / (dx @ dx + trust))
