"""`opd_loss` in one launch: a program reads its row three times and never writes logits.

# C positions of a chunk, V rows of the lm_head (vocabulary)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaflash_batch.kernels.opd_loss import LossKind, Terms, TokenLosses
from adaflash_batch.kernels.variant import LAUNCH, Variant

_BLOCK, _NUM_WARPS = 2048, 8
KINDS: dict[LossKind, int] = {"ce": 0, "forward_kl": 1, "opd": 2}
"""What kernels call them."""
_CE, _FORWARD_KL, _OPD = map(tl.constexpr, KINDS.values())
_NONE = tl.constexpr(0x7FFFFFFF)
# Below all logits, and no infinity: differences of it stay numbers.
_LOWEST = tl.constexpr(-3.0e38)


def opd_loss(
    student: Tensor, teacher: Tensor | None, labels: Tensor | None, terms: Terms
) -> TokenLosses:
    """See opd_loss.opd_loss, with the likeliest in any case.

    Reductions are float32, the gradient has the type of the logits.
    """
    num_rows, vocabulary = student.shape
    needs_teacher = terms.kind != "ce" or labels is None
    teacher = student if teacher is None or not needs_teacher else teacher
    assert student.is_contiguous()
    assert teacher.is_contiguous()
    assert teacher.dtype == student.dtype
    place = student.device
    numbers = torch.empty(4, num_rows, dtype=torch.float32, device=place)
    counts = torch.empty(2, num_rows, dtype=torch.int64, device=place)
    by_logit = torch.empty_like(student)
    opd_loss_kernel[(max(num_rows, 1),)](
        *(student, teacher, counts if labels is None else labels, numbers, counts, by_logit),
        *(num_rows, vocabulary, float("inf") if terms.clip is None else terms.clip, *terms.shares),
        KIND=KINDS[terms.kind],
        HAS_LABELS=labels is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=_NUM_WARPS,
        **LAUNCH,
    )
    cross_entropy, divergence, top, second = numbers
    return TokenLosses(
        cross_entropy, divergence, counts[0], counts[1].bool(), top, second, by_logit
    )


@triton.jit
def summary_of_row(row: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """(largest logit, its first token, second largest logit, log-sum-exp)."""
    most = tl.full([BLOCK], _LOWEST, dtype=tl.float32)
    second = tl.full([BLOCK], _LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = tl.full([BLOCK], 0, dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        at = tl.where(x > most, token, at)
        second = tl.maximum(second, tl.minimum(most, x))
        higher = tl.maximum(most, x)
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    top = tl.max(most, axis=0)
    first = tl.min(tl.where(most == top, at, _NONE), axis=0)
    others = tl.where((most == top) & (at == first), second, most)
    log_sum = top + tl.log(tl.sum(total * tl.exp(most - top), axis=0))
    return top, first, tl.max(others, axis=0), log_sum


@triton.jit
def log_pair(
    student: tl.tensor,
    teacher: tl.tensor,
    token: tl.tensor,
    vocabulary: tl.tensor,
    student_sum: tl.tensor,
    teacher_sum: tl.tensor,
) -> tl.tensor:
    """Log-probabilities of both sides; behind the vocabulary both are such that nothing counts."""
    is_there = token < vocabulary
    log_q = tl.load(student + token, mask=is_there, other=0.0).to(tl.float32) - student_sum
    log_p = tl.load(teacher + token, mask=is_there, other=0.0).to(tl.float32) - teacher_sum
    return tl.where(is_there, log_q, _LOWEST), tl.where(is_there, log_p, _LOWEST)


@triton.jit
def opd_loss_kernel(
    student: tl.tensor,
    teacher: tl.tensor,
    labels: tl.tensor,
    numbers: tl.tensor,
    counts: tl.tensor,
    by_logit: tl.tensor,
    num_rows: tl.tensor,
    vocabulary: tl.tensor,
    clip: tl.tensor,
    ce_share: tl.tensor,
    kl_share: tl.tensor,
    KIND: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program for each position; see adapt.losses.Objective and divergences.opd."""
    index = tl.program_id(0)
    if index < num_rows:
        row = index.to(tl.int64) * vocabulary
        student += row
        teacher += row
        by_logit += row
        top, best, second, log_sum = summary_of_row(student, vocabulary, BLOCK)
        teacher_sum = log_sum
        if KIND != _CE or not HAS_LABELS:
            _, label, _, teacher_sum = summary_of_row(teacher, vocabulary, BLOCK)
        if HAS_LABELS:
            label = tl.load(labels + index).to(tl.int32)
        divergence = tl.zeros([BLOCK], dtype=tl.float32)
        kept = tl.zeros([BLOCK], dtype=tl.float32)
        clipped = tl.zeros([BLOCK], dtype=tl.int32)
        if KIND != _CE:
            for start in range(0, vocabulary, BLOCK):
                token = start + tl.arange(0, BLOCK)
                log_q, log_p = log_pair(student, teacher, token, vocabulary, log_sum, teacher_sum)
                if KIND == _OPD:
                    q = tl.exp(log_q)
                    entry = q * (log_q - log_p)
                    is_above = entry > clip
                    divergence += tl.where(is_above, clip, entry)
                    kept += tl.where(is_above, 0.0, entry + q)
                    clipped += is_above.to(tl.int32)
                else:
                    divergence += tl.exp(log_p) * (log_p - log_q)
        factor = ce_share - kl_share * tl.sum(kept, axis=0)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            log_q, log_p = log_pair(student, teacher, token, vocabulary, log_sum, teacher_sum)
            q = tl.exp(log_q)
            if KIND == _OPD:
                entry = q * (log_q - log_p)
                gradient = kl_share * tl.where(entry > clip, 0.0, entry + q) + q * factor
            elif KIND == _FORWARD_KL:
                gradient = q - tl.exp(log_p)
            else:
                gradient = q
            gradient -= tl.where(token == label, ce_share, 0.0)
            tl.store(by_logit + token, gradient, mask=token < vocabulary)
        own = tl.load(student + label).to(tl.float32)
        tl.store(numbers + index, log_sum - own)
        tl.store(numbers + num_rows + index, tl.sum(divergence, axis=0))
        tl.store(numbers + 2 * num_rows + index, top - log_sum)
        tl.store(numbers + 3 * num_rows + index, second - log_sum)
        tl.store(counts + index, tl.sum(clipped, axis=0).to(tl.int64))
        tl.store(counts + num_rows + index, (best == label).to(tl.int64))


_TYPES = {
    **{"labels": "*i64", "counts": "*i64", "numbers": "*fp32"},
    **dict.fromkeys(("num_rows", "vocabulary"), "i32"),
    **dict.fromkeys(("clip", "ce_share", "kl_share"), "fp32"),
}


def _variant(kind: LossKind, name: str, *, has_labels: bool) -> Variant:
    logits = dict.fromkeys(("student", "teacher", "by_logit"), f"*{name}")
    return Variant(
        name=f"opd_loss {kind} {name}",
        kernel=opd_loss_kernel,
        signature=logits | _TYPES,
        constexprs={"KIND": KINDS[kind], "HAS_LABELS": has_labels, "BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        num_stages=3,
    )


VARIANTS = [
    _variant("opd", "bf16", has_labels=True),
    _variant("opd", "fp32", has_labels=False),
    _variant("forward_kl", "bf16", has_labels=True),
    _variant("ce", "fp16", has_labels=True),
]
