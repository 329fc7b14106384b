"""The steps of `vocabulary_loss` that go over logits, a program for each position.

# C positions of a chunk, W vocabulary entries of a chunk
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaflash_batch.kernels.opd_loss import LossKind, Terms
from adaflash_batch.kernels.triton_opd_loss import KINDS, log_pair, summary_of_row
from adaflash_batch.kernels.variant import LAUNCH, Variant
from adaflash_batch.kernels.vocabulary_loss import Entries, Summary

_BLOCK, _NUM_WARPS = 2048, 8
_FORWARD_KL, _OPD = tl.constexpr(KINDS["forward_kl"]), tl.constexpr(KINDS["opd"])


def summarise(before: Summary, logits: Tensor, start: int) -> Summary:
    """See vocabulary_loss.summarise."""
    assert logits.is_contiguous()
    num_rows, width = logits.shape
    numbers = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    first = torch.empty_like(before.first)
    summarise_kernel[(max(num_rows, 1),)](
        *(*before, logits, numbers, first, start, num_rows, width),
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=_NUM_WARPS,
        **LAUNCH,
    )
    return Summary(numbers[0], numbers[1], numbers[2], first)


@triton.jit
def summarise_kernel(
    most_before: tl.tensor,
    second_before: tl.tensor,
    log_sum_before: tl.tensor,
    first_before: tl.tensor,
    logits: tl.tensor,
    numbers: tl.tensor,
    first_after: tl.tensor,
    start: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A program for each position."""
    index = tl.program_id(0)
    if index < num_rows:
        row = logits + index.to(tl.int64) * width
        most, first, second, log_sum = summary_of_row(row, width, BLOCK)
        most_so_far = tl.load(most_before + index)
        log_sum_so_far = tl.load(log_sum_before + index)
        second = tl.maximum(second, tl.load(second_before + index))
        at = tl.where(most > most_so_far, first + start, tl.load(first_before + index))
        higher = tl.maximum(log_sum, log_sum_so_far)
        both = tl.exp(log_sum - higher) + tl.exp(log_sum_so_far - higher)
        tl.store(numbers + index, tl.maximum(most, most_so_far))
        tl.store(numbers + num_rows + index, tl.maximum(second, tl.minimum(most, most_so_far)))
        tl.store(numbers + 2 * num_rows + index, higher + tl.log(both))
        tl.store(first_after + index, at.to(tl.int64))


def loss_entries(
    student: Tensor,
    teacher: Tensor,
    start: int,
    labels: Tensor,
    log_sums: tuple[Tensor, Tensor],
    terms: Terms,
) -> Entries:
    """See vocabulary_loss.loss_entries."""
    assert student.is_contiguous()
    assert teacher.is_contiguous()
    num_rows, width = student.shape
    sums = torch.empty(3, num_rows, dtype=torch.float32, device=student.device)
    clipped = torch.empty_like(labels)
    by_label = torch.empty_like(student)
    kept = torch.empty_like(student) if terms.kind == "opd" else student.new_empty(num_rows, 0)
    loss_entries_kernel[(max(num_rows, 1),)](
        *(student, teacher, labels, *log_sums, sums, clipped, by_label, kept),
        *(start, num_rows, width, float("inf") if terms.clip is None else terms.clip),
        KIND=KINDS[terms.kind],
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=_NUM_WARPS,
        **LAUNCH,
    )
    return Entries(sums, clipped, by_label, kept)


@triton.jit
def loss_entries_kernel(
    student: tl.tensor,
    teacher: tl.tensor,
    labels: tl.tensor,
    student_sums: tl.tensor,
    teacher_sums: tl.tensor,
    sums: tl.tensor,
    clipped: tl.tensor,
    by_label: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    clip: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program for each position; see vocabulary_loss for what q, e and h are."""
    index = tl.program_id(0)
    if index < num_rows:
        row = index.to(tl.int64) * width
        student += row
        label = tl.load(labels + index) - start
        student_sum = tl.load(student_sums + index)
        teacher_sum = tl.load(teacher_sums + index)
        divergence = tl.zeros([BLOCK], dtype=tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        above = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, width, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            log_q, log_p = log_pair(student, teacher + row, entry, width, student_sum, teacher_sum)
            q = tl.exp(log_q)
            if KIND == _FORWARD_KL:
                p = tl.exp(log_p)
                divergence += p * (log_p - log_q)
                gradient = q - p
            else:
                gradient = q - tl.where(entry == label, 1.0, 0.0)
            if KIND == _OPD:
                e = q * (log_q - log_p)
                is_above = e > clip
                h = tl.where(is_above, -q, e)
                divergence += tl.where(is_above, clip, e)
                total += h
                above += is_above.to(tl.int32)
                tl.store(kept + row + entry, h, mask=entry < width)
            tl.store(by_label + row + entry, gradient, mask=entry < width)
        is_here = (label >= 0) & (label < width)
        own = tl.load(student + label, mask=is_here, other=0.0).to(tl.float32)
        tl.store(sums + index, tl.sum(divergence, axis=0))
        tl.store(sums + num_rows + index, tl.sum(total, axis=0))
        tl.store(sums + 2 * num_rows + index, own)
        tl.store(clipped + index, tl.sum(above, axis=0).to(tl.int64))


_PLACES = dict.fromkeys(("start", "num_rows", "width"), "i32")
_BEFORE = dict.fromkeys(("most_before", "second_before", "log_sum_before", "numbers"), "*fp32")
_FIRST = dict.fromkeys(("first_before", "first_after"), "*i64")
_SUMS = dict.fromkeys(("student_sums", "teacher_sums", "sums"), "*fp32")


def _summarising(name: str) -> Variant:
    return Variant(
        name=f"summarise {name}",
        kernel=summarise_kernel,
        signature={"logits": f"*{name}"} | _PLACES | _BEFORE | _FIRST,
        constexprs={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        num_stages=3,
    )


def _entries(kind: LossKind, name: str) -> Variant:
    logits = dict.fromkeys(("student", "teacher", "by_label", "kept"), f"*{name}")
    counts = dict.fromkeys(("labels", "clipped"), "*i64")
    return Variant(
        name=f"loss_entries {kind} {name}",
        kernel=loss_entries_kernel,
        signature=logits | counts | _SUMS | _PLACES | {"clip": "fp32"},
        constexprs={"KIND": KINDS[kind], "BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        num_stages=3,
    )


VARIANTS = [
    *(_summarising("bf16"), _summarising("fp32")),
    *(_entries("opd", "bf16"), _entries("opd", "fp32")),
    *(_entries("forward_kl", "bf16"), _entries("ce", "fp16")),
]
