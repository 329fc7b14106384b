"""Who runs in the next step, with how many tokens. Pure Python: no tensors, no clock."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from adaflash_batch.engine.pages import PagePool
from adaflash_batch.engine.prefixes import PrefixCache
from adaflash_batch.kernels.page_size import PAGE


@dataclass(slots=True, eq=False)
class Sequence:
    """A request as the scheduler sees it: how much of it is known, how much is in KV memory.

    Attributes:
        known: tokens of prompt and text so far. The last of them, the anchor, is in KV memory only
            after the step that verifies it.
        computed: leading tokens whose K/V are stored.
        limit: `known` never exceeds this.
        keys: names of its prompt's whole pages (prefixes.py); none where it shares nothing.
        pages: the pages that hold them, in order.
        slot: row of the page table while running, -1 otherwise.
        arrival: its number, in the order in which they came.
        num_preemptions: how often it was sent back to wait.
    """

    known: int
    limit: int
    keys: tuple[bytes, ...] = ()
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    arrival: int = 0
    num_preemptions: int = 0

    @property
    def is_decoding(self) -> bool:
        """Whether everything but the anchor is computed."""
        return self.computed == self.known - 1


class Scheduled(NamedTuple):
    """Its part in a step: `num_known` known tokens from `computed` on, then `width` drafts."""

    sequence: Sequence
    num_known: int
    width: int

    @property
    def num_shareable(self) -> int:
        """How many of its tokens lie in pages that others may use."""
        left = PAGE * len(self.sequence.keys) - self.sequence.computed
        return max(min(left, self.num_known), 0)


class Scheduler:
    """Continuous batching: refill at every step, chunked prefill, preemption by recompute.

    Args:
        pool: the pages.
        max_running: most sequences in a step.
        token_budget: most tokens in a step, drafts included.
        reserve: positions behind the anchor that a decoding sequence needs pages for (the block).
        ahead: further ones, where the next block is drafted before it is known where it begins.

    Attributes:
        prefixes: whole pages of prompts, for others that begin alike.
        num_shared: tokens of prompts that were found there, not computed.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        token_budget: int,
        reserve: int = 0,
        ahead: int = 0,
    ) -> None:
        assert max_running >= 1
        assert token_budget >= 2
        self.pool, self.prefixes = pool, PrefixCache(pool)
        self.running: list[Sequence] = []  # in order of arrival
        self.waiting: deque[Sequence] = deque()  # likewise
        self.num_preemptions = self.num_shared = self._num_added = 0
        self._token_budget = token_budget
        self._reserve, self._ahead = reserve, ahead
        self._slots = list(range(max_running - 1, -1, -1))

    def pages_for(self, sequence: Sequence) -> int:
        """Pages that the sequence needs at its longest."""
        return _pages(sequence.limit + self._reserve)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it must fit an empty pool."""
        assert self.pages_for(sequence) <= self.pool.num_pages
        sequence.arrival = self._num_added
        self._num_added += 1
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a running sequence out: it is finished."""
        self.running.remove(sequence)
        self._vacate(sequence)

    def plan_decoding(self, width: int) -> list[Scheduled]:
        """The first part of the next step: the sequences that decode.

        Pages for every scheduled token are held when this returns; sequences that arrived last may
        have been sent back to wait for it.

        Args:
            width: draft tokens wanted behind each anchor; fewer are planned where the budget or a
                sequence's limit leaves no room.
        """
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        if not decoding:
            return []
        budget = self._budget_of(len(decoding))
        width = max(0, min(width, budget // len(decoding) - 1))
        planned: list[Scheduled] = []
        for sequence in decoding[:budget]:
            if sequence.slot < 0:  # preempted for one before it
                continue
            # No block begins behind the limit.
            known = min(sequence.known + self._ahead, sequence.limit)
            if not self._hold(sequence, known + self._reserve):
                continue
            # The target adds one token behind the accepted drafts, so room for one must remain.
            room = sequence.limit - sequence.known - 1
            planned.append(Scheduled(sequence, 1, max(0, min(width, room))))
        # One that was planned may have been preempted for a later one.
        return [item for item in planned if item.sequence.slot >= 0]

    def _budget_of(self, num_decoding: int) -> int:
        budget = self._token_budget
        if num_decoding == len(self.running) and not self._can_admit():
            return budget
        # An eighth stays free for prefill: a full batch would starve those that come next.
        return max(budget - budget // 8, 1)

    def prefill_ahead(self, num_taken: int) -> int:
        """Tokens of prompts, about, that `plan_prefill` would plan."""
        waiting = 0
        if self._can_admit():
            first = self.waiting[0]
            waiting = first.known - PAGE * len(self._found(first))
        missing = sum(each.known - each.computed for each in self.running if not each.is_decoding)
        return max(min(missing + waiting, self._token_budget - num_taken), 0)

    def plan_prefill(self, num_taken: int) -> list[Scheduled]:
        """The second part: prompts in order of arrival, with so many tokens of the budget gone."""
        planned: list[Scheduled] = []
        budget = self._token_budget - num_taken
        prefilling = [sequence for sequence in self.running if not sequence.is_decoding]
        for sequence in prefilling:
            budget -= self._plan_piece(sequence, budget, planned)
        return planned + self._admit(budget)

    def _admit(self, budget: int) -> list[Scheduled]:
        """Let those begin that wait, in order of arrival.

        One whose next page is being computed for another waits for that. Its place and its pages
        are kept for it meanwhile: those behind it begin with what is left.
        """
        planned: list[Scheduled] = []
        if not self._can_admit():
            return planned
        in_the_making = self._in_the_making()
        room = self.prefixes.num_available
        for sequence in list(islice(self.waiting, len(self._slots))):
            found = self._found(sequence)
            # Without room for the whole prompt it would only come to preempt, or be preempted.
            room -= _pages(sequence.known + self._reserve) - len(found)
            room -= self.prefixes.num_idle(found)
            if budget <= 0 or room < 0:
                break
            lacking = self._shareable(sequence)[len(found) :]
            if lacking and lacking[0] in in_the_making:
                continue
            self._begin(sequence, found)
            in_the_making.update(sequence.keys[len(found) :])
            budget -= self._plan_piece(sequence, budget, planned)
        return planned

    def _begin(self, sequence: Sequence, found: list[int]) -> None:
        """Make it a running one, whose first pages are these."""
        self.waiting.remove(sequence)
        self.prefixes.share(found)
        sequence.pages, sequence.computed = found, PAGE * len(found)
        if sequence.num_preemptions == 0:
            self.num_shared += sequence.computed
        sequence.slot = self._slots.pop()
        insort(self.running, sequence, key=_arrival)

    def _shareable(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Names of the pages that it may have from others: its last token is its own to compute."""
        return sequence.keys[: (sequence.known - 1) // PAGE]

    def _found(self, sequence: Sequence) -> list[int]:
        return self.prefixes.find(self._shareable(sequence))

    def _in_the_making(self) -> set[bytes]:
        """Names of the pages that running sequences are still to compute."""
        prefilling = (sequence for sequence in self.running if not sequence.is_decoding)
        return {key for each in prefilling for key in each.keys[each.computed // PAGE :]}

    def _plan_piece(self, sequence: Sequence, budget: int, planned: list[Scheduled]) -> int:
        count = min(budget, sequence.known - sequence.computed)
        if count <= 0 or sequence.slot < 0:
            return 0
        # Pages for all of the prompt at once: a half-filled prompt is of no use to anybody.
        if not self._hold(sequence, sequence.known + self._reserve):
            return 0
        planned.append(Scheduled(sequence, count, 0))
        return count

    def drop_waiting(self) -> list[Sequence]:
        """Forget those that wait; they are returned."""
        dropped = list(self.waiting)
        self.waiting.clear()
        return dropped

    def _can_admit(self) -> bool:
        return bool(self.waiting and self._slots)

    def _hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for `num_tokens`, preempting those that arrived later; False if preempted."""
        missing = _pages(num_tokens) - len(sequence.pages)
        while missing > self.prefixes.num_available:
            latest = self.running[-1]
            self._preempt(latest)
            if latest is sequence:
                return False
        if missing > 0:
            sequence.pages += self.prefixes.take(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.computed = 0
        sequence.num_preemptions += 1
        insort(self.waiting, sequence, key=_arrival)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self.prefixes.release(sequence.pages)
        sequence.pages = []
        self._slots.append(sequence.slot)
        sequence.slot = -1


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)
