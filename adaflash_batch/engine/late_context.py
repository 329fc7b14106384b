"""What the target saw of committed tokens, kept until the drafter drafts for them.

The drafter turns it into context keys and values. That costs almost the same for one token as for
many, and nothing is lost by waiting: where nothing is drafted for a while it is done now and then,
for all tokens since.
"""

from __future__ import annotations

from collections.abc import Sequence
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

# Rows that wait at the most; the memory of a few hundred tokens.
_MOST_ROWS = 128


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
    """Features of a request's tokens from position `begin` on, in pieces."""

    begin: int
    count: int = 0
    pieces: list[Tensor] = field(default_factory=list)


class LateContext:
    """Feeds a drafter what it is to absorb, before it drafts.

    Args:
        drafter: that absorbs.
        table: the requests' pages.
        upload: takes arrays to where the features are.
    """

    def __init__(
        self, drafter: Drafter, table: PageTable, upload: Upload = torch.from_numpy
    ) -> None:
        self._drafter, self._table, self._upload = drafter, table, upload
        self._steps: list[_Step] = []
        self._finished: set[ScheduledSequence] = set()
        self._num_rows = 0

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
        self._num_rows += len(features)
        if self._num_rows > _MOST_ROWS:
            self.hand_over()

    def forget(self, sequence: ScheduledSequence) -> None:
        """A request is finished: its pages are another's from now on."""
        if self._steps:
            self._finished.add(sequence)

    def hand_over(self) -> None:
        """Let the drafter absorb what waits; a preempted request's tokens have no pages."""
        held = self._held()
        self._steps, self._num_rows = [], 0
        self._finished.clear()
        if not held:
            return
        length = np.array([each.count for each in held.values()], dtype=np.int32)
        start = (np.cumsum(length) - length).astype(np.int32)
        begin = np.array([each.begin for each in held.values()], dtype=np.int32)
        positions = np.concatenate(
            [np.arange(each.begin, each.begin + each.count) for each in held.values()]
        )
        step = PackedStep(start, length, begin, self._table.rows(list(held)))
        features = torch.cat([piece for each in held.values() for piece in each.pieces])
        self._drafter.absorb(step, self._upload(positions), features)

    def _held(self) -> dict[ScheduledSequence, _Waiting]:
        """What waits, by request."""
        held: dict[ScheduledSequence, _Waiting] = {}
        for step in self._steps:
            pieces = torch.split(step.features, step.counts)
            of_each = zip(step.sequences, step.lives, step.begins, pieces, strict=True)
            for sequence, life, begin, piece in of_each:
                is_gone = sequence in self._finished or sequence.slot < 0
                if is_gone or sequence.num_preemptions != life:
                    continue
                waiting = held.setdefault(sequence, _Waiting(begin))
                assert waiting.begin + waiting.count == begin, "a gap in the context"
                waiting.pieces.append(piece)
                waiting.count += len(piece)
        return held
