"""From a plan to the arrays of one packed forward.

# T packed tokens, S segments (one a scheduled request), P pages a request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.kernels.page_size import PAGE

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class PageTable:
    """Rows of page numbers, one for each slot, kept up to date as sequences grow."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._rows = np.zeros((num_slots, -(-max_tokens // PAGE)), dtype=np.int32)

    def rows(self, sequences: Sequence[ScheduledSequence]) -> Int32:
        """int32 [S, P], P being what the longest of them holds."""
        for sequence in sequences:
            self._rows[sequence.slot, : len(sequence.pages)] = sequence.pages
        longest = max(len(sequence.pages) for sequence in sequences)
        slots = [sequence.slot for sequence in sequences]
        return np.ascontiguousarray(self._rows[slots, :longest])


@dataclass(frozen=True, slots=True)
class Packed:
    """The arrays of a step.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        start, length, context: int32 [S], see kernels.paged_attention.PackedStep.
        rows: int64 [R], the packed tokens whose successor is chosen.
    """

    token_ids: Int64
    positions: Int64
    start: Int32
    length: Int32
    context: Int32
    rows: Int64

    @property
    def num_keys(self) -> int:
        """Keys that all tokens together attend to."""
        length, context = self.length.astype(np.int64), self.context.astype(np.int64)
        return int((length * context + length * (length + 1) // 2).sum())


def pack(
    pieces: Sequence[Sequence[int]], contexts: Sequence[int], choices: Sequence[int]
) -> Packed:
    """Lay the pieces one behind the other.

    Args:
        pieces: token ids of each segment, at least one.
        contexts: position of each segment's first token.
        choices: how many rows at the end of each segment are wanted in `rows`.
    """
    length = np.array([len(piece) for piece in pieces], dtype=np.int32)
    context = np.array(contexts, dtype=np.int32)
    ends = np.cumsum(length)
    start = (ends - length).astype(np.int32)
    token_ids = np.array([token for piece in pieces for token in piece], dtype=np.int64)
    return Packed(
        token_ids=token_ids,
        positions=ranges(context, length),
        start=start,
        length=length,
        context=context,
        rows=ranges(ends - np.array(choices), np.array(choices)),
    )


def ranges(begins: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]) -> Int64:
    """begins[0], begins[0] + 1, … counts[0] of them, then begins[1], …: int64."""
    before = np.cumsum(counts) - counts
    return np.repeat(begins.astype(np.int64) - before, counts) + np.arange(int(counts.sum()))
