"""What each member of the family is trained for: the objective, and its own parts' share of it.

# B blocks, N slots of a block that draft, K candidates, V rows of the head, H hidden
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash_batch.adapt.blocks import Blocks
from adaflash_batch.adapt.losses import Bias, Head, Objective, draft_loss
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.selector import best_candidates

# Blocks whose logits are held at once.
_BLOCKS_AT_ONCE = 32
_TINY = torch.finfo(torch.float32).tiny

OverRanks = Callable[[Tensor], Tensor]
"""The sum of a tensor over all ranks that share a batch; each rank calls it with its own part."""


def alone(part: Tensor) -> Tensor:
    """OverRanks where there is one rank."""
    return part


@dataclass(frozen=True, slots=True)
class MemberLoss:
    """The loss of a batch.

    Attributes:
        value: a scalar with a gradient.
        positions: supervised positions.
        hits: those where the argmax of the lm_head (with the Markov head's part) is the label.
        clip_rate: see LossStats.
    """

    value: Tensor
    positions: int
    hits: int
    clip_rate: float


def member_loss(
    net: DFlash,
    objective: Objective,
    head: Head,
    hidden: Tensor,
    blocks: Blocks,
    teacher: Tensor | None,
    over_ranks: OverRanks = alone,
) -> MemberLoss:
    """The objective over the blocks; the predecessor of each position is the true one.

    Args:
        hidden: [T, H], from `forward_blocks`.
        teacher: the rows of `pack_teacher`; None for the cross-entropy alone.
        over_ranks: sums the weights that each part of the loss is divided by, so that the losses
            of all ranks add up to that of the whole batch.
    """
    slots = slice(net.config.first_slot, None)
    rows, previous = net.drafting_rows(hidden), predecessors(blocks, net.config.first_slot)
    weights, labels = blocks.weights[:, slots].flatten(), blocks.labels[:, slots].flatten()
    is_taught = (weights > 0) & (head.rows(labels) >= 0)
    loss, stats = draft_loss(
        objective,
        head,
        rows.flatten(0, 1),
        weights,
        None if teacher is None else teacher[blocks.teacher_rows[:, slots].flatten()],
        labels,
        total_weight=over_ranks(weights[is_taught].sum()),
        bias=_markov_bias(net, head, rows, previous),
    )
    if net.candidate_selector is not None:
        loss = loss + _selector_loss(net, head, rows, previous, blocks, over_ranks)
    if net.confidence_head is not None:
        is_right = stats.hits.view(previous.shape)
        logits = net.confidence(rows, previous)
        by_slot = blocks.weights[:, slots]
        loss = loss + confidence_loss(logits, is_right, by_slot, over_ranks)
    return MemberLoss(loss, stats.positions, int(stats.hits.sum()), stats.clip_rate)


def no_loss(net: DFlash, nothing: Tensor, over_ranks: OverRanks) -> MemberLoss:
    """That of a rank without blocks: it takes part in the sums of `member_loss`.

    Args:
        nothing: a zero on the rank's device.
    """
    parts = 1 + (net.candidate_selector is not None) + (net.confidence_head is not None)
    for _ in range(parts):
        over_ranks(nothing.clone())
    return MemberLoss(nothing, 0, 0, 0.0)


def _markov_bias(net: DFlash, head: Head, rows: Tensor, previous: Tensor) -> Bias | None:
    markov = net.markov_head
    if markov is None:
        return None
    return Bias(markov.latents(rows, previous).flatten(0, 1), markov.rows(head.token_ids))


def predecessors(blocks: Blocks, first_slot: int) -> Tensor:
    """Ids [B, N] of the token before each one that is drafted; the anchor first."""
    labels = blocks.labels[:, first_slot:]
    return torch.cat((blocks.token_ids[:, :1], labels[:, :-1]), dim=1)


def _selector_loss(
    net: DFlash,
    head: Head,
    rows: Tensor,
    previous: Tensor,
    blocks: Blocks,
    over_ranks: OverRanks,
) -> Tensor:
    """Cross-entropy among the best candidates, where the label is one of them."""
    config, selector = net.config, net.candidate_selector
    assert selector is not None
    labels = head.rows(blocks.labels[:, config.first_slot :].flatten())
    weights = blocks.weights[:, config.first_slot :].flatten().where(labels >= 0, 0.0)
    losses, taught = [rows.new_zeros(0, dtype=torch.float32)], [weights[:0]]
    step = _BLOCKS_AT_ONCE * config.num_drafts
    flat, before = rows.flatten(0, 1), previous.flatten()
    for begin in range(0, len(flat), step):
        part = slice(begin, begin + step)
        candidates = _candidates(head, flat[part].detach(), config.selector_top_k)
        found = candidates == labels[part].unsqueeze(-1)
        chosen = (weights[part] > 0) & found.any(-1)
        logits = torch.einsum("nh,nkh->nk", flat[part], head.weight[candidates])
        tokens = candidates if head.token_ids is None else head.token_ids[candidates]
        scores = net.scaled(logits) + selector.edges(flat[part], before[part], tokens)
        gold = found[chosen].int().argmax(-1)
        losses.append(F.cross_entropy(scores[chosen], gold, reduction="none"))
        taught.append(weights[part][chosen])
    total = (torch.cat(losses) * torch.cat(taught)).sum()
    return total / over_ranks(weights.sum()).clamp(min=_TINY)


@torch.no_grad()
def _candidates(head: Head, rows: Tensor, count: int) -> Tensor:
    logits = F.linear(rows.to(head.weight.dtype), head.weight)
    return best_candidates(logits, min(count, len(head.weight)))[1]


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
