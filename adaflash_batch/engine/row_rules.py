"""How requests choose and where their texts end, as arrays for the kernel that decides it.

# S requests that choose, R rows of logits, E ends at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adaflash_batch.engine.accept import UNSOUND, Emission
from adaflash_batch.engine.packing import Int32, Int64
from adaflash_batch.engine.sampling import ChoiceBlock
from adaflash_batch.kernels import accept as kernel
from adaflash_batch.kernels.accept import Choosing, rules_of
from adaflash_batch.kernels.device_step import power_of_two
from adaflash_batch.request import FinishReason

MOST_ENDS = 16
"""Requests with more tokens that end their texts are left to the host: the kernel would be slow."""
_FEWEST_ENDS = 2
_REASONS: dict[int, FinishReason | None] = {
    kernel.GOES_ON: None,
    kernel.STOP: "stop",
    kernel.LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Deciding:
    """What `kernels.accept` reads of the host: see Rows and Rules there.

    first, count: int32 [S]; request: int32 [R]; floats: float64 [S, 4]; integers: int64 [S, 6 + E].
    """

    first: Int32
    count: Int32
    request: Int32
    floats: npt.NDArray[np.float64]
    integers: Int64


def is_left(block: ChoiceBlock) -> bool:
    """Whether the host decides for it: logits depend on its text so far, or many tokens end it."""
    return block.sampling.reshapes_logits or len(block.end_ids) > MOST_ENDS


def num_ends(blocks: Sequence[ChoiceBlock]) -> int:
    """E, one of a few."""
    most = max((len(block.end_ids) for block in blocks if not is_left(block)), default=0)
    return max(power_of_two(max(most, 1)), _FEWEST_ENDS)


def deciding(blocks: Sequence[ChoiceBlock]) -> Deciding:
    """Of blocks whose rows lie one behind the other; for those that are left nothing is chosen."""
    num_rows = np.array([block.num_rows for block in blocks], dtype=np.int32)
    is_decided = np.array([not is_left(block) for block in blocks])
    whose = np.where(is_decided, np.arange(len(blocks)), -1).astype(np.int32)
    rules = rules_of(list(map(_choosing, blocks)), num_ends(blocks))
    return Deciding(
        first=(np.cumsum(num_rows) - num_rows).astype(np.int32),
        count=np.where(is_decided, num_rows, 0).astype(np.int32),
        request=np.repeat(whose, num_rows),
        floats=rules.floats.numpy(),
        integers=rules.integers.numpy(),
    )


def _choosing(block: ChoiceBlock) -> Choosing:
    ends = () if is_left(block) else tuple(block.end_ids)
    return Choosing(block.sampling, block.key, block.position, block.room, ends)


def emission_of(numbers: Sequence[int]) -> Emission:
    """A request's row of `Emitted.numbers`."""
    count, accepted, reason = numbers[:3]
    if reason == kernel.UNSOUND:
        return UNSOUND
    tokens = list(numbers[kernel.NUM_COUNTS : kernel.NUM_COUNTS + count])
    return Emission(tokens, accepted, _REASONS[reason])
