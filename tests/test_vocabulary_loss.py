"""The loss by chunks of the vocabulary is the loss, gradient included, and holds no whole row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_opd_loss_kernel import TERMS, each_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adaflash_batch.adapt.losses import Bias, Head, LossStats, draft_loss
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.kernels import vocabulary_loss as chunked
from adaflash_batch.kernels.opd_loss import Terms
from adaflash_batch.kernels.vocabulary_loss import Summary, vocabulary_loss

triton_form = pytest.importorskip("adaflash_batch.kernels.triton_vocabulary_loss")

each_form = pytest.mark.parametrize("form", ["torch", "triton"])
HIDDEN = 12


def choose(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that chunks take several, and outputs full of NaN until they are written."""
    if form == "torch":
        return
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(triton_form, "_BLOCK", 16)
    for name in ("summarise", "loss_entries"):
        monkeypatch.setattr(chunked, name, getattr(triton_form, name))

    def poisoned(made: Tensor) -> Tensor:
        return made.fill_(torch.nan if made.is_floating_point() else -9)

    class Poisoning:
        float32 = torch.float32

        @staticmethod
        def empty(*shape: int, **rest: Any) -> Tensor:
            return poisoned(empty(*shape, **rest))

        @staticmethod
        def empty_like(other: Tensor) -> Tensor:
            return poisoned(empty_like(other))

    monkeypatch.setattr(triton_form, "torch", Poisoning)


def states_of(num: int, vocabulary: int, seed: int, scale: float = 1.0) -> tuple[Tensor, ...]:
    """The lm_head, the student's states, a teacher's that often agrees, labels."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator)
    teacher = torch.randn(num, HIDDEN, generator=generator) * scale
    student = teacher + torch.randn(num, HIDDEN, generator=generator) * 0.3 * scale
    return weight, student, teacher, torch.randint(0, vocabulary, (num,), generator=generator)


def by_autograd(
    weight: Tensor, student: Tensor, teacher: Tensor, labels: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64, as the objective is written: (cross-entropy, divergence, clipped, gradient)."""
    state = student.double().requires_grad_()

    def log_probabilities(states: Tensor) -> Tensor:
        logits = states @ weight.double().T
        rounded = logits.to(weight.dtype).double() if weight.dtype == torch.bfloat16 else logits
        return (logits + (rounded - logits).detach()).log_softmax(-1)

    log_q, log_p = log_probabilities(state), log_probabilities(teacher.double())
    cross_entropy = -log_q.gather(1, labels.unsqueeze(1)).squeeze(1)
    entries = log_q.exp() * (log_q - log_p)
    if terms.kind == "forward_kl":
        entries = log_p.exp() * (log_p - log_q)
    if terms.kind == "ce":
        entries = entries * 0.0
    above = entries > (float("inf") if terms.clip is None else terms.clip)
    divergence = entries.clamp(max=terms.clip).sum(-1) if terms.clip else entries.sum(-1)
    total = terms.shares[0] * cross_entropy.sum() + terms.shares[1] * divergence.sum()
    (gradient,) = torch.autograd.grad(total, state)
    return cross_entropy.detach(), divergence.detach(), above.sum(-1), gradient


def rms_ratio(ours: Tensor, reference: Tensor, least: float) -> float:
    error = (ours.double() - reference.double()).pow(2).mean().sqrt()
    return float(error / reference.double().pow(2).mean().sqrt().clamp(min=least))


def check(inputs: tuple[Tensor, ...], terms: Terms, width: int, *, has_labels: bool = True) -> None:
    weight, student, teacher, labels = inputs
    if not has_labels:
        labels = (teacher.double() @ weight.double().T).argmax(-1)
    before = [each.clone() for each in inputs]
    found = vocabulary_loss(weight, student, teacher, labels if has_labels else None, terms, width)
    assert all(map(torch.equal, inputs, before))
    cross_entropy, divergence, clipped, gradient = by_autograd(
        weight, student, teacher, labels, terms
    )
    assert torch.equal(found.clipped, clipped)
    log_q = (student.double() @ weight.double().T).log_softmax(-1)
    top, second = log_q.topk(2).values.unbind(1)
    assert torch.equal(found.hits, log_q.argmax(-1) == labels)
    pairs = {
        "cross_entropy": (found.cross_entropy, cross_entropy, 1.0),
        "divergence": (found.divergence, divergence, 1.0),
        "top": (found.top, top, 1.0),
        "second": (found.second, second, 1.0),
        "by_state": (found.by_state, gradient, 0.1),
    }
    for name, (ours, reference, least) in pairs.items():
        assert ours.shape == reference.shape
        if ours.numel():
            assert rms_ratio(ours, reference, least) < 1e-5, name


