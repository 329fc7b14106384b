"""Training length heads: their losses written as loops, what they learn, that no draft suffers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from nets import DFLASH2, DSPARK, TINY, check_head_gradients, random_drafter
from test_confidence import HEADS, half_known, partly_right
from torch import Tensor
from trajectories import TABLE, TRAJECTORIES, blocks_of

from adaflash_batch.adapt.blocks import Blocks
from adaflash_batch.adapt.head_losses import share_loss
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.member_losses import member_loss, no_loss
from adaflash_batch.adapt.objective import LengthLabel, Objective
from adaflash_batch.adapt.optimise import DrafterTrainer, clipped_apart
from adaflash_batch.adapt.parameters import is_head
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.length import AdaFlashHead
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import Trajectory

MARKOV = dataclasses.replace(
    DSPARK, enable_confidence_head=False, confidence_head_with_markov=False
)
MEMBERS = {"dflash": TINY, "dspark": DSPARK, "markov": MARKOV, "dflash2": DFLASH2}
WIDTHS = {"hazard": 0, "adaflash": 6}


def headed(config: DrafterConfig, kind: str) -> DrafterConfig:
    return dataclasses.replace(config, length_head=kind, length_head_width=WIDTHS[kind])


def following_labels(net: DFlash, head: Head, blocks: Blocks, hidden: Tensor) -> Blocks:
    """`partly_right`, in the slots that draft."""
    first = net.config.first_slot
    slots = dataclasses.replace(blocks, labels=blocks.labels[:, first:])
    labels = torch.cat((blocks.labels[:, :first], partly_right(net, head, slots, hidden).labels), 1)
    return dataclasses.replace(blocks, labels=labels)


def by_hand(net: DFlash, head: Head, blocks: Blocks, hidden: Tensor) -> tuple[Tensor, set[Any]]:
    """(loss, what was met) with the drafts and hazards that serving comes to."""
    first = net.config.first_slot
    with torch.no_grad():
        drafts = net.propose(
            hidden, blocks.token_ids[:, 0], lambda x: x @ head.weight.T, head.token_ids
        )
    shares = net.length(hidden) if net.config.length_head == "adaflash" else None
    hazards = _hazards(net, head, blocks, hidden) if shares is None else None
    total, count, met = torch.zeros((), dtype=torch.float64), 0, set()
    for block in range(len(drafts)):
        known = int((blocks.weights[block, first:] > 0).sum())
        right, accepted = drafts[block] == blocks.labels[block, first:], 0
        while accepted < known and right[accepted]:
            accepted += 1
        met.add((accepted, accepted == known))
        if shares is not None:
            if accepted < known or accepted == drafts.shape[1]:
                label = (accepted + 1) / (drafts.shape[1] + 1)
                total, count = total + (shares[block] - label) ** 2, count + 1
            continue
        assert hazards is not None
        for slot in range(min(accepted + 1, known)):
            hazard = torch.sigmoid(hazards[block, slot])
            total = total - torch.log(hazard if slot == accepted else 1 - hazard)
            count += 1
    return total / count, met


def _hazards(net: DFlash, head: Head, blocks: Blocks, hidden: Tensor) -> Tensor:
    """Logits as served: behind right drafts, serving and teacher forcing have one past."""
    caught: list[Tensor] = []
    assert net.length_head is not None
    hook = net.length_head.register_forward_hook(lambda _, __, out: caught.append(out))
    net.propose_judged(hidden, blocks.token_ids[:, 0], lambda x: x @ head.weight.T, head.token_ids)
    hook.remove()
    return caught[0]


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("member", MEMBERS)
def test_the_loss_is_that_of_what_serving_would_have_done(
    member: str, head: Head, kind: str
) -> None:
    net = random_drafter(headed(MEMBERS[member], kind))
    blocks, hidden, _ = blocks_of(MEMBERS[member])
    blocks = following_labels(net, head, blocks, hidden)
    plain = random_drafter(MEMBERS[member])
    plain.load_state_dict(net.state_dict(), strict=False)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    both = member_loss(net, Objective("ce"), head, ours, blocks, None)
    drafting = member_loss(plain, Objective("ce"), head, theirs, blocks, None)
    expected, met = by_hand(net, head, blocks, hidden)
    assert {accepted for accepted, _ in met} == set(range(net.config.num_drafts + 1))
    assert any(is_ended for accepted, is_ended in met if accepted < net.config.num_drafts)
    found = both.value.detach() - drafting.value.detach()
    torch.testing.assert_close(found.double(), expected.detach(), atol=2e-5, rtol=1e-4)
    assert (both.hits, both.positions) == (drafting.hits, drafting.positions)
    torch.autograd.backward([both.value, drafting.value])
    assert net.length_head is not None
    check_head_gradients(net.length_head, net, plain, expected, atol=1e-5, rtol=1e-3)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def trainer_of(net: DFlash, **options: Any) -> DrafterTrainer:
    usual: dict[str, Any] = {"objective": Objective("ce"), "compute": torch.float32}
    return DrafterTrainer(
        net,
        embedding=TABLE,
        head=Head(TABLE),
        gamma=4.0,
        anchors=6,
        weight_decay=0.01,
        **usual | options,
    )


def trained(
    net: DFlash,
    texts: Callable[[int], Sequence[Trajectory]],
    steps: int,
    rate: float = 5e-3,
    **options: Any,
) -> DFlash:
    trainer = trainer_of(net, **options)
    for step in range(steps):
        update = trainer.update(texts(step), torch.Generator().manual_seed(step), rate)
        assert not update.is_dropped
    return net


def pairs(step: int) -> Sequence[Trajectory]:
    return TRAJECTORIES[step % 5 : step % 5 + 2]


def first_net(config: DrafterConfig) -> DFlash:
    return initialise(config, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("member", MEMBERS)
def test_what_drafts_learns_the_same_with_and_without_it(member: str, kind: str) -> None:
    config = MEMBERS[member]
    options: dict[str, Any] = {"compute": torch.bfloat16}
    if config.enable_confidence_head:
        options["objective"] = Objective("opd")
    without = trained(first_net(config), pairs, 8, **options)
    with_it = dict(trained(first_net(headed(config, kind)), pairs, 8, **options).named_parameters())
    for name, parameter in without.named_parameters():
        if not is_head(name):  # both heads are clipped together
            assert torch.equal(parameter, with_it[name]), name
    before = dict(first_net(headed(config, kind)).named_parameters())
    for name in with_it:
        if name.startswith("length_head."):
            assert not torch.equal(with_it[name], before[name]), name


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("member", MEMBERS)
def test_heads_alone_learn_what_they_learn_beside_a_drafter_that_stands_still(
    member: str, kind: str
) -> None:
    """And nothing else moves, wants a gradient or is remembered."""
    net = random_drafter(headed(MEMBERS[member], kind), torch.float32)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    trainer = trainer_of(net, parameters="heads", objective=Objective("opd"))
    assert not trainer.needs_teacher
    assert all(p.requires_grad == is_head(n) for n, p in trainer.working.named_parameters())
    losses = [
        trainer.update(TRAJECTORIES, torch.Generator().manual_seed(0), 1e-2).loss for _ in range(20)
    ]
    assert losses[-1] < losses[0]
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]) != is_head(name), name
    state = trainer.state()
    assert all(is_head(n.partition(".")[2]) for n in state if not n.startswith("weight."))


def test_heads_alone_have_the_loss_that_they_have_beside_the_rest() -> None:
    head = HEADS["restricted"]
    for kind in WIDTHS:
        config = headed(DSPARK, kind)
        net, (blocks, hidden, _) = random_drafter(config), blocks_of(DSPARK)
        blocks = following_labels(net, head, blocks, hidden)
        losses = [member_loss(net, Objective("ce"), head, hidden, blocks, None)]
        plain = random_drafter(MARKOV)
        plain.load_state_dict({n: net.state_dict()[n] for n in plain.state_dict()})
        losses.append(member_loss(plain, Objective("ce"), head, hidden, blocks, None))
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(is_head(name))
        alone = member_loss(net, Objective("ce"), head, hidden, blocks, None)
        expected = losses[0].value - losses[1].value
        torch.testing.assert_close(alone.value.double(), expected.double(), atol=1e-5, rtol=1e-4)
        assert (alone.positions, alone.hits) == (losses[0].positions, losses[0].hits)


def texts_of(step: int) -> Sequence[Trajectory]:
    return [half_known(2 * step), half_known(2 * step + 1)]


def test_hazards_come_to_tell_which_drafts_are_right() -> None:
    """On unseen texts they are near the truth behind both kinds of tokens."""
    net = trained(first_net(headed(MARKOV, "hazard")), texts_of, 150)
    trained(net, texts_of, 60, parameters="heads")
    net.requires_grad_(False)
    unseen = [half_known(number) for number in range(1000, 1012)]
    predicted: dict[bool, list[float]] = {True: [], False: []}
    right: dict[bool, list[float]] = {True: [], False: []}
    for anchor, survival, draft, token in first_drafts(net, unseen):
        predicted[anchor % 2 == 0].append(survival)
        right[anchor % 2 == 0].append(float(draft == token))
    for is_known, share in ((True, 1.0), (False, 0.2)):
        assert sum(right[is_known]) / len(right[is_known]) == pytest.approx(share, abs=0.1)
        mean = sum(predicted[is_known]) / len(predicted[is_known])
        assert mean == pytest.approx(share, abs=0.15)


def first_drafts(net: DFlash, texts: Sequence[Trajectory]) -> list[tuple[int, float, int, int]]:
    """(anchor, survival of the first draft, it, the token there) at all places."""
    from adaflash_batch.adapt.block_attention import forward_blocks
    from adaflash_batch.adapt.blocks import make_blocks, pack_features

    blocks = make_blocks(texts, [torch.arange(5, 30) for _ in texts], net.config, 4.0)
    embeddings = TABLE[blocks.token_ids.flatten()]
    hidden = forward_blocks(net, blocks, pack_features(blocks, texts), embeddings)
    found = net.propose_judged(hidden, blocks.token_ids[:, 0], lambda x: x @ TABLE.T)
    assert found.survival is not None
    columns = (found.survival[:, 0], found.drafts[:, 0], blocks.labels[:, 0])
    anchors = blocks.token_ids[:, 0].tolist()
    return list(zip(anchors, *(column.tolist() for column in columns), strict=True))


def test_the_truncated_label_makes_the_scalar_head_ask_for_less_and_less() -> None:
    """Where 0, 2 or 4 of 4 drafts are accepted, hindsight comes to the mean, and stays there."""
    accepted = torch.tensor([0, 2, 4, 4])
    known, ends = torch.full((4,), 4), {}
    labels: tuple[LengthLabel, ...] = ("hindsight", "truncated")
    for label in labels:
        head = AdaFlashHead(6, 8)
        head.make_neutral(torch.Generator().manual_seed(0))
        optimiser = torch.optim.Adam(head.parameters(), 1e-2)
        states = torch.ones(4, 5, 6)
        for _ in range(200):
            optimiser.zero_grad()
            loss = share_loss(head(states), accepted, known, 4, label)
            torch.autograd.backward(loss)
            optimiser.step()
        ends[label] = float(head(states)[0].detach())
    assert ends["hindsight"] == pytest.approx((1 + 3 + 5 + 5) / 4 / 5, abs=0.02)
    assert ends["truncated"] < 0.35


def test_the_truncated_label_belongs_to_the_scalar_head() -> None:
    objective = Objective("ce", length_label="truncated")
    trainer_of(first_net(headed(TINY, "adaflash")), objective=objective)
    for config in (TINY, headed(TINY, "hazard")):
        with pytest.raises(ConfigError, match="length_label is 'truncated'"):
            trainer_of(first_net(config), objective=objective)
    with pytest.raises(ConfigError, match="length_label is 'biased'"):
        Objective("ce", length_label="biased")  # type: ignore[arg-type]


def test_heads_alone_need_a_head() -> None:
    with pytest.raises(ConfigError, match="no confidence or length head"):
        trainer_of(first_net(TINY), parameters="heads")


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_rank_without_blocks_sums_as_often_as_one_with_them(kind: str) -> None:
    net = random_drafter(headed(DSPARK, kind))
    blocks, hidden, _ = blocks_of(DSPARK)
    calls = {"with": 0, "without": 0}

    def counting(which: str) -> Callable[[Tensor], Tensor]:
        def over_ranks(part: Tensor) -> Tensor:
            calls[which] += 1
            return part

        return over_ranks

    head = HEADS["whole"]
    member_loss(net, Objective("ce"), head, hidden, blocks, None, counting("with"))
    no_loss(net, torch.zeros(()), counting("without"))
    assert calls["with"] == calls["without"] == 3


def test_heads_are_clipped_apart_from_what_drafts() -> None:
    net = random_drafter(headed(DSPARK, "hazard"))
    drafting, heads = clipped_apart(net, net.parameters())
    names = {id(p): n for n, p in net.named_parameters()}
    assert {names[id(p)].split(".")[0] for p in heads} == {"confidence_head", "length_head"}
    assert len(drafting) + len(heads) == len(names)
    assert math.isfinite(sum(float(p.detach().sum()) for p in drafting))
