"""What a drafter's logits cost, with the gradient by them: the reference, and which form runs.

Logits are those of a chunk of positions. In chunks of the vocabulary (vocabulary_loss.py) there are
six products with the lm_head instead of three, since no gradient is known before the log-sum-exp of
the whole row. README.md says when that takes less.

# C positions of a chunk, V rows of the lm_head (vocabulary)
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from adaflash_batch.kernels.divergences import forward_kl, opd

LossKind = Literal["ce", "forward_kl", "opd"]

FUSED = (torch.bfloat16, torch.float16, torch.float32)
"""Types of logits that the form for GPUs takes."""


class Terms(NamedTuple):
    """Of what a loss is made.

    kind: see adapt.losses.Objective.
    shares: of the cross-entropy and of the divergence.
    clip: nats, the most that a vocabulary entry adds to the reverse KL; None is off.
    """

    kind: LossKind
    shares: tuple[float, float]
    clip: float | None = None


class TokenLosses(NamedTuple):
    """What came of a chunk.

    cross_entropy, divergence: float32 (or better) [C], nats, before shares.
    clipped: int64 [C], vocabulary entries.
    hits: bool [C], where the likeliest token is the label.
    top, second: [C], log-probabilities of the two likeliest tokens; empty where not asked for.
    by_logit: [C, V], gradient of ce_share * cross_entropy + kl_share * divergence.
    """

    cross_entropy: Tensor
    divergence: Tensor
    clipped: Tensor
    hits: Tensor
    top: Tensor
    second: Tensor
    by_logit: Tensor


def opd_loss(
    student: Tensor,
    teacher: Tensor | None,
    labels: Tensor | None,
    terms: Terms,
    *,
    with_likeliest: bool = False,
) -> TokenLosses:
    """Cross-entropy, divergence, and the gradient of their sum.

    Args:
        student: logits [C, V].
        teacher: logits [C, V], not needed for `ce` with labels.
        labels: rows of the lm_head, int64 [C]; without them the teacher's likeliest.
        terms: what is summed up.
        with_likeliest: `top` and `second` are wanted.
    """
    if student.device.type == "cuda" and student.dtype in FUSED:
        from adaflash_batch.kernels import triton_opd_loss

        return triton_opd_loss.opd_loss(student, teacher, labels, terms)
    return opd_loss_reference(student, teacher, labels, terms, with_likeliest=with_likeliest)


def opd_loss_reference(
    student: Tensor,
    teacher: Tensor | None,
    labels: Tensor | None,
    terms: Terms,
    *,
    with_likeliest: bool = False,
) -> TokenLosses:
    """`opd_loss` in PyTorch, on any device."""
    log_q = _log_probabilities(student)
    log_p = None
    if teacher is not None and (terms.kind != "ce" or labels is None):
        log_p = _log_probabilities(teacher)
    if labels is None:
        labels = cast(Tensor, log_p).argmax(-1)
    best = log_q.argmax(-1)
    top = second = log_q.new_empty(0)
    if with_likeliest:
        top, second = _two_likeliest(log_q, best)
    cross_entropy = -log_q.gather(1, labels.unsqueeze(1)).squeeze(1)
    clipped = torch.zeros_like(labels)
    if terms.kind == "ce":
        divergence, gradient = torch.zeros_like(cross_entropy), log_q.exp_()
    elif terms.kind == "forward_kl":
        divergence, gradient = forward_kl(log_q, cast(Tensor, log_p))
    else:
        divergence, clipped, gradient = opd(log_q, cast(Tensor, log_p), terms.shares, terms.clip)
    share = gradient.new_full((len(labels), 1), -terms.shares[0])
    gradient.scatter_add_(1, labels.unsqueeze(1), share)
    return TokenLosses(cross_entropy, divergence, clipped, best == labels, top, second, gradient)


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _two_likeliest(log_q: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [C] of the likeliest tokens `best` [C] and of those that come next."""
    at = best.unsqueeze(1)
    top = log_q.gather(1, at)
    second = log_q.scatter_(1, at, float("-inf")).amax(1)
    log_q.scatter_(1, at, top)
    return top.squeeze(1), second
