"""What the target saw of committed tokens, kept until the drafter drafts for them.

The drafter turns it into context keys and values. A few tokens cost as much as one, and those of
requests that end before anything is drafted for them never need it: so it is done for a request
when it is drafted for, and for all where what waits takes too much memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaflash_batch.engine.drafting import Drafter
from adaflash_batch.engine.packing import PageTable
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.engine.upload import Upload
from adaflash_batch.kernels.paged_attention import PackedStep

# What waits takes at most so much; it is also what may have to be absorbed at once.
_MOST_BYTES = 16 * 2**20


class _Step(NamedTuple):
    """What one step left.

    lives: how often each request had been preempted: its pages are others after that.
    begins, counts: positions of each request's tokens, whose rows lie one behind the other.
    """

    sequences: list[ScheduledSequence]
    lives: list[int]
    begins: list[int]
    counts: list[int]
    features: Tensor


@dataclass(slots=True)
class _Waiting:
    """Features of a request's tokens from position `begin` on, in pieces.

    life: as in _Step.
    """

    begin: int
    life: int
    count: int = 0
    pieces: list[Tensor] = field(default_factory=list)


class LateContext:
    """Feeds a drafter what it is to absorb, before it drafts.

    Args:
        drafter: that absorbs.
        table: the requests' pages.
        upload: takes arrays to where the features are.
        most_bytes: that wait.
    """

    def __init__(
        self,
        drafter: Drafter,
        table: PageTable,
        upload: Upload = torch.from_numpy,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._drafter, self._table, self._upload = drafter, table, upload
        self._steps: list[_Step] = []
        self._waiting: dict[ScheduledSequence, _Waiting] = {}  # of steps before those
        self._finished: set[ScheduledSequence] = set()
        self._most_bytes = most_bytes
        self._num_bytes = 0  # of the tensors that hold it, parts that are no longer wanted included

    def add(
        self,
        sequences: Sequence[ScheduledSequence],
        begins: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
    ) -> None:
        """Keep the features [sum of counts, F] of tokens that stay in these requests' texts.

        Args:
            begins: position of the first of each request's tokens.
        """
        lives = [sequence.num_preemptions for sequence in sequences]
        self._steps.append(_Step(list(sequences), lives, list(begins), list(counts), features))
        self._num_bytes += features.nbytes
        if self._num_bytes > self._most_bytes:
            self.hand_over()

    def forget(self, sequence: ScheduledSequence) -> None:
        """A request is finished: its pages are another's from now on."""
        self._waiting.pop(sequence, None)
        if self._steps:
            self._finished.add(sequence)

    def hand_over(self, wanted: Collection[ScheduledSequence] | None = None) -> int:
        """Let the drafter absorb what waits of these requests, or of all; how many tokens it was.

        A preempted request's tokens have no pages: they are computed again.
        """
        self._sort()
        if wanted is None:
            held, self._waiting, self._num_bytes = self._waiting, {}, 0
        else:
            held = {each: self._waiting.pop(each) for each in wanted if each in self._waiting}
        held = {each: what for each, what in held.items() if _is_there(each, what.life)}
        if not held:
            return 0
        length = np.array([each.count for each in held.values()], dtype=np.int32)
        start = (np.cumsum(length) - length).astype(np.int32)
        begin = np.array([each.begin for each in held.values()], dtype=np.int32)
        positions = np.concatenate(
            [np.arange(each.begin, each.begin + each.count) for each in held.values()]
        )
        step = PackedStep(start, length, begin, self._table.rows(list(held)))
        features = torch.cat([piece for each in held.values() for piece in each.pieces])
        self._drafter.absorb(step, self._upload(positions), features)
        return len(positions)

    def _sort(self) -> None:
        """Take the steps apart, by request."""
        for step in self._steps:
            pieces = torch.split(step.features, step.counts)
            of_each = zip(step.sequences, step.lives, step.begins, pieces, strict=True)
            for sequence, life, begin, piece in of_each:
                if sequence in self._finished or not _is_there(sequence, life):
                    continue
                waiting = self._waiting.get(sequence)
                if waiting is None or waiting.life != life:
                    waiting = self._waiting[sequence] = _Waiting(begin, life)
                assert waiting.begin + waiting.count == begin, "a gap in the context"
                waiting.pieces.append(piece)
                waiting.count += len(piece)
        self._steps = []
        self._finished.clear()


def _is_there(sequence: ScheduledSequence, life: int) -> bool:
    """Whether a request still has the pages that it had then."""
    return sequence.slot >= 0 and sequence.num_preemptions == life
