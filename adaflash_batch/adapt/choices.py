"""What a drafter would draft at positions of stored texts, and how sure it is: for its heads.

# N positions, C of a chunk, V rows of the lm_head (vocabulary), H hidden
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash_batch.adapt.losses import Bias, Head
from adaflash_batch.drafter.length import CERTAINTY, certainty


class Choices(NamedTuple):
    """Of each position, as it would be served; the predecessor is the true one.

    hits: bool [N], whether the draft is the label; false where nothing is known.
    certainty: [N, 3], see length.certainty; 0 where nothing is known; None if nobody wants it.
    """

    hits: Tensor
    certainty: Tensor | None


@torch.no_grad()
def choose(
    head: Head,
    student: Tensor,
    labels: Tensor,
    is_wanted: Tensor,
    bias: Bias | None,
    chunk_rows: int,
    *,
    with_certainty: bool,
) -> Choices:
    """The choices of a drafter without a selector, at the wanted positions.

    Args:
        student: the drafter's output [N, H].
        labels: token ids [N]; a token outside the draft vocabulary is never drafted.
        is_wanted: bool [N].
        bias: see draft_loss.
        chunk_rows: positions whose logits are held at a time.
        with_certainty: say how sure the drafter is, too.
    """
    hits = is_wanted.new_zeros(len(student))
    sure = None
    if with_certainty:
        sure = student.new_zeros(len(student), CERTAINTY, dtype=torch.float32)
    for where in torch.split(is_wanted.nonzero().squeeze(1), chunk_rows):
        logits = F.linear(student[where].to(head.weight.dtype), head.weight)
        if bias is not None:
            logits += F.linear(bias.latents[where], bias.table)
        best = logits.argmax(-1)
        hits[where] = best == head.rows(labels[where])
        if sure is not None:
            sure[where] = certainty(logits, best).to(sure.dtype)
    return Choices(hits, sure)
