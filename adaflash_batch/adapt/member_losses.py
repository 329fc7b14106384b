"""What each member of the family is trained for: the objective, and its own parts' share of it.

# B blocks, N slots of a block that draft, K candidates, V rows of the head, H hidden
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash_batch.adapt.blocks import Blocks
from adaflash_batch.adapt.choices import Choices, choose
from adaflash_batch.adapt.head_losses import OverRanks, alone, confidence_loss, length_loss
from adaflash_batch.adapt.losses import Bias, Head, draft_loss
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.parameters import is_head
from adaflash_batch.drafter.length import CERTAINTY, HazardHead, certainty
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.selector import best_candidates

# Blocks whose logits are held at once.
_BLOCKS_AT_ONCE = 32
_TINY = torch.finfo(torch.float32).tiny


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


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """The drafting slots of the blocks, flat where nothing else is said; P = B * N.

    rows: [B, N, H]; previous: ids [B, N], true ones; weights, labels, teacher_rows: [P].
    is_taught: bool [P], weight above 0 and label inside the draft vocabulary.
    """

    rows: Tensor
    previous: Tensor
    weights: Tensor
    labels: Tensor
    teacher_rows: Tensor
    is_taught: Tensor
    bias: Bias | None

    @staticmethod
    def of(net: DFlash, head: Head, hidden: Tensor, blocks: Blocks) -> _Task:
        slots = slice(net.config.first_slot, None)
        rows, previous = net.drafting_rows(hidden), predecessors(blocks, net.config.first_slot)
        weights, labels = blocks.weights[:, slots].flatten(), blocks.labels[:, slots].flatten()
        return _Task(
            rows,
            previous,
            weights,
            labels,
            teacher_rows=blocks.teacher_rows[:, slots].flatten(),
            is_taught=(weights > 0) & (head.rows(labels) >= 0),
            bias=_markov_bias(net, head, rows, previous),
        )


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

    Where heads alone learn, it is their loss alone, and no more is computed.

    Args:
        hidden: [T, H], from `forward_blocks`.
        teacher: the rows of `pack_teacher`; None for the cross-entropy alone.
        over_ranks: sums the weights that each part of the loss is divided by, so that the losses
            of all ranks add up to that of the whole batch.
    """
    task = _Task.of(net, head, hidden, blocks)
    learning = [name for name, each in net.named_parameters() if each.requires_grad]
    if learning and all(map(is_head, learning)) and not hidden.requires_grad:
        with torch.no_grad():
            choices = _choices(net, objective, head, task)
        positions, hits = int(task.is_taught.sum()), int((choices.hits & task.is_taught).sum())
        result = MemberLoss(hidden.new_zeros(()), positions, hits, 0.0)
    else:
        result, choices = _drafting_loss(net, objective, head, task, teacher, over_ranks)
    value = result.value
    for loss in _head_losses(net, objective, hidden, task, choices, over_ranks):
        value = value + loss
    return replace(result, value=value)


def no_loss(net: DFlash, nothing: Tensor, over_ranks: OverRanks) -> MemberLoss:
    """That of a rank without blocks: it takes part in the sums of `member_loss`.

    Args:
        nothing: a zero on the rank's device.
    """
    parts = (net.candidate_selector, net.confidence_head, net.length_head)
    for _ in range(1 + sum(part is not None for part in parts)):
        over_ranks(nothing.clone())
    return MemberLoss(nothing, 0, 0, 0.0)


def _drafting_loss(
    net: DFlash,
    objective: Objective,
    head: Head,
    task: _Task,
    teacher: Tensor | None,
    over_ranks: OverRanks,
) -> tuple[MemberLoss, Choices]:
    """The loss of what drafts, and what it drafts."""
    is_judged = isinstance(net.length_head, HazardHead) and net.candidate_selector is None
    loss, stats = draft_loss(
        objective,
        head,
        task.rows.flatten(0, 1),
        task.weights,
        None if teacher is None else teacher[task.teacher_rows],
        task.labels,
        total_weight=over_ranks(task.weights[task.is_taught].sum()),
        bias=task.bias,
        with_certainty=is_judged,
    )
    choices = Choices(stats.hits, stats.certainty)
    if net.candidate_selector is not None:
        selecting, choices = _selector_loss(net, head, task, over_ranks)
        loss = loss + selecting
    elif is_judged:
        # What is outside the draft vocabulary teaches drafting nothing, but is a draft refused.
        others = (task.weights > 0) & ~task.is_taught
        found = _chosen(net, objective, head, task, others).certainty
        assert found is not None
        assert stats.certainty is not None
        choices = Choices(stats.hits, stats.certainty + found)
    hits = int(stats.hits.sum())
    return MemberLoss(loss, stats.positions, hits, stats.clip_rate), choices


def _choices(net: DFlash, objective: Objective, head: Head, task: _Task) -> Choices:
    """What is drafted at all known positions."""
    if net.candidate_selector is not None:
        return _selector_loss(net, head, task, alone)[1]
    return _chosen(net, objective, head, task, task.weights > 0)


def _chosen(
    net: DFlash, objective: Objective, head: Head, task: _Task, is_wanted: Tensor
) -> Choices:
    return choose(
        head,
        task.rows.flatten(0, 1),
        task.labels,
        is_wanted,
        task.bias,
        objective.chunk_rows,
        with_certainty=isinstance(net.length_head, HazardHead),
    )


def _head_losses(
    net: DFlash,
    objective: Objective,
    hidden: Tensor,
    task: _Task,
    choices: Choices,
    over_ranks: OverRanks,
) -> Iterator[Tensor]:
    """Of the heads that judge drafts."""
    shape = task.previous.shape
    is_right, weights = choices.hits.view(shape), task.weights.view(shape)
    if net.confidence_head is not None:
        logits = net.confidence(task.rows, task.previous)
        yield confidence_loss(logits, is_right, weights, over_ranks)
    if net.length_head is not None:
        sure = None if choices.certainty is None else choices.certainty.view(*shape, -1)
        num_known = (weights > 0).sum(1)
        label = objective.length_label
        yield length_loss(net, hidden, is_right, sure, num_known, label, over_ranks)


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
    net: DFlash, head: Head, task: _Task, over_ranks: OverRanks
) -> tuple[Tensor, Choices]:
    """Cross-entropy among the best candidates, where the label is one of them; its choices."""
    config, selector = net.config, net.candidate_selector
    assert selector is not None
    labels, weights = head.rows(task.labels), task.weights.where(task.is_taught, 0.0)
    losses, taught = [task.rows.new_zeros(0, dtype=torch.float32)], [weights[:0]]
    flat, before = task.rows.flatten(0, 1), task.previous.flatten()
    hits, sure = task.is_taught.clone(), flat.new_zeros(len(flat), CERTAINTY, dtype=torch.float32)
    step = _BLOCKS_AT_ONCE * config.num_drafts
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
        best = scores.argmax(-1)
        is_right = found.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        hits[part] &= is_right
        sure[part] = certainty(scores.detach(), best).to(sure.dtype)
    total = (torch.cat(losses) * torch.cat(taught)).sum()
    return total / over_ranks(weights.sum()).clamp(min=_TINY), Choices(hits, sure)


@torch.no_grad()
def _candidates(head: Head, rows: Tensor, count: int) -> Tensor:
    logits = F.linear(rows.to(head.weight.dtype), head.weight)
    return best_candidates(logits, min(count, len(head.weight)))[1]
