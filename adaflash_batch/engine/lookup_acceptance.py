"""How far proposals of the lookup are likely to be right, learnt from how far earlier ones were.

A proposal falls into a bucket by its source, the length of its match and its support. For each
bucket the hazard, the share of those right so far that go wrong here, is kept for the first token,
the second, the third and fourth, and those behind. What a bucket has seen too little of is filled
up from all supports of its length, and that from all lengths of its source.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

Source = Literal["own", "job"]
Bucket = tuple[Source, int, int]
Hazards = tuple[float, ...]

# Greedy texts of SmolLM2-135M-Instruct to mixed prompts (2026-11): what a source has before any
# observation, as the hazards of the four classes of positions.
_PRIOR: dict[Source, Hazards] = {
    "own": (0.40, 0.30, 0.25, 0.18),
    "job": (0.75, 0.65, 0.55, 0.40),
}
_CLASSES = (0, 1, 2, 2, 3)  # of the first positions; later ones are as the last of these
_NUM_CLASSES = 4
# Observations that what is filled up from weighs.
_STRENGTH = 12.0
# Observations of a bucket that it looks back on, about.
_SPAN = 1000.0
# Match lengths 0 to 10 in groups.
_LENGTHS = (1, 1, 2, 3, 4, 5, 5, 7, 7, 7, 10)


class Proposal(NamedTuple):
    """Tokens that may come next.

    Attributes:
        token_ids: at least one.
        match_length: last tokens of the text that stood before them where they were found.
        source: found in the request's own text, or in a finished one of the job.
        support: how often of late the job's texts went on with the first of them, 0 to 3.
    """

    token_ids: list[int]
    match_length: int
    source: Source
    support: int

    @property
    def bucket(self) -> Bucket:
        """Source, match length (1, 2, 3, 4, 5-6, 7-9 and 10 and more) and support."""
        return self.source, _LENGTHS[min(self.match_length, 10)], self.support


class _Cell:
    """Trials and misses by class of positions; old ones count less and less."""

    __slots__ = ("misses", "trials")

    def __init__(self) -> None:
        self.trials, self.misses = [0.0] * _NUM_CLASSES, [0.0] * _NUM_CLASSES

    def hazards(self, prior: Hazards) -> Hazards:
        return tuple(
            (missed + _STRENGTH * before) / (tried + _STRENGTH)
            for tried, missed, before in zip(self.trials, self.misses, prior, strict=True)
        )

    def observe(self, seen: Iterable[tuple[int, int, int]]) -> None:
        for place, trials, missed in seen:
            # Each class forgets by what it sees itself, or those that see little would know little.
            kept = max(1.0 - trials / _SPAN, 0.0)
            self.trials[place] = kept * self.trials[place] + trials
            self.misses[place] = kept * self.misses[place] + missed


class LookupAcceptance:
    """Predicts how far a proposal is right; deterministic given what it has observed."""

    def __init__(self) -> None:
        self._cells: dict[tuple[Source | int, ...], _Cell] = {}
        self._survival: dict[tuple[Bucket, int], list[float]] = {}  # since the last observation

    def survival(self, proposal: Proposal) -> list[float]:
        """How likely tokens 0..i are all right, for each i; never rising."""
        return self._predicted(proposal).copy()

    def expected(self, proposal: Proposal) -> float:
        """How many of its tokens are accepted, in the mean, if all are verified."""
        return sum(self._predicted(proposal))

    def observe(self, proposal: Proposal, accepted: int, known: int) -> None:
        """Compare a proposal with the text that came, whatever was verified of it.

        Args:
            accepted: its first tokens that are the text's, up to the first that is not.
            known: tokens of the text that it could be compared with, 0 to all of the proposal's;
                nothing is known of those behind.
        """
        assert 0 <= accepted <= known <= len(proposal.token_ids)
        seen = _seen(accepted, known)
        for key in _cells_of(proposal.bucket):
            cell = self._cells.get(key)
            if cell is None:
                cell = self._cells[key] = _Cell()
            cell.observe(seen)
        self._survival.clear()

    def _predicted(self, proposal: Proposal) -> list[float]:
        key = (proposal.bucket, len(proposal.token_ids))
        found = self._survival.get(key)
        if found is None:
            hazards = self._hazards(proposal.bucket)
            right = (1.0 - hazards[_class(position)] for position in range(key[1]))
            found = self._survival[key] = list(accumulate(right, float.__mul__))
        return found

    def _hazards(self, bucket: Bucket) -> Hazards:
        hazards = _PRIOR[bucket[0]]
        for key in _cells_of(bucket):
            if key in self._cells:
                hazards = self._cells[key].hazards(hazards)
        return hazards


def _class(position: int) -> int:
    return _CLASSES[min(position, len(_CLASSES) - 1)]


def _cells_of(bucket: Bucket) -> tuple[tuple[Source | int, ...], ...]:
    """From the widest to the bucket itself."""
    return bucket[:1], bucket[:2], bucket


@lru_cache(maxsize=1024)
def _seen(accepted: int, known: int) -> tuple[tuple[int, int, int], ...]:
    """The classes that an observation says something of: (class, trials, misses)."""
    tried = [_class(position) for position in range(min(accepted + 1, known))]
    missed = _class(accepted) if accepted < known else -1
    return tuple((place, tried.count(place), int(place == missed)) for place in sorted({*tried}))
