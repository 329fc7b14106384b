"""What is moved learns, what is not stays bit for bit and costs nothing; additions are merged."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from nets import DFLASH2, DSPARK, PROJECTED, TINY, random_drafter
from torch import Tensor
from trajectories import TABLE, TRAJECTORIES, learner

from adaflash_batch.adapt.blocks import pick_anchors
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.parameters import is_new, is_projection
from adaflash_batch.adapt.scoring import Scorer
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.errors import ConfigError

MARKOV = dataclasses.replace(
    DSPARK, enable_confidence_head=False, confidence_head_with_markov=False
)
MEMBERS = {
    "DFlash": TINY,
    "DSpark": DSPARK,
    "Markov head alone": MARKOV,
    "DFlash 2": DFLASH2,
    "input projection": PROJECTED,
    "hazard head": dataclasses.replace(DSPARK, length_head="hazard"),
    "DSpark, input projection": dataclasses.replace(DSPARK, has_input_projection=True),
}
KINDS = ("all", "new", "lora")
CHOICES = [(m, k) for m in MEMBERS for k in KINDS if (m, k) != ("DFlash", "new")]
# A Markov head cannot talk a random backbone round.
_MARKOV = ("DSpark", "Markov head alone", "hazard head")
PUBLISHING = [(m, k) for m, k in CHOICES if k != "new" or m not in _MARKOV]
PLENTY = 2**26


def make(
    config: DrafterConfig, kind: str, net: DFlash | None = None, **options: Any
) -> DrafterTrainer:
    settings: dict[str, Any] = {"compute": torch.float32, "weight_decay": 0.0} | options
    return DrafterTrainer(
        net or random_drafter(config, torch.float32),
        embedding=TABLE,
        head=Head(TABLE),
        objective=Objective("opd"),
        gamma=4.0,
        anchors=8,
        parameters=kind,  # type: ignore[arg-type]
        **settings,
    )


def run(made: DrafterTrainer, seeds: Sequence[int], rate: float = 3e-3) -> list[float]:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return [made.update(TRAJECTORIES[:3], each, rate).loss for each in generators]


def weights(net: DFlash) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def moved(kind: str, name: str, parameter: Tensor) -> bool:
    if kind == "lora":
        return is_projection(name, parameter) or is_new(name)
    return kind == "all" or is_new(name)


@pytest.mark.parametrize(
    ("optimiser", "compute"), [("adamw", torch.float32), ("muon", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize(("member", "kind"), CHOICES)
def test_one_batch_is_learnt_by_what_is_moved_alone(
    member: str, kind: str, optimiser: str, compute: torch.dtype
) -> None:
    made = make(MEMBERS[member], kind, optimiser=optimiser, compute=compute)
    before = weights(made.net)
    losses = run(made, [1] * 12)
    assert losses[-1] < losses[0] - 0.02
    assert min(losses[-3:]) < min(losses[:3])
    after = weights(made.net)
    assert after.keys() == before.keys()
    for name, parameter in before.items():
        is_same = torch.equal(parameter, after[name])
        assert is_same != moved(kind, name, parameter), name


@pytest.mark.parametrize(("member", "kind"), CHOICES)
def test_what_is_not_moved_takes_no_gradient_and_no_memory(member: str, kind: str) -> None:
    made = make(MEMBERS[member], kind)
    run(made, [1])
    matrices = {n: is_projection(n, p) and kind == "lora" for n, p in made.net.named_parameters()}
    for name, parameter in made.working.named_parameters():
        expected = moved(kind, name, parameter) and not matrices[name]
        assert parameter.requires_grad == expected, name
        assert parameter.grad is None
    full = [n for n, p in made.net.named_parameters() if moved(kind, n, p) and not matrices[n]]
    parts = [
        name + part for name, low in matrices.items() if low for part in (".lora_a", ".lora_b")
    ]
    remembered = {n.removeprefix("exp_avg.") for n in made.state() if n.startswith("exp_avg.")}
    assert remembered == {*full, *parts}


def test_a_low_rank_update_holds_no_gradient_of_a_projection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make(TINY, "lora", rank=3)
    shapes: list[tuple[int, ...]] = []
    step = type(made._optimiser).step

    def noting(optimiser: Any, rate: float) -> None:
        shapes.extend(tuple(p.grad.shape) for p in optimiser._named.values())
        step(optimiser, rate)

    monkeypatch.setattr(type(made._optimiser), "step", noting)
    run(made, [1])
    assert len(shapes) == 2 * 15
    assert all(3 in shape for shape in shapes)


@pytest.mark.parametrize("member", MEMBERS)
def test_factors_have_the_gradient_of_the_product(member: str) -> None:
    """By the chain rule from the gradient of the whole matrix: dA = B^T dW, dB = dW A^T."""
    low, whole = (make(MEMBERS[member], kind, rank=4) for kind in ("lora", "all"))
    run(low, range(3), 1e-2)  # B is no longer zero
    whole.restore(low.state())
    for made in (low, whole):
        texts = TRAJECTORIES[:3]
        anchors = pick_anchors(texts, 12, torch.Generator().manual_seed(9))
        result = made._batch(made.working, texts, anchors)
        result.value.backward()  # type: ignore[no-untyped-call]
        made._moved.collect_gradients()
    for name, parameter in whole.net.named_parameters():
        if not is_projection(name, parameter):
            continue
        a, b = (low._moved.masters[name + part] for part in (".lora_a", ".lora_b"))
        assert parameter.grad is not None
        for factor, expected in ((a, b.T @ parameter.grad), (b, parameter.grad @ a.T)):
            assert factor.grad is not None
            torch.testing.assert_close(factor.grad, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("member", MEMBERS)
def test_additions_begin_as_nothing_and_stay_of_their_rank(member: str) -> None:
    made = make(MEMBERS[member], "lora", rank=2)
    before = weights(random_drafter(MEMBERS[member], torch.float32))
    for name, parameter in made.net.named_parameters():
        assert torch.equal(parameter, before[name])
    plain = make(MEMBERS[member], "all")
    assert run(made, [4]) == run(plain, [4]), "the first forward is the same"
    run(made, range(6), 1e-2)
    for name, parameter in made.net.named_parameters():
        if is_projection(name, parameter):
            values = torch.linalg.svdvals(parameter.detach() - before[name])
            assert values[1] > 1e-3
            assert values[2] < 1e-4 * values[0]


def test_merged_weights_are_rounded_once() -> None:
    made = make(DSPARK, "lora", compute=torch.bfloat16)
    base = weights(made.net)
    run(made, range(4))
    working = dict(made.working.named_parameters())
    for name, parameter in made.net.named_parameters():
        assert torch.equal(working[name], parameter.to(torch.bfloat16)), name
        if is_projection(name, parameter):
            a, b = (made._moved.masters[name + part] for part in (".lora_a", ".lora_b"))
            torch.testing.assert_close(parameter, base[name] + b @ a, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("optimiser", "compute"), [("adamw", torch.bfloat16), ("muon", torch.float32)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_trainer_goes_on_to_the_same_bits(
    kind: str, optimiser: str, compute: torch.dtype
) -> None:
    options: dict[str, Any] = {"optimiser": optimiser, "compute": compute, "weight_decay": 0.01}
    whole, first, second = (make(DSPARK, kind, **options) for _ in range(3))
    run(whole, range(7))
    run(first, range(4))
    kept = {name: tensor.clone() for name, tensor in first.state().items()}
    run(second, range(20, 22))  # what it was must not matter
    second.restore(kept)
    assert second.state().keys() == kept.keys()
    run(second, range(4, 7))
    ours, theirs = second.state(), whole.state()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("before", ["all", "new", "lora", "lora of rank 8", "muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_kind_gives_its_weights(kind: str, before: str) -> None:
    options: dict[str, Any] = {"rank": 8 if before.endswith("8") else 3}
    options |= {"optimiser": "muon"} if before == "muon" else {}
    other = make(DSPARK, "lora" if before.startswith("lora") else "all", **options)
    run(other, range(3))
    made = make(DSPARK, kind, rank=3)
    run(made, range(2))
    made.restore(other.state())
    for name, parameter in other.net.named_parameters():
        assert torch.equal(dict(made.net.named_parameters())[name], parameter), name
        assert torch.equal(dict(made.working.named_parameters())[name], parameter), name
    assert run(made, [5]) == run(copy.deepcopy(other), [5]), "both go on from the same weights"
    losses = run(made, [1] * 8)
    assert losses[-1] < losses[0]


def test_weights_can_be_pulled_while_additions_are_learnt() -> None:
    made = make(DSPARK, "lora")
    before = weights(made.net)
    run(made, range(3))
    learnt = weights(made.net)
    made.pull(before, 0.25)
    for name, parameter in made.net.named_parameters():
        assert torch.equal(parameter, torch.lerp(learnt[name], before[name], 0.25))
        assert torch.equal(dict(made.working.named_parameters())[name], parameter)
    assert run(made, [1] * 8, 1e-2)[-1] < run(made, [1])[0] + 1.0
    made.pull(before, 1.0)
    for name, parameter in made.net.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="plain DFlash without new parts"):
        make(TINY, "new")
    with pytest.raises(ConfigError, match="must be all, new, lora or heads"):
        make(TINY, "some")
    with pytest.raises(ConfigError, match="rank of low-rank additions is 0"):
        make(TINY, "lora", rank=0)


@pytest.mark.parametrize(("member", "kind"), PUBLISHING)
def test_every_member_publishes_what_it_learnt_while_a_job_runs(member: str, kind: str) -> None:
    config = MEMBERS[member]
    net = initialise(config, torch.Generator().manual_seed(0))
    core = make(config, kind, net, compute=torch.bfloat16)
    table, net = TABLE.bfloat16(), copy.deepcopy(net).bfloat16()
    scorer = Scorer(net, embedding=table, head=Head(table), most_anchors=None)
    trainer, outbox = learner(core, scorer)
    reports = [trainer.run_round() for _ in range(2)]
    published = outbox.take()
    assert published is not None, reports
    assert published.tensors.keys() == dict(net.named_parameters()).keys()
    assert {tensor.dtype for tensor in published.tensors.values()} == {torch.bfloat16}
    if reports[-1].fault is None:
        for name, parameter in core.net.named_parameters():
            assert torch.equal(published.tensors[name], parameter.to(torch.bfloat16)), name
