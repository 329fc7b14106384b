"""A drafter's loss by its states, a chunk of the vocabulary at a time: no row of logits is whole.

Two walks over the lm_head. The first learns the log-sum-exp of both sides and the likeliest tokens,
the second makes the losses and sums up the gradient. With e(v) = q(v) log(q(v) / p(v)), what is
kept of an entry h(v) = e(v), or -q(v) where e(v) is clipped, and K = sum_v h(v), the gradient of

    ce_share * -log q(label) + kl_share * sum_v min(e(v), clip)

by the logit of v is (divergences.opd, where g = h + q)

    ce_share * (q(v) - [v = label]) + kl_share * (h(v) - q(v) K)

K is known when the second walk ends. So it sums up A = sum_v (q(v) - [v = label]) W(v) and
B = sum_v h(v) W(v) apart, and the gradient by the state is

    (ce_share - kl_share K) A + kl_share (B - K W(label))

The label is taken off in the sum, not behind it: a q of nearly 1 would be rounded to 1 in bfloat16.
Likewise h is summed and not g, of which little is left once q is taken off again.

# C positions of a chunk, V rows of the lm_head (vocabulary), W of them in a chunk, H hidden
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash_batch.kernels.opd_loss import FUSED, Terms

WORTH_ROWS = 128
"""Positions below which products with the lm_head are so much bound by reading it that twice as
many with more positions take less: README.md has the arithmetic."""

_WHOLE_BUFFERS, _CHUNK_BUFFERS = 3, 4
_ALIGNED = 64


class StateLosses(NamedTuple):
    """What came of a chunk of positions; but for the gradient as opd_loss.TokenLosses.

    top, second: always there.
    by_state: float32 (or better) [C, H], gradient of ce_share * cross_entropy + kl_share *
        divergence by the student's states; [0, H] where it was not asked for.
    """

    cross_entropy: Tensor
    divergence: Tensor
    clipped: Tensor
    hits: Tensor
    top: Tensor
    second: Tensor
    by_state: Tensor


class Summary(NamedTuple):
    """Of the logits of a row so far, all [C]: the largest, the next, log-sum-exp, first largest."""

    most: Tensor
    second: Tensor
    log_sum: Tensor
    first: Tensor  # int64

    @staticmethod
    def none(like: Tensor) -> Summary:
        """Of no logits, for states `like` [C, H]."""
        kind = torch.promote_types(like.dtype, torch.float32)
        least = like.new_full((3, len(like)), float("-inf"), dtype=kind)
        return Summary(least[0], least[1], least[2], like.new_zeros(len(like), dtype=torch.int64))


class Entries(NamedTuple):
    """Of a chunk of the vocabulary.

    sums: [3, C]: its part of the divergence, of K, and the label's logit if it is here.
    clipped: int64 [C].
    by_label: [C, W], q(v) - [v = label]; for `forward_kl` q(v) - p(v).
    kept: [C, W], h(v); [C, 0] for losses other than `opd`.
    """

    sums: Tensor
    clipped: Tensor
    by_label: Tensor
    kept: Tensor


def rows_of_whole(num_entries: int, element_size: int, logit_bytes: int) -> int:
    """Positions whose logits and their gradient, all V of them, fit into so many bytes."""
    return logit_bytes // (_WHOLE_BUFFERS * num_entries * element_size)


def entries_of_chunk(num_rows: int, element_size: int, logit_bytes: int) -> int:
    """Vocabulary entries of which the same fits, in chunks: W, 64 or more."""
    fitting = logit_bytes // (_CHUNK_BUFFERS * num_rows * element_size)
    return max(fitting // _ALIGNED, 1) * _ALIGNED


def vocabulary_loss(
    weight: Tensor,
    student: Tensor,
    teacher: Tensor | None,
    labels: Tensor | None,
    terms: Terms,
    num_entries: int,
    *,
    wants_gradient: bool = True,
) -> StateLosses:
    """Losses of states, and the gradient by them, with at most [C, num_entries] held.

    Args:
        weight: of the lm_head [V, H].
        student, teacher: states [C, H]; the latter not needed for `ce` with labels.
        labels: rows of the lm_head, int64 [C]; without them the teacher's likeliest.
        terms: what is summed up; shares are (1, 0) for `ce` and (0, 1) for `forward_kl`.
        num_entries: W.
    """
    if teacher is not None and terms.kind == "ce" and labels is not None:
        teacher = None
    sides = tuple(each.to(weight.dtype) for each in (student, teacher) if each is not None)
    summaries = _first_walk(weight, sides, num_entries)
    if labels is None:
        labels = summaries[-1].first
    if terms.kind == "ce":
        sides = sides[:1]
    found = _second_walk(
        weight, sides, summaries, labels, terms, num_entries, wants_gradient=wants_gradient
    )
    (divergence, _, own), clipped, by_state = found
    ours = summaries[0]
    return StateLosses(
        *(ours.log_sum - own, divergence, clipped, ours.first == labels),
        *(ours.most - ours.log_sum, ours.second - ours.log_sum, by_state),
    )


def _logits(
    weight: Tensor, sides: tuple[Tensor, ...], num_entries: int
) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """Every chunk: its first row of the lm_head, these rows, and the logits of each side."""
    for start in range(0, len(weight), num_entries):
        part = weight[start : start + num_entries]
        yield start, part, [F.linear(side, part) for side in sides]


def _first_walk(weight: Tensor, sides: tuple[Tensor, ...], num_entries: int) -> list[Summary]:
    summaries = [Summary.none(side) for side in sides]
    for start, _, logits in _logits(weight, sides, num_entries):
        summaries = [
            summarise(before, each, start) for before, each in zip(summaries, logits, strict=True)
        ]
    return summaries


def _second_walk(
    weight: Tensor,
    sides: tuple[Tensor, ...],
    summaries: list[Summary],
    labels: Tensor,
    terms: Terms,
    num_entries: int,
    *,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sums [3, C], clipped [C], gradient by states)."""
    log_sums = summaries[0].log_sum, summaries[-1].log_sum
    sums, clipped = log_sums[0].new_zeros(3, len(labels)), torch.zeros_like(labels)
    by_label, kept = log_sums[0].new_zeros(2, *(sides[0].shape if wants_gradient else (0, 0)))
    for start, part, logits in _logits(weight, sides, num_entries):
        found = loss_entries(logits[0], logits[-1], start, labels, log_sums, terms)
        sums, clipped = sums + found.sums, clipped + found.clipped
        if wants_gradient:
            by_label += found.by_label @ part
            if terms.kind == "opd":
                kept += found.kept @ part
    if not wants_gradient or terms.kind != "opd":
        return sums, clipped, by_label
    ce_share, kl_share = terms.shares
    total = sums[1].unsqueeze(1)
    kept -= total * weight[labels]
    return sums, clipped, by_label.mul_(ce_share - kl_share * total).add_(kept, alpha=kl_share)


