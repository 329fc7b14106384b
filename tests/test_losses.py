"""The objective's value and gradient against plain autograd in float64."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adaflash_batch.adapt.losses import Bias, Head, LossStats, draft_loss, position_weights
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.errors import ConfigError
from adaflash_batch.kernels.opd_loss import LossKind

VOCABULARY, HIDDEN = 37, 12
OBJECTIVES = {
    "ce": Objective("ce"),
    "forward_kl": Objective("forward_kl"),
    "opd": Objective("opd", ce_weight=0.8),
    "opd clipped": Objective("opd", ce_weight=0.3, clip=0.05),
    "reverse kl clipped": Objective("opd", ce_weight=0.0, clip=0.01),
}
each_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@dataclasses.dataclass
class Case:
    weight: Tensor
    student: Tensor
    teacher: Tensor
    weights: Tensor

    def run(self, objective: Objective, **more: Any) -> tuple[Tensor, Tensor, LossStats]:
        """The loss, the gradient of the student, the statistics."""
        student = self.student.detach().requires_grad_()
        arguments = {"teacher": self.teacher, **more}
        head = arguments.pop("head", Head(self.weight))
        loss, stats = draft_loss(objective, head, student, self.weights, **arguments)
        (gradient,) = torch.autograd.grad(loss, student)
        return loss.detach(), gradient, stats


def make_case(num: int = 9, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weights = torch.rand(num, generator=generator, dtype=torch.float64) + 0.1
    return Case(normal(VOCABULARY, HIDDEN), normal(num, HIDDEN), normal(num, HIDDEN), weights)


def naive_loss(
    objective: Objective, case: Case, student: Tensor, labels: Tensor | None = None
) -> Tensor:
    """The formulas of `Objective`, by autograd, in float64 and all at once."""
    weight = case.weight.double()
    log_q = (student @ weight.t()).log_softmax(-1)
    log_p = (case.teacher.double() @ weight.t()).log_softmax(-1)
    labels = log_p.argmax(-1) if labels is None else labels
    cross_entropy = F.nll_loss(log_q, labels, reduction="none")
    if objective.kind == "ce":
        losses = cross_entropy
    elif objective.kind == "forward_kl":
        losses = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        entries = log_q.exp() * (log_q - log_p)
        if objective.clip is not None:
            entries = entries.clamp(max=objective.clip)
        share = objective.ce_weight
        losses = share * cross_entropy + (1 - share) * entries.sum(-1)
    return (losses * case.weights).sum() / case.weights.sum()


def naive(objective: Objective, case: Case, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    student = case.student.double().detach().requires_grad_()
    loss = naive_loss(objective, case, student, labels)
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.detach(), gradient


@each_objective
@pytest.mark.parametrize("chunk_rows", [1, 4, 9, 100])
def test_value_and_gradient_are_those_of_autograd(objective: Objective, chunk_rows: int) -> None:
    case = make_case()
    loss, gradient, stats = case.run(dataclasses.replace(objective, chunk_rows=chunk_rows))
    expected_loss, expected_gradient = naive(objective, case)
    torch.testing.assert_close(loss, expected_loss, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-12, rtol=1e-12)
    assert gradient.abs().min() > 0
    assert (stats.clip_rate > 0) == (objective.clip is not None)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(OBJECTIVES.values())),
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(0, 999),
    st.booleans(),
)
def test_any_batch_and_any_chunk_agree_with_autograd(
    objective: Objective, num: int, chunk_rows: int, seed: int, has_labels: bool
) -> None:
    case = make_case(num, seed=seed)
    labels = torch.arange(num) * 5 % VOCABULARY if has_labels else None
    loss, gradient, _ = case.run(
        dataclasses.replace(objective, chunk_rows=chunk_rows), labels=labels
    )
    expected_loss, expected_gradient = naive(objective, case, labels)
    torch.testing.assert_close(loss, expected_loss, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-11, rtol=1e-11)


def test_the_gradient_is_the_slope_of_the_value() -> None:
    """No autograd on either side, so a mistake shared by both formulas shows."""
    case = make_case(3)
    for objective in OBJECTIVES.values():
        assert torch.autograd.gradcheck(
            lambda student, objective=objective: draft_loss(
                objective, Head(case.weight), student, case.weights, case.teacher
            )[0],
            case.student.requires_grad_(),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_objective
def test_low_precision_stays_near_float64(objective: Objective, dtype: torch.dtype) -> None:
    case = make_case(20, dtype)
    # bfloat16 rounds logits relatively, and a rounded logit near the clip switches a gradient.
    case.student, case.teacher = case.student * 0.5, case.teacher * 0.5
    loss, gradient, _ = case.run(objective)
    expected_loss, expected_gradient = naive(objective, case)
    assert loss.dtype == torch.float64  # that of the weights; the sums are float32 or better
    assert gradient.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 0.03
    assert (loss - expected_loss).abs() < bound * expected_loss.abs()
    error = (gradient.double() - expected_gradient).norm() / expected_gradient.norm()
    assert error < bound


def test_reductions_are_float32_for_bfloat16_inputs() -> None:
    case = make_case(4, torch.bfloat16)
    loss, _ = draft_loss(
        Objective("ce"), Head(case.weight), case.student, case.weights.float(), case.teacher
    )
    assert loss.dtype == torch.float32


def one_entry_case(wanted: float) -> tuple[Case, float]:
    """Two entries; the first one's reverse-KL term is about `wanted`; returned with its value."""
    weight = torch.eye(2, dtype=torch.float64)
    student = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    q = student.softmax(-1)[0, 0]
    p = q * torch.exp(torch.tensor(-wanted, dtype=torch.float64) / q)
    teacher = torch.stack((p.log(), (1 - p).log())).unsqueeze(0)
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    term = (log_q.exp() * (log_q - log_p))[0, 0].item()
    return Case(weight, student, teacher, torch.ones(1, dtype=torch.float64)), term


