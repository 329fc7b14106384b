"""Which sizes passes come in, so that few graphs serve many steps."""

from __future__ import annotations

from bisect import bisect_left

from adaflash_batch.engine.packing import Int32, Packed
from adaflash_batch.engine.step_buffers import Bucket, exact_bucket
from adaflash_batch.kernels.device_step import power_of_two

# A step that is larger is bound by its arithmetic: a graph would save it nothing.
MOST_TOKENS = 512
_TOKENS = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_TOKENS + 1, 32))
# Pages of the longest request: each level has four times those of the one before.
_FIRST_PAGES, _PAGES_FACTOR = 32, 4


def tokens_of(count: int) -> int:
    """The bucket of so many tokens, or requests; above MOST_TOKENS the count itself."""
    at = bisect_left(_TOKENS, count)
    return _TOKENS[at] if at < len(_TOKENS) else count


def pages_of(count: int, most: int) -> int:
    """The bucket of the longest request's pages."""
    level = _FIRST_PAGES
    while level < count:
        level *= _PAGES_FACTOR
    return min(level, most)


class Buckets:
    """The buckets of a decoder.

    Args:
        max_running: requests in a step.
        max_pages: of a request.
        widest: tokens of a request that decodes, its drafts included.
    """

    def __init__(self, max_running: int, max_pages: int, widest: int) -> None:
        self._max_running, self._max_pages = max_running, max_pages
        self._widest = power_of_two(widest)

    def of(self, packed: Packed, table: Int32) -> tuple[Bucket, bool]:
        """A step's bucket, and whether others will have the same: those of steps without prefill.

        With prefill sizes are the step's own.
        """
        num_tokens, longest = len(packed.token_ids), int(packed.length.max())
        comes_again = (
            len(packed.rows) == num_tokens <= MOST_TOKENS
            and longest <= self._widest
            and len(packed.start) <= self._max_running
        )
        if not comes_again:
            return exact_bucket(packed, table.shape[1]), False
        size = tokens_of(num_tokens)
        bucket = Bucket(
            num_tokens=size,
            num_rows=size,
            num_segments=min(size, self._max_running),
            max_length=1 if longest == 1 else self._widest,
            num_pages=pages_of(table.shape[1], self._max_pages),
        )
        return bucket, True

    def largest(self, token_budget: int) -> Bucket:
        """One in which every step has room."""
        return Bucket(
            num_tokens=max(token_budget, MOST_TOKENS),
            num_rows=max(token_budget, MOST_TOKENS),
            num_segments=max(self._max_running, 1),
            max_length=self._widest,
            num_pages=self._max_pages,
        )
