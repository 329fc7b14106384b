"""The loss of drafter training in one launch equals its PyTorch reference, gradient included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaflash_batch.adapt import losses
from adaflash_batch.adapt.losses import Bias, Head, LossStats, draft_loss
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.kernels.opd_loss import (
    LossKind,
    Terms,
    TokenLosses,
    opd_loss,
    opd_loss_reference,
)

triton_opd_loss = pytest.importorskip("adaflash_batch.kernels.triton_opd_loss")

TERMS = {
    "ce": Terms("ce", (1.0, 0.0)),
    "forward_kl": Terms("forward_kl", (0.0, 1.0)),
    "opd": Terms("opd", (0.8, 0.2)),
    "opd clipped": Terms("opd", (0.3, 0.7), 0.02),
    "reverse kl clipped": Terms("opd", (0.0, 1.0), 0.005),
}
each_loss = pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies take several, the last of them not full."""
    monkeypatch.setattr(triton_opd_loss, "_BLOCK", 64)


def logits_of(
    num: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the student and of a teacher that often agrees with it, and labels."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(num, vocabulary, generator=generator) * 2
    student = teacher + torch.randn(num, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (num,), generator=generator)
    return student.to(dtype), teacher.to(dtype), labels


def rms_ratio(ours: Tensor, reference: Tensor, least: float = 1e-6) -> float:
    error = (ours.double() - reference.double()).pow(2).mean().sqrt()
    return float(error / reference.double().pow(2).mean().sqrt().clamp(min=least))


def check(ours: TokenLosses, reference: TokenLosses) -> None:
    """Nats are differences of logarithms of about 1: what is left of them is no better than that.

    So are the two or three entries of a gradient whose row is as good as certain.
    """
    assert torch.equal(ours.hits, reference.hits)
    assert torch.equal(ours.clipped, reference.clipped)
    scales = {"cross_entropy": 1.0, "divergence": 1.0, "top": 1.0, "second": 1.0, "by_logit": 0.03}
    for name, least in scales.items():
        mine, theirs = getattr(ours, name), getattr(reference, name)
        assert mine.shape == theirs.shape
        if mine.numel():
            assert rms_ratio(mine, theirs, least) < 1e-5, name


@each_loss
@pytest.mark.parametrize("has_labels", [False, True])
def test_it_is_the_reference(terms: Terms, has_labels: bool) -> None:
    student, teacher, targets = logits_of(5, 150, 0)
    labels = targets if has_labels else None
    before = [each.clone() for each in (student, teacher, targets)]
    reference = opd_loss_reference(student, teacher, labels, terms, with_likeliest=True)
    check(triton_opd_loss.opd_loss(student, teacher, labels, terms), reference)
    assert bool(reference.clipped.any()) == (terms.clip is not None)
    assert reference.by_logit.abs().min() > 0
    assert all(map(torch.equal, (student, teacher, targets), before))


@settings(max_examples=10)
@given(
    st.sampled_from(list(TERMS.values())),
    st.integers(0, 4),
    st.sampled_from([2, 63, 64, 65, 129]),
    st.integers(0, 999),
)
def test_any_sizes(terms: Terms, num: int, vocabulary: int, seed: int) -> None:
    student, teacher, labels = logits_of(num, vocabulary, seed)
    reference = opd_loss_reference(student, teacher, labels, terms, with_likeliest=True)
    check(triton_opd_loss.opd_loss(student, teacher, labels, terms), reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_loss
def test_reductions_are_float32_whatever_the_logits(terms: Terms, dtype: torch.dtype) -> None:
    student, teacher, labels = logits_of(4, 130, 1, dtype)
    reference = opd_loss_reference(student, teacher, labels, terms, with_likeliest=True)
    ours = triton_opd_loss.opd_loss(student, teacher, labels, terms)
    assert ours.by_logit.dtype == dtype
    # The interpreter cuts off what a GPU rounds: up to a unit in the last place.
    assert rms_ratio(ours.by_logit, reference.by_logit) < torch.finfo(dtype).eps / 2
    check(ours._replace(by_logit=reference.by_logit), reference)


def test_equal_logits_are_no_trouble() -> None:
    """The first of the likeliest is taken, wherever the next one is; it leads by nothing."""
    for again in (1, 64, 129):
        student, _, _ = logits_of(1, 130, 2)
        student[0, 0] = student[0, again] = 50.0
        labels = torch.tensor([0])
        reference = opd_loss_reference(student, None, labels, TERMS["ce"], with_likeliest=True)
        ours = triton_opd_loss.opd_loss(student, None, labels, TERMS["ce"])
        check(ours, reference)
        assert torch.equal(ours.top, ours.second)
        assert bool(ours.hits)


def test_logits_that_are_no_numbers_show() -> None:
    student, teacher, labels = logits_of(2, 100, 3)
    student[0, 70] = torch.nan
    ours = triton_opd_loss.opd_loss(student, teacher, labels, TERMS["opd"])
    assert ours.cross_entropy.isfinite().tolist() == [False, True]
    assert ours.by_logit.isfinite().all(1).tolist() == [False, True]


def run_draft_loss(objective: Objective, *, has_bias: bool) -> tuple[list[Tensor], LossStats]:
    """The loss and all gradients, of a drafter in float32 that has a restricted vocabulary."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    head = Head.restricted(normal(90, 12), torch.arange(1, 90, 1))
    student, teacher, weights = normal(7, 12).requires_grad_(), normal(7, 12), torch.rand(7)
    weights[2] = 0.0
    labels = torch.tensor([3, 0, 5, 88, 40, 7, 9])
    bias = Bias(normal(7, 3).requires_grad_(), normal(89, 3).requires_grad_())
    loss, stats = draft_loss(
        objective,
        head,
        student,
        torch.linspace(0.1, 1.0, 7).where(weights > 0, 0.0),
        teacher,
        labels,
        bias=bias if has_bias else None,
        with_certainty=True,
    )
    inputs = [student, *bias] if has_bias else [student]
    return [loss.detach(), *torch.autograd.grad(loss, inputs)], stats


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["ce", "forward_kl", "opd"])
def test_training_with_it_is_training(
    kind: LossKind, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = Objective(kind, clip=0.02, chunk_rows=4)
    expected, expected_stats = run_draft_loss(objective, has_bias=has_bias)

    def fused(*arguments: object, with_likeliest: bool) -> TokenLosses:
        found: TokenLosses = triton_opd_loss.opd_loss(*arguments)
        return found

    monkeypatch.setattr(losses, "opd_loss", fused)
    found, stats = run_draft_loss(objective, has_bias=has_bias)
    for mine, theirs in zip(found, expected, strict=True):
        assert rms_ratio(mine, theirs) < 1e-5
    for field in dataclasses.fields(LossStats):
        mine, theirs = getattr(stats, field.name), getattr(expected_stats, field.name)
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        else:
            assert mine == pytest.approx(theirs, rel=1e-5), field.name
    assert (stats.clip_rate > 0) == (kind == "opd")


def test_tensors_on_the_host_take_the_reference() -> None:
    student, teacher, labels = logits_of(3, 40, 5)
    found = opd_loss(student.double(), teacher.double(), labels, TERMS["opd"])
    assert found.by_logit.dtype == torch.float64
    assert len(found.top) == 0