@each_form
@each_loss
def test_it_is_the_loss_and_its_gradient(
    terms: Terms, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are the teacher's likeliest here, given in the tests below."""
    choose(form, monkeypatch)
    check(states_of(3, 45, 0), terms, 20, has_labels=False)


@settings(max_examples=10)
@given(
    st.sampled_from(list(TERMS.values())),
    *(st.integers(0, 4), st.sampled_from([2, 15, 16, 17, 49]), st.sampled_from([1, 16, 20, 64])),
    *(st.integers(0, 999), st.sampled_from(["torch", "triton"])),
)
def test_any_sizes(
    terms: Terms, num: int, vocabulary: int, width: int, seed: int, form: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        choose(form, patch)
        check(states_of(num, vocabulary, seed), terms, width)


@each_form
@each_loss
def test_extreme_logits(terms: Terms, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of nats: all but one entry of a row is 0, wherever the chunk with it comes."""
    choose(form, monkeypatch)
    weight, student, teacher, labels = states_of(4, 50, 3)
    # Powers of 2 that float32 sums up without rounding, so that only the loss is compared.
    weight = weight.sign() * 64
    weight += torch.arange(50).unsqueeze(1)
    student, teacher = student.sign() * 16, teacher.sign() * 16
    found = vocabulary_loss(weight, student, teacher, labels, terms, 16)
    cross_entropy, divergence, clipped, gradient = by_autograd(
        weight, student, teacher, labels, terms
    )
    assert float(cross_entropy.max()) > 1000
    torch.testing.assert_close(found.cross_entropy.double(), cross_entropy)
    # A log-sum-exp of up to 2 ** 14 is known to 2 ** -11, so that is how well each q is known, and
    # what is multiplied by q.
    torch.testing.assert_close(found.divergence.double(), divergence, rtol=2**-10, atol=1e-6)
    least = float(weight.abs().max()) * 2**-10 * (1 + float(divergence.abs().max()))
    torch.testing.assert_close(found.by_state.double(), gradient, rtol=1e-5, atol=least)
    assert torch.equal(found.clipped, clipped)


@each_form
def test_what_equals_the_clip_is_not_clipped(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(form, monkeypatch)
    student, teacher = torch.tensor([[0.0, -200.0]]), torch.tensor([[-0.5, 0.0]])
    sums = torch.zeros(1), torch.zeros(1)
    below = float(torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)))
    for clip, is_above in ((0.5, False), (below, True), (0.51, False)):
        terms = Terms("opd", (0.0, 1.0), clip)
        found = chunked.loss_entries(student, teacher, 7, torch.tensor([8]), sums, terms)
        assert found.clipped.tolist() == [int(is_above)]
        assert found.kept.tolist() == [[-1.0 if is_above else 0.5, 0.0]]
        assert found.by_label.tolist() == [[1.0, -1.0]]
        assert found.sums.flatten().tolist() == [min(0.5, clip), found.kept.sum(), -200.0]


@each_form
def test_the_first_of_equal_logits_is_the_likeliest(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(form, monkeypatch)
    logits = torch.full((1, 40), -1.0)
    logits[0, [3, 21, 38]] = 5.0
    found = Summary.none(logits)
    for start in (0, 20):
        found = chunked.summarise(found, logits[:, start : start + 20].contiguous(), start)
    assert (int(found.first), float(found.most), float(found.second)) == (3, 5.0, 5.0)
    torch.testing.assert_close(found.log_sum, logits.logsumexp(-1))


@each_form
@each_loss
def test_bfloat16_heads_lose_no_more_than_they_must(
    terms: Terms, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the truth for the same rounded logits, to a few units of a bfloat16."""
    choose(form, monkeypatch)
    weight, student, teacher, labels = (
        each.to(torch.bfloat16) if each.is_floating_point() else each
        for each in states_of(3, 45, 1)
    )
    found = vocabulary_loss(weight, student, teacher, labels, terms, 20)
    assert found.by_state.dtype == torch.float32
    cross_entropy, _, _, gradient = by_autograd(weight, student, teacher, labels, terms)
    assert rms_ratio(found.cross_entropy, cross_entropy, 1.0) < 1e-5
    # The interpreter cuts off what GPUs and PyTorch round: twice as far off at the most.
    units = 8 if form == "triton" else 4
    assert rms_ratio(found.by_state, gradient, 1e-6) < units * torch.finfo(torch.bfloat16).eps


def test_a_state_that_is_no_number_shows() -> None:
    weight, student, teacher, labels = states_of(2, 50, 3)
    student[0, 2] = torch.nan
    found = vocabulary_loss(weight, student, teacher, labels, TERMS["opd"], 16)
    assert found.cross_entropy.isfinite().tolist() == [False, True]
    assert found.by_state.isfinite().all(1).tolist() == [False, True]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of any tensor that was made meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, each.numel())
        return made


def training(objective: Objective, *, vocabulary: int, has_bias: bool = False) -> Any:
    """The loss, its gradients and statistics of 9 positions, one of no weight, and the most
    elements of a tensor."""
    weight, student, teacher, labels = states_of(9, vocabulary + 1, 5)
    head = Head.restricted(weight, torch.arange(1, vocabulary + 1))
    labels[3] = 0
    student.requires_grad_()
    weights = torch.linspace(0.1, 1.0, 9)
    weights[5] = 0.0
    bias = None
    if has_bias:
        bias = Bias(student[:, :3], torch.full((vocabulary, 3), 0.1, requires_grad=True))
    with Largest() as largest:
        loss, stats = draft_loss(
            *(objective, head, student, weights, teacher, labels), bias=bias, with_certainty=True
        )
    (gradient,) = torch.autograd.grad(loss, student)
    return (loss.detach(), gradient), stats, largest.elements


@pytest.mark.parametrize("kind", ["ce", "forward_kl", "opd"])
def test_training_by_it_is_training_and_holds_no_row_of_logits(kind: Any) -> None:
    vocabulary, rows = 1000, 4
    expected, expected_stats, most = training(Objective(kind, clip=0.02), vocabulary=vocabulary)
    assert most >= 7 * vocabulary
    cut = Objective(kind, clip=0.02, chunk_rows=rows, logit_bytes=4 * 4 * rows * 128)
    found, stats, most = training(cut, vocabulary=vocabulary)
    assert most == rows * 128 < vocabulary
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    for name in LossStats.__dataclass_fields__:
        mine, theirs = getattr(stats, name), getattr(expected_stats, name)
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        else:
            assert mine == pytest.approx(theirs, rel=1e-5), name
    assert stats.outside_vocabulary == 1
    assert stats.positions == 7


def test_without_a_gradient_there_is_none() -> None:
    weight, student, teacher, labels = states_of(3, 50, 3)
    found = vocabulary_loss(
        weight, student, teacher, labels, TERMS["opd"], 16, wants_gradient=False
    )
    assert found.by_state.numel() == 0
    assert found.divergence.abs().min() > 0


def test_which_form_runs() -> None:
    """Of a head of 1,000 tokens: 12,000 bytes a position with its gradient."""
    head = torch.zeros(1000, 2)

    def chosen(rows: int, fitting: int, *, has_bias: bool = False) -> tuple[int, bool]:
        objective = Objective(chunk_rows=rows, logit_bytes=12_000 * fitting)
        return objective.positions_at_once(head, has_bias=has_bias)

    assert chosen(256, 300) == (256, False)
    assert chosen(256, 200) == (200, False)
    assert chosen(256, 127) == (256, True)
    assert chosen(256, 127, has_bias=True) == (127, False)
    assert chosen(8, 8) == (8, False)
    assert chosen(8, 7) == (8, True)


def test_a_bias_is_added_whatever_fits() -> None:
    tight = Objective(chunk_rows=4, logit_bytes=1)
    found, _, _ = training(tight, vocabulary=50, has_bias=True)
    expected, _, _ = training(Objective(), vocabulary=50, has_bias=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
