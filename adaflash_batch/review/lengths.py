"""Numbers of tokens, counted by length: exact order statistics of any number of rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

_FIRST_EDGE = 16


@dataclass(frozen=True, slots=True)
class Bar:
    """How many lengths are between two, both included."""

    first: int
    last: int
    count: int


class Lengths:
    """Takes lengths one by one; memory grows with how many different ones there are."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, length: int, times: int = 1) -> None:
        """Count a length, so many times."""
        self._counts[length] += times

    @property
    def count(self) -> int:
        """How many were counted."""
        return self._counts.total()

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(length * times for length, times in self._counts.items())

    def at(self, share: float) -> int:
        """The least length that this share of all does not exceed; 0 of none."""
        wanted, seen = share * self.count, 0
        for length in sorted(self._counts):
            seen += self._counts[length]
            if seen >= wanted:
                return length
        return 0

    def bars(self) -> list[Bar]:
        """A histogram whose bars double in width: 1 to 16, 17 to 32, 33 to 64, …"""
        if not self._counts:
            return []
        edges = [0, _FIRST_EDGE]
        while edges[-1] < max(self._counts):
            edges.append(2 * edges[-1])
        within = [
            Bar(low + 1, high, sum(n for length, n in self._counts.items() if low < length <= high))
            for low, high in pairwise(edges)
        ]
        while not within[0].count:
            within.pop(0)
        return within

    def to_json(self) -> dict[str, int]:
        """The figures that people ask for."""
        return {
            "min": self.at(0.0),
            "median": self.at(0.5),
            "p90": self.at(0.9),
            "p99": self.at(0.99),
            "max": self.at(1.0),
            "total": self.total,
        }


@dataclass(slots=True)
class Work:
    """What rows ask of a decoder.

    Attributes:
        rows: that can be served.
        requests: their samples.
        prompt_tokens: of all requests.
        completion_tokens: at the most.
        prompts: tokens of each row's prompt, after truncation.
        limits: tokens that each request takes at its longest.
    """

    rows: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompts: Lengths = field(default_factory=Lengths)
    limits: Lengths = field(default_factory=Lengths)

    def add(self, num_tokens: int, max_new_tokens: int, samples: int) -> None:
        """Count a row."""
        self.rows += 1
        self.requests += samples
        self.prompt_tokens += num_tokens * samples
        self.completion_tokens += max_new_tokens * samples
        self.prompts.add(num_tokens)
        self.limits.add(num_tokens + max_new_tokens, samples)