@pytest.mark.parametrize("relative", [0.5, 1 - 1e-9, 1.0, 1 + 1e-9, 2.0])
def test_clipping_at_and_around_the_threshold(relative: float) -> None:
    case, term = one_entry_case(0.2)
    clip = term * relative
    objective = Objective("opd", ce_weight=0.0, clip=clip)
    loss, gradient, stats = case.run(objective)
    expected_loss, expected_gradient = naive(objective, case)
    torch.testing.assert_close(loss, expected_loss, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-14, rtol=1e-12)
    is_clipped = relative < 1.0
    assert stats.clip_rate == (0.5 if is_clipped else 0.0)
    assert stats.clipped_positions == int(is_clipped)


def test_clipping_is_from_above_only_so_the_sum_can_be_negative() -> None:
    case, term = one_entry_case(0.2)
    loss, _, stats = case.run(Objective("opd", ce_weight=0.0, clip=term / 100))
    assert loss < 0
    assert stats.divergence == pytest.approx(loss.item())


def test_clipping_counts_nats_before_normalising() -> None:
    """The same positions many times over: neither the loss nor the clip rate moves."""
    case = make_case(5)
    many = Case(
        case.weight, case.student.repeat(40, 1), case.teacher.repeat(40, 1), case.weights.repeat(40)
    )
    objective = OBJECTIVES["opd clipped"]
    loss, _, stats = case.run(objective)
    loss_of_many, _, stats_of_many = many.run(objective)
    torch.testing.assert_close(loss, loss_of_many)
    assert stats.clip_rate > 0
    assert stats.clip_rate == pytest.approx(stats_of_many.clip_rate)
    assert stats_of_many.clipped_positions == 40 * stats.clipped_positions


@each_objective
def test_positions_without_weight_may_hold_anything(objective: Objective) -> None:
    case = make_case(6)
    labels = torch.tensor([3, 1, 4, 1, 5, 9])
    expected = case.run(objective, labels=labels)
    where = torch.tensor([0, 2, 3, 5, 7, 8])
    wide = Case(
        case.weight,
        torch.full((9, HIDDEN), torch.nan, dtype=torch.float64).index_copy(0, where, case.student),
        torch.full((9, HIDDEN), torch.inf, dtype=torch.float64).index_copy(0, where, case.teacher),
        torch.zeros(9, dtype=torch.float64).index_copy(0, where, case.weights),
    )
    loss, gradient, stats = wide.run(
        objective, labels=torch.full((9,), -100).index_copy(0, where, labels)
    )
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradient[where], expected[1])
    assert gradient.isfinite().all()
    assert gradient[[1, 4, 6]].count_nonzero() == 0
    assert stats.positions == 6
    assert stats.weight == pytest.approx(case.weights.sum().item())


@each_objective
@pytest.mark.parametrize("num", [0, 3])
def test_nothing_to_learn_from_is_a_loss_of_zero(objective: Objective, num: int) -> None:
    case = make_case(num)
    case.weights = torch.zeros(num)
    loss, gradient, stats = case.run(objective)
    assert loss == 0
    assert gradient.shape == (num, HIDDEN)
    assert gradient.count_nonzero() == 0
    assert (stats.positions, stats.weight, stats.cross_entropy, stats.clip_rate) == (0, 0, 0, 0)


