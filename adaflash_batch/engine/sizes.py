"""How much a decoder does at once, and how much it has room for."""

from __future__ import annotations

from dataclasses import dataclass

from adaflash_batch.kernels.page_size import PAGE


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
