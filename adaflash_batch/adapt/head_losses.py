"""What the heads that judge drafts are trained for: DSpark's confidence head and the length heads.

No gradient of theirs reaches what drafts. Their labels are those of hindsight: what the committed
text says of each draft, up to its end.

# B blocks, N drafts of a block, K rows of a block, H hidden
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash_batch.adapt.objective import LengthLabel
from adaflash_batch.drafter.length import (
    HazardHead,
    is_ended,
    log_likelihood,
    num_accepted,
    sufficient_share,
    truncated,
    verified_drafts,
)
from adaflash_batch.drafter.model import DFlash

_TINY = torch.finfo(torch.float32).tiny

OverRanks = Callable[[Tensor], Tensor]
"""The sum of a tensor over all ranks that share a batch; each rank calls it with its own part."""


def alone(part: Tensor) -> Tensor:
    """OverRanks where there is one rank."""
    return part


def confidence_loss(
    logits: Tensor, is_right: Tensor, weights: Tensor, over_ranks: OverRanks = alone
) -> Tensor:
    """Mean binary cross-entropy of DSpark's confidence head, weighted like the drafts.

    The label of a draft is whether it is accepted: whether it is the token of the text. (DSpark
    takes 1 - |p - q| / 2 of the two distributions, with which sampled drafts are accepted; ours
    are the argmax.) Only drafts behind nothing but right ones count, since the others are never
    looked at: so the product over a block's first drafts is how likely all of them are accepted.

    Args:
        logits: [B, N], of the head.
        is_right: bool [B, N], also where the token is outside the draft vocabulary: never right.
        weights: [B, N], 0 where the text has ended.
        over_ranks: see member_loss.
    """
    reached = F.pad(is_right[:, :-1].int().cumprod(1), (1, 0), value=1)
    weights = weights * reached
    labels = is_right.float()
    losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    return (losses * weights).sum() / over_ranks(weights.sum()).clamp(min=_TINY)


def length_loss(
    net: DFlash,
    hidden: Tensor,
    is_right: Tensor,
    sure: Tensor | None,
    num_known: Tensor,
    label: LengthLabel,
    over_ranks: OverRanks = alone,
) -> Tensor:
    """The loss of the net's length head.

    Args:
        hidden: the drafter's output [T, H].
        is_right: bool [B, N], which drafts, as served, are the text's tokens.
        sure: [B, N, 3], their certainty; for a hazard head.
        num_known: [B], drafts at whose place the text has a token.
        label: see Objective.
        over_ranks: see member_loss.
    """
    accepted = num_accepted(is_right)
    head = net.length_head
    if isinstance(head, HazardHead):
        assert sure is not None
        logits = head(net.drafting_rows(hidden), sure)
        return hazard_loss(logits, accepted, num_known, over_ranks)
    return share_loss(net.length(hidden), accepted, num_known, is_right.shape[1], label, over_ranks)


def hazard_loss(
    logits: Tensor, accepted: Tensor, num_known: Tensor, over_ranks: OverRanks = alone
) -> Tensor:
    """The negative log-likelihood of what was accepted, for each draft that was reached.

    Args:
        logits: of the hazards [B, N].
        accepted, num_known: [B], see length.log_likelihood.
    """
    likelihood = log_likelihood(logits, accepted, num_known)
    num_reached = torch.minimum(accepted + 1, num_known).clamp(max=logits.shape[1])
    return -likelihood.sum() / over_ranks(num_reached.sum().float()).clamp(min=1.0)


def share_loss(
    shares: Tensor,
    accepted: Tensor,
    num_known: Tensor,
    num_drafts: int,
    label: LengthLabel,
    over_ranks: OverRanks = alone,
) -> Tensor:
    """Mean squared error of AdaFlash's head over the blocks whose label no end of a text hides.

    Args:
        shares: [B], what the head says.
        accepted, num_known: [B], see length.is_ended.
        label: `truncated` takes what a verification of the width that the head asks for itself
            would show; it makes the head ask for less and less.
    """
    is_clear = (~is_ended(accepted, num_known) | (accepted == num_drafts)).float()
    seen = accepted
    if label == "truncated":
        seen = truncated(accepted, verified_drafts(shares.detach(), num_drafts))
    errors = (shares - sufficient_share(seen, num_drafts)).square() * is_clear
    return errors.sum() / over_ranks(is_clear.sum()).clamp(min=1.0)
