"""What the target saw of committed tokens, kept until the drafter drafts for them.

The drafter turns it into context keys and values. That costs almost the same for one token as for
many, and nothing is lost by waiting: where nothing is drafted for a while it is done now and then,
for all tokens since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Waiting:
    """Features of a request's tokens from position `begin` on, in pieces.

    `life` is how often the request had been preempted: its pages are others after that.
    """

    begin: int
    life: int
    pieces: list[Tensor] = field(default_factory=list)
    count: int = 0


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
        self._waiting: dict[ScheduledSequence, _Waiting] = {}
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
        pieces = torch.split(features, list(counts))
        for sequence, begin, piece in zip(sequences, begins, pieces, strict=True):
            waiting = self._waiting.get(sequence)
            if waiting is None or waiting.life != sequence.num_preemptions:
                self.forget(sequence)
                waiting = self._waiting[sequence] = _Waiting(begin, sequence.num_preemptions)
            assert waiting.begin + waiting.count == begin, "a gap in the context"
            waiting.pieces.append(piece)
            waiting.count += len(piece)
            self._num_rows += len(piece)
        if self._num_rows > _MOST_ROWS:
            self.hand_over()

    def forget(self, sequence: ScheduledSequence) -> None:
        """A request is finished: its pages are another's from now on."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None:
            self._num_rows -= waiting.count

    def hand_over(self) -> None:
        """Let the drafter absorb what waits; a preempted request's tokens have no pages."""
        held = {
            sequence: waiting
            for sequence, waiting in self._waiting.items()
            if sequence.slot >= 0 and sequence.num_preemptions == waiting.life
        }
        self._waiting, self._num_rows = {}, 0
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
