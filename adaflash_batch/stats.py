"""Counters of speculation and the ratios made of them; the same for rows, shards and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

_NUM_BINS = 10


@dataclass(slots=True)
class SpeculationCounts:
    """What speculation did. A step is one verification of one request (prefill is none).

    Attributes:
        steps: verifications, those with no draft token included.
        drafted: tokens that a drafter proposed.
        verified: draft tokens that entered the target.
        accepted: draft tokens kept. The bonus token is not one, and nothing past the end of the
            text counts, so accepted <= verified <= drafted.
        accepted_hist: accepted_hist[a] = steps that accepted exactly a draft tokens.
        verified_hist: verified_hist[w] = steps that verified exactly w of them.
        drafter_first: version of the drafter that first drafted for this, None if none did.
        drafter_last: the version that last did.
        drafting: steps in which a draft token was verified.
        lookup_steps: those of them whose drafts were looked up, not the drafter's.
        lookup_verified, lookup_accepted: of `verified` and `accepted`, what these steps did.
    """

    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_hist: list[int] = field(default_factory=list)
    drafter_first: int | None = None
    drafter_last: int | None = None
    drafting: int = 0
    verified_hist: list[int] = field(default_factory=list)
    lookup_steps: int = 0
    lookup_verified: int = 0
    lookup_accepted: int = 0

    def record(
        self, drafted: int, verified: int, accepted: int, *, is_lookup: bool = False
    ) -> None:
        """Count one step.

        Args:
            is_lookup: whether what was verified was looked up.
        """
        self.steps += 1
        self.drafting += verified > 0
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        _count(self.accepted_hist, accepted, 1)
        _count(self.verified_hist, verified, 1)
        if is_lookup and verified:
            self.lookup_steps += 1
            self.lookup_verified += verified
            self.lookup_accepted += accepted

    def mark(self, version: int | None) -> None:
        """This version of the drafter drafted for it."""
        if self.drafter_first is None:
            self.drafter_first = version
        self.drafter_last = version

    def add(self, other: SpeculationCounts) -> None:
        """Add another's counts to these."""
        self.steps += other.steps
        self.drafting += other.drafting
        self.drafted += other.drafted
        self.verified += other.verified
        self.accepted += other.accepted
        self.lookup_steps += other.lookup_steps
        self.lookup_verified += other.lookup_verified
        self.lookup_accepted += other.lookup_accepted
        for accepted, count in enumerate(other.accepted_hist):
            _count(self.accepted_hist, accepted, count)
        for verified, count in enumerate(other.verified_hist):
            _count(self.verified_hist, verified, count)
        if self.drafter_first is None:
            self.drafter_first = other.drafter_first
        if other.drafter_last is not None:
            self.drafter_last = other.drafter_last

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the verified draft tokens; None when none was verified.

        It rises when the width shrinks: never quote it without `emitted_per_step`.
        """
        return self.accepted / self.verified if self.verified else None

    @property
    def emitted_per_step(self) -> float | None:
        """Mean of accepted + 1 over the steps (tau); None before the first step."""
        return (self.accepted + self.steps) / self.steps if self.steps else None

    @property
    def emitted_per_drafting_step(self) -> float | None:
        """The same over the steps with drafts alone; None before the first of them."""
        return (self.accepted + self.drafting) / self.drafting if self.drafting else None

    @property
    def emitted_per_lookup_step(self) -> float | None:
        """The same over the steps whose drafts were looked up; None before the first of them."""
        if not self.lookup_steps:
            return None
        return (self.lookup_accepted + self.lookup_steps) / self.lookup_steps

    @property
    def emitted_per_block_step(self) -> float | None:
        """The same over the steps whose drafts were the drafter's; None before the first."""
        steps = self.drafting - self.lookup_steps
        return (self.accepted - self.lookup_accepted + steps) / steps if steps else None


def _count(histogram: list[int], value: int, times: int) -> None:
    missing = value + 1 - len(histogram)
    if missing > 0:
        histogram.extend([0] * missing)
    histogram[value] += times


class Reliability(TypedDict):
    """A point of a reliability curve.

    predicted: mean of what was predicted.
    happened: share that came true.
    count: predictions.
    """

    predicted: float
    happened: float
    count: int


@dataclass(slots=True)
class Calibration:
    """Whether predicted chances came true, in ten bins of the prediction.

    Attributes:
        counts, predicted, happened: of each bin: predictions, their sum, and what came true of
            them.
        squared: sum of the squared errors of all.
    """

    counts: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    happened: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    squared: float = 0.0

    def observe(self, predicted: float, happened: float) -> None:
        """Count a prediction from 0 to 1, of something that was so or not, or a share."""
        place = min(int(predicted * _NUM_BINS), _NUM_BINS - 1)
        self.counts[place] += 1
        self.predicted[place] += predicted
        self.happened[place] += happened
        self.squared += (predicted - happened) ** 2

    def observe_block(self, survival: Sequence[float], accepted: int, known: int) -> None:
        """Count a block's predictions, of the places at which the text has a token, no others."""
        for place, predicted in enumerate(survival[:known]):
            self.observe(predicted, place < accepted)

    def add(self, other: Calibration) -> None:
        """Add another's counts to these."""
        for place in range(_NUM_BINS):
            self.counts[place] += other.counts[place]
            self.predicted[place] += other.predicted[place]
            self.happened[place] += other.happened[place]
        self.squared += other.squared

    @property
    def ece(self) -> float | None:
        """Expected calibration error: the mean distance of the curve; None before anything."""
        total = sum(self.counts)
        pairs = zip(self.predicted, self.happened, strict=True)
        return sum(abs(p - h) for p, h in pairs) / total if total else None

    @property
    def mean_squared_error(self) -> float | None:
        """Of the predictions (Brier score); None before anything."""
        total = sum(self.counts)
        return self.squared / total if total else None

    def curve(self) -> list[Reliability]:
        """The bins that hold something, from the lowest on; plain JSON."""
        columns = zip(self.counts, self.predicted, self.happened, strict=True)
        return [
            {"predicted": predicted / count, "happened": happened / count, "count": count}
            for count, predicted, happened in columns
            if count
        ]
