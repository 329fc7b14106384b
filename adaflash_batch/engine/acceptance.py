"""What drafts of late were worth.

A block of drafts is compared with the text that came behind its anchor (hindsight), however few of
them were verified. It is accepted up to the first that differs, so each place of the block that was
reached says whether one more draft was right. Where the text ends before the block does the rest is
not known and counts neither way: the estimate is Kaplan and Meier's, with forgetting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

# Blocks that the shared curve looks back on, and tries that a request's record does.
_SPAN = 1000.0
_OWN_SPAN = 100.0
# The first draft's chance before any was seen, and the tries that this (or, further back in the
# block, the chance at the place before) counts as. It is high so that drafting is tried.
_FIRST_CHANCE = 0.9
_PRIOR_TRIES = 4.0
# Tries of old weights that still count once there are new ones.
_KEPT_TRIES = 8.0
# Tries that the shared curve counts as beside a request's own.
_SHARED_TRIES = 12.0
_MOST_SHIFT = 8.0
# Blocks after which records are held against a newer curve.
_MOST_AGE = 32
_LEAST_CHANCE, _MOST_CHANCE = 0.001, 0.999


@dataclass(slots=True)
class RequestRecord:
    """How the drafts of one request fared against those of all, older ones counting less.

    Attributes:
        tries: places of its blocks that were reached and known.
        passed: of them, those whose draft was right.
        expected: those that would have been by the shared curve.
    """

    tries: float = 0.0
    passed: float = 0.0
    expected: float = 0.0

    @property
    def shift(self) -> float:
        """The power to which its survival is the shared one: above 1 where it fares worse.

        Its chance of one more right draft is a posterior mean that begins at the shared chance.
        """
        if self.tries == 0.0:
            return 1.0
        shared = _bounded(self.expected / self.tries)
        own = (self.passed + _SHARED_TRIES * shared) / (self.tries + _SHARED_TRIES)
        shift = math.log(_bounded(own)) / math.log(shared)
        return min(max(shift, 1.0 / _MOST_SHIFT), _MOST_SHIFT)


class AcceptanceHistory:
    """The survival curve of a source of drafts, and how single requests differ from it.

    Args:
        num_drafts: in a block.
    """

    def __init__(self, num_drafts: int) -> None:
        self._tries = [0.0] * num_drafts
        self._passed = [0.0] * num_drafts
        self._chances = [_FIRST_CHANCE] * num_drafts
        self._age = 0  # blocks that came since these were told

    def observe(self, record: RequestRecord | None, accepted: int, known: int) -> None:
        """Take in a block of a request.

        Args:
            record: of the request, updated too.
            accepted: drafts that the text went on with; at most `known`.
            known: drafts whose place the text has reached.
        """
        known = min(known, len(self._tries))
        reached = min(accepted + 1, known)
        if record is not None and reached > 0:
            _count(record, self._fresh(_MOST_AGE)[:reached], min(accepted, known))
        # Places seldom reached forget as fast as the rest, lest they speak of other times.
        keep = 1.0 - (reached > 0) / _SPAN
        for place in range(len(self._tries)):
            self._tries[place] = self._tries[place] * keep + (place < reached)
            self._passed[place] = self._passed[place] * keep + (place < min(accepted, reached))
        self._age += 1

    def survival(
        self, record: RequestRecord | None = None, num_drafts: int | None = None
    ) -> list[float]:
        """How likely drafts 0..i of a block are all right, for each i.

        Args:
            record: of the request that it is for; None for any of them.
            num_drafts: first drafts wanted; None wants all.
        """
        curve = accumulate(self._fresh(0)[:num_drafts], mul)
        shift = 1.0 if record is None else record.shift
        return [chance**shift for chance in curve]

    @property
    def tau(self) -> float:
        """Tokens that a step is expected to emit of a request, all drafts verified."""
        return 1.0 + sum(self.survival())

    def expect_change(self) -> None:
        """The drafts come from other weights: what was seen says little now."""
        for place, tries in enumerate(self._tries):
            keep = min(1.0, _KEPT_TRIES / tries) if tries else 1.0
            self._tries[place] *= keep
            self._passed[place] *= keep
        self._age += _MOST_AGE + 1

    def _fresh(self, most_age: int) -> list[float]:
        """At each place: how likely its draft is right, if all before it are."""
        if self._age <= most_age:
            return self._chances
        chances, chance = [], _FIRST_CHANCE
        for tries, passed in zip(self._tries, self._passed, strict=True):
            chance = (passed + _PRIOR_TRIES * chance) / (tries + _PRIOR_TRIES)
            chances.append(chance)
        self._chances, self._age = chances, 0
        return chances


def _count(record: RequestRecord, chances: Sequence[float], accepted: int) -> None:
    keep = math.exp(-len(chances) / _OWN_SPAN)
    record.tries = record.tries * keep + len(chances)
    record.passed = record.passed * keep + accepted
    record.expected = record.expected * keep + sum(chances)


def _bounded(chance: float) -> float:
    return min(max(chance, _LEAST_CHANCE), _MOST_CHANCE)