def summarise(before: Summary, logits: Tensor, start: int) -> Summary:
    """With the logits [C, W] of the rows from `start` on."""
    if logits.device.type == "cuda" and logits.dtype in FUSED:
        from adaflash_batch.kernels import triton_vocabulary_loss

        return triton_vocabulary_loss.summarise(before, logits, start)
    return summarise_reference(before, logits, start)


def summarise_reference(before: Summary, logits: Tensor, start: int) -> Summary:
    """`summarise` in PyTorch, on any device."""
    logits = logits.to(before.most.dtype)
    at = logits.argmax(-1, keepdim=True)
    most = logits.gather(1, at).squeeze(1)
    second = logits.scatter(1, at, float("-inf")).amax(1)
    return Summary(
        torch.maximum(before.most, most),
        torch.maximum(torch.minimum(before.most, most), torch.maximum(before.second, second)),
        torch.logaddexp(before.log_sum, logits.logsumexp(-1)),
        torch.where(most > before.most, at.squeeze(1) + start, before.first),
    )


def loss_entries(
    student: Tensor,
    teacher: Tensor,
    start: int,
    labels: Tensor,
    log_sums: tuple[Tensor, Tensor],
    terms: Terms,
) -> Entries:
    """What the rows from `start` on add.

    Args:
        student, teacher: their logits [C, W]; the latter is not read for `ce`.
        labels: int64 [C], rows of the lm_head, here or not.
        log_sums: of both sides over the whole vocabulary, [C].
        terms: see vocabulary_loss.
    """
    if student.device.type == "cuda" and student.dtype in FUSED:
        from adaflash_batch.kernels import triton_vocabulary_loss

        return triton_vocabulary_loss.loss_entries(student, teacher, start, labels, log_sums, terms)
    return loss_entries_reference(student, teacher, start, labels, log_sums, terms)


def loss_entries_reference(
    student: Tensor,
    teacher: Tensor,
    start: int,
    labels: Tensor,
    log_sums: tuple[Tensor, Tensor],
    terms: Terms,
) -> Entries:
    """`loss_entries` in PyTorch, on any device."""
    log_q, log_p = (
        logits.to(total.dtype) - total.unsqueeze(1)
        for logits, total in zip((student, teacher), log_sums, strict=True)
    )
    at = (labels - start).clamp(0, student.shape[1] - 1).unsqueeze(1)
    is_here = (at.squeeze(1) + start == labels).to(log_q.dtype)
    own = torch.where(is_here > 0, student.gather(1, at).squeeze(1).to(log_q.dtype), 0.0)
    clipped, kept = torch.zeros_like(labels), log_q.new_zeros(len(labels), 0)
    divergence = log_q.new_zeros(len(labels))
    q = log_q.exp()
    if terms.kind == "opd":
        divergence, clipped, kept = _clipped(q, log_q.sub_(log_p).mul_(q), terms.clip)
    elif terms.kind == "forward_kl":
        p = log_p.exp()
        divergence = log_p.sub_(log_q).mul_(p).sum(-1)
        q.sub_(p)
    if terms.kind != "forward_kl":
        q.scatter_add_(1, at, -is_here.unsqueeze(1))
    sums = torch.stack((divergence, kept.sum(-1), own))
    return Entries(sums, clipped, q.to(student.dtype), kept.to(student.dtype))


def _clipped(q: Tensor, entries: Tensor, clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence [C], clipped entries [C] and h [C, W], made of q(v) and e(v), which is used up."""
    if clip is None:
        return entries.sum(-1), torch.zeros_like(entries[:, 0], dtype=torch.int64), entries
    above = entries > clip
    divergence = entries.clamp(max=clip).sum(-1)
    return divergence, above.sum(-1), torch.where(above, -q, entries)
