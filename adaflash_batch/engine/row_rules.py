"""How every row of a pass is to be chosen, as arrays for the kernel that chooses.

# R rows of logits
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from adaflash_batch.engine.packing import Int32
from adaflash_batch.engine.sampling import ChoiceBlock
from adaflash_batch.engine.upload import Upload
from adaflash_batch.kernels.accept import NUM_FLOATS, NUM_INTEGERS, Rows, Rules, accept


def is_drawn(block: ChoiceBlock) -> bool:
    """Whether the kernel chooses for it: by chance, and from the logits as they are."""
    return not (block.sampling.is_greedy or block.sampling.reshapes_logits)


def choose_rows(
    logits: torch.Tensor, blocks: Sequence[ChoiceBlock], upload: Upload
) -> torch.Tensor:
    """Choose for every row [R, V], for itself alone: int32 [R], -1 where logits are not finite.

    Those of blocks that are not drawn are the likeliest tokens. Nothing waits for the device.
    """
    counts = [block.num_rows for block in blocks]
    num_rows = sum(counts)
    floats = np.repeat(np.array([_floats(block) for block in blocks]), counts, axis=0)
    integers = np.repeat(
        np.array([_integers(block) for block in blocks], dtype=np.int64), counts, axis=0
    )
    integers[:, 4] += np.concatenate([np.arange(count) for count in counts])
    each: Int32 = np.arange(num_rows, dtype=np.int32)
    rows = Rows(
        first=upload(each),
        count=upload(np.ones(num_rows, dtype=np.int32)),
        request=upload(each),
        drafts=upload(np.zeros(num_rows, dtype=np.int32)),
        most=1,
    )
    return accept(logits, rows, Rules(upload(floats), upload(integers))).last


def _floats(block: ChoiceBlock) -> list[float]:
    """A row of Rules.floats; zeros are the argmax."""
    if not is_drawn(block):
        return [0.0] * NUM_FLOATS
    sampling = block.sampling
    with np.errstate(divide="ignore"):
        log_min_p = float(np.log(np.float32(sampling.min_p)))
    return [sampling.temperature, sampling.top_p, sampling.min_p, log_min_p]


def _integers(block: ChoiceBlock) -> list[int]:
    """A row of Rules.integers, of the block's first row; there is room for one token."""
    identity, index = block.key
    sampling = block.sampling
    words = [sampling.top_k, _signed(sampling.seed), _signed(identity), index, block.position, 1]
    assert len(words) == NUM_INTEGERS
    return words


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return (word + 2**63) % 2**64 - 2**63
