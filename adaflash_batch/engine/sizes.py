"""How much a decoder does at once, and how much it has room for."""

from __future__ import annotations

from dataclasses import dataclass

from adaflash_batch.kernels.page_size import PAGE

MOST_LOOKED_UP = 7
"""Tokens that a lookup proposes at the most where there is no block to go by."""


def reserved_for(block_size: int, *, looks_up: bool) -> int:
    """Positions behind an anchor that a request's pages must cover.

    Args:
        block_size: the drafter's, 0 without one.
    """
    return max(block_size, MOST_LOOKED_UP + 1 if looks_up else 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder.

    Attributes:
        max_running: most requests in a step.
        token_budget: most tokens in a step.
        num_pages: of KV memory.
        context: longest prompt and completion together.
        reserve: positions behind an anchor that a request's pages must cover.
    """

    max_running: int
    token_budget: int
    num_pages: int
    context: int
    reserve: int

    @property
    def longest(self) -> int:
        """Positions that a request may have pages for."""
        return min(self.context + self.reserve, self.num_pages * PAGE)

    @property
    def max_pages(self) -> int:
        """Of a request."""
        return -(-self.longest // PAGE)

    @property
    def widest(self) -> int:
        """Tokens of a request that decodes, its drafts included."""
        return max(self.reserve, 1)