@each_objective
def test_only_the_student_receives_a_gradient(objective: Objective) -> None:
    case = make_case()
    for tensor in (case.student, case.teacher, case.weight, case.weights):
        tensor.requires_grad_()
    loss, _ = draft_loss(objective, Head(case.weight), case.student, case.weights, case.teacher)
    (loss * 3).backward()  # type: ignore[no-untyped-call]
    assert case.teacher.grad is case.weight.grad is case.weights.grad is None
    torch.testing.assert_close(case.student.grad, 3 * naive(objective, case)[1])


def test_no_gradient_is_made_when_none_is_wanted() -> None:
    case = make_case()
    with torch.no_grad():
        loss, _ = draft_loss(
            Objective(),
            Head(case.weight),
            case.student.requires_grad_(),
            case.weights,
            case.teacher,
        )
    assert not loss.requires_grad
    torch.testing.assert_close(loss, naive(Objective(), case)[0])


@each_objective
def test_micro_batches_add_up_to_the_batch(objective: Objective) -> None:
    case = make_case(9)
    whole, whole_gradient, _ = case.run(objective)
    total = case.weights.sum()
    loss, gradients = torch.zeros(()), []
    for part in (slice(0, 2), slice(2, 9)):
        piece = Case(case.weight, case.student[part], case.teacher[part], case.weights[part])
        value, gradient, _ = piece.run(objective, total_weight=total)
        loss = loss + value
        gradients.append(gradient)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(torch.cat(gradients), whole_gradient)


DRAFT_TOKENS = torch.tensor([30, 2, 3, 11, 5, 8])


@each_objective
def test_a_draft_vocabulary_is_a_head_of_its_rows(objective: Objective) -> None:
    case = make_case(6)
    labels = DRAFT_TOKENS[torch.tensor([0, 3, 5, 1, 1, 2])]
    restricted = Head.restricted(case.weight, DRAFT_TOKENS)
    loss, gradient, stats = case.run(objective, head=restricted, labels=labels)
    small = Case(case.weight[DRAFT_TOKENS], case.student, case.teacher, case.weights)
    expected_loss, expected_gradient = naive(objective, small, torch.tensor([0, 3, 5, 1, 1, 2]))
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient)
    assert stats.outside_vocabulary == 0


@each_objective
def test_labels_outside_the_draft_vocabulary_are_left_out_and_counted(
    objective: Objective,
) -> None:
    case = make_case(6)
    labels = torch.tensor([30, 7, 5, 0, 2, 36])
    inside = torch.tensor([0, 2, 4])
    restricted = Head.restricted(case.weight, DRAFT_TOKENS)
    loss, gradient, stats = case.run(objective, head=restricted, labels=labels)
    kept = Case(case.weight, case.student[inside], case.teacher[inside], case.weights[inside])
    expected = kept.run(objective, head=restricted, labels=labels[inside])
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradient[inside], expected[1])
    assert gradient[[1, 3, 5]].count_nonzero() == 0
    assert (stats.positions, stats.outside_vocabulary) == (3, 3)
    assert stats.weight == pytest.approx(kept.weights.sum().item())
    assert not stats.hits[[1, 3, 5]].any()


def test_all_labels_outside_the_draft_vocabulary() -> None:
    case = make_case(3)
    restricted = Head.restricted(case.weight, DRAFT_TOKENS)
    loss, gradient, stats = case.run(Objective(), head=restricted, labels=torch.tensor([0, 1, 4]))
    assert loss == 0
    assert gradient.count_nonzero() == 0
    assert (stats.positions, stats.outside_vocabulary) == (0, 3)


def test_a_draft_vocabulary_names_no_token_twice() -> None:
    with pytest.raises(AssertionError, match="twice"):
        Head.restricted(make_case().weight, torch.tensor([1, 2, 1]))


def test_statistics_say_where_the_drafter_was_right() -> None:
    case = make_case(8)
    case.student[::2] = case.teacher[::2]
    case.weights[0] = 0.0
    labels = (case.teacher @ case.weight.t()).argmax(-1)
    expected = (case.student @ case.weight.t()).argmax(-1) == labels
    expected[0] = False
    for more in ({}, {"labels": labels}):
        _, _, stats = case.run(Objective("ce", chunk_rows=3), **more)
        assert stats.hits.tolist() == expected.tolist()
        assert 3 <= expected.sum() < 8
    log_q = (case.student @ case.weight.t()).log_softmax(-1)
    losses = F.nll_loss(log_q, labels, reduction="none") * case.weights
    assert stats.cross_entropy == pytest.approx((losses.sum() / case.weights.sum()).item())
    assert stats.divergence == 0


class LargestVocabularyTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation; measures what is alive of tensors [*, V], views of the head aside."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width = len(head)
        self.head_address = head.untyped_storage().data_ptr()
        self.most_rows = 0
        self.most_floats_alive = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == self.width:
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address == self.head_address:
            return
        self.most_rows = max(self.most_rows, len(tensor))
        if tensor.dtype != torch.bool and address not in self._alive:
            self._alive[address] = tensor.numel()
            weakref.finalize(tensor, self._alive.pop, address, None)
        self.most_floats_alive = max(self.most_floats_alive, sum(self._alive.values()))


@each_objective
def test_logits_are_held_for_one_chunk_only(objective: Objective) -> None:
    case = make_case(300, torch.float32)
    student = case.student.requires_grad_()
    chunked = dataclasses.replace(objective, chunk_rows=8)
    with LargestVocabularyTensors(case.weight) as seen:
        loss, _ = draft_loss(chunked, Head(case.weight), student, case.weights, case.teacher)
        loss.backward()  # type: ignore[no-untyped-call]
    assert seen.most_rows == 8
    # Logits and log-probabilities of both sides, for a moment; never those of 300 positions.
    assert 0 < seen.most_floats_alive <= 5 * 8 * VOCABULARY
    assert student.grad is not None
    assert student.grad.abs().sum() > 0


def test_position_weights_decay_from_one() -> None:
    weights = position_weights(torch.tensor([[1, 2, 3], [8, 2, 1]]), gamma=7.0)
    assert weights.dtype == torch.float32
    expected = torch.exp(-torch.tensor([[0.0, 1.0, 2.0], [7.0, 1.0, 0.0]]) / 7)
    torch.testing.assert_close(weights, expected)
    assert position_weights(torch.arange(1, 16), 7.0).sum().item() == pytest.approx(6.63, abs=0.005)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kind": "kl"}, "loss"),
        ({"ce_weight": 1.5}, "ce_weight"),
        ({"ce_weight": float("nan")}, "ce_weight"),
        ({"clip": 0.0}, "clip"),
        ({"chunk_rows": 0}, "chunk_rows"),
    ],
)
def test_an_objective_out_of_range_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Objective(**wrong)


@pytest.mark.parametrize("kind", ["forward_kl", "opd"])
def test_a_divergence_needs_a_teacher(kind: LossKind) -> None:
    case = make_case()
    with pytest.raises(AssertionError, match="teacher"):
        case.run(Objective(kind), teacher=None, labels=torch.zeros(9).long())


def test_cross_entropy_needs_labels_only() -> None:
    case = make_case()
    labels = torch.arange(9)
    loss, gradient, _ = case.run(Objective("ce"), teacher=None, labels=labels)
    expected_loss, expected_gradient = naive(Objective("ce"), case, labels)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("kind", ["ce", "forward_kl", "opd"])
@pytest.mark.parametrize("clip", [None, 0.02])
def test_a_bias_of_low_rank_is_the_students_alone(kind: LossKind, clip: float | None) -> None:
    """Loss and all three gradients against autograd over the whole logits."""
    case = make_case(3)
    generator = torch.Generator().manual_seed(4)
    num_positions, num_tokens = len(case.student), len(case.weight)
    shapes = ((num_positions, 3), (num_tokens, 3))
    leaves = [torch.randn(s, generator=generator, dtype=case.student.dtype) for s in shapes]
    student, latents, table = (x.clone().requires_grad_() for x in (case.student, *leaves))
    labels = torch.randint(0, num_tokens, (num_positions,), generator=generator)
    objective = Objective(kind, clip=clip, chunk_rows=3)
    loss, _ = draft_loss(
        objective,
        Head(case.weight),
        student,
        case.weights,
        case.teacher,
        labels,
        bias=Bias(latents, table),
    )
    log_q = (student @ case.weight.T + latents @ table.T).log_softmax(-1)
    log_p = (case.teacher @ case.weight.T).log_softmax(-1)
    ce_share, kl_share = objective.shares
    if kind == "forward_kl":
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        entries = log_q.exp() * (log_q - log_p)
        divergence = (entries if clip is None else entries.clamp(max=clip)).sum(-1)
    rows = ce_share * F.nll_loss(log_q, labels, reduction="none") + kl_share * divergence
    expected = (rows * case.weights).sum() / case.weights.sum()
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(x, (student, latents, table)) for x in (loss, expected))
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)
