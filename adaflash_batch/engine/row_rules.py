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
from adaflash_batch.kernels.accept import POSITION, Choosing, Rows, Rules, accept, rules_of
from adaflash_batch.request import Sampling

_ARGMAX = Sampling(temperature=0.0)


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
    rules = rules_of(list(map(_choosing, blocks)))
    floats, integers = (
        np.repeat(each.numpy(), counts, axis=0) for each in (rules.floats, rules.integers)
    )
    integers[:, POSITION] += np.concatenate([np.arange(count) for count in counts])
    each: Int32 = np.arange(num_rows, dtype=np.int32)
    rows = Rows(
        first=upload(each),
        count=upload(np.ones(num_rows, dtype=np.int32)),
        request=upload(each),
        drafts=upload(np.zeros(num_rows, dtype=np.int32)),
        most=1,
    )
    return accept(logits, rows, Rules(upload(floats), upload(integers))).last


def _choosing(block: ChoiceBlock) -> Choosing:
    """Its first row; there is room for one token."""
    sampling = block.sampling if is_drawn(block) else _ARGMAX
    return Choosing(sampling, block.key, block.position, room=1)
