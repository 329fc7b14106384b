"""Training DSpark's confidence head: its loss written as loops, and that it harms no draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from nets import DSPARK, check_head_gradients, random_drafter
from torch import Tensor
from trajectories import TABLE, TRAJECTORIES, blocks_of, trajectory

from adaflash_batch.adapt.block_attention import forward_blocks
from adaflash_batch.adapt.blocks import Blocks, make_blocks, pack_features
from adaflash_batch.adapt.head_losses import confidence_loss
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.member_losses import member_loss, predecessors
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.exchange import Trajectory

WITHOUT = dataclasses.replace(
    DSPARK, enable_confidence_head=False, confidence_head_with_markov=False
)
TOKENS = torch.tensor([*range(90, 30, -1), 3])
HEADS = {"whole": Head(TABLE.double()), "restricted": Head.restricted(TABLE.double(), TOKENS)}


def partly_right(net: DFlash, head: Head, blocks: Blocks, hidden: Tensor) -> Blocks:
    """The blocks with labels of which the net drafts the first 0, 1, 2, ... right."""
    drafts = net.propose(
        hidden, blocks.token_ids[:, 0], lambda rows: rows @ head.weight.T, head.token_ids
    )
    labels = blocks.labels.clone()
    for block in range(len(labels)):
        count = block % (labels.shape[1] + 1)
        labels[block, :count] = drafts[block, :count]
    return dataclasses.replace(blocks, labels=labels)


def by_hand(net: DFlash, head: Head, blocks: Blocks, hidden: Tensor) -> tuple[Tensor, list[bool]]:
    """(mean loss, labels): every block from left to right up to its first wrong draft."""
    assert net.markov_head is not None
    assert net.confidence_head is not None
    tokens = range(len(TABLE)) if head.token_ids is None else head.token_ids.tolist()
    rows, previous = net.drafting_rows(hidden), predecessors(blocks, 0)
    logits = rows @ TABLE.double().T + net.markov_head.bias(rows, previous)
    embedded = net.markov_head.markov_w1(previous)
    linear = net.confidence_head.proj
    total, weight, seen = torch.zeros((), dtype=torch.float64), 0.0, []
    for block in range(len(rows)):
        for slot in range(rows.shape[1]):
            w = float(blocks.weights[block, slot])
            if w == 0:
                break
            best = max(tokens, key=lambda token: float(logits[block, slot, token].detach()))
            features = torch.cat((rows[block, slot], embedded[block, slot])).detach()
            sure = torch.sigmoid(linear.weight[0] @ features + linear.bias[0])
            is_right = best == blocks.labels[block, slot]
            total = total - w * torch.log(sure if is_right else 1 - sure)
            weight += w
            seen.append(bool(is_right))
            if not is_right:
                break
    return total / weight, seen


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_the_loss_is_that_of_the_drafts_behind_right_ones(head: Head) -> None:
    net, (blocks, hidden, _) = random_drafter(DSPARK), blocks_of(DSPARK)
    blocks = partly_right(net, head, blocks, hidden)
    plain = random_drafter(WITHOUT)
    plain.load_state_dict(net.state_dict(), strict=False)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    both = member_loss(net, Objective("ce"), head, ours, blocks, None)
    drafting = member_loss(plain, Objective("ce"), head, theirs, blocks, None)
    expected, seen = by_hand(net, head, blocks, hidden)
    assert min(seen.count(True), seen.count(False)) > 10
    found = both.value.detach() - drafting.value.detach()
    torch.testing.assert_close(found.double(), expected.detach(), atol=1e-5, rtol=1e-4)
    assert (both.hits, both.positions) == (drafting.hits, drafting.positions)
    torch.autograd.backward([both.value, drafting.value])
    assert net.confidence_head is not None
    check_head_gradients(net.confidence_head, net, plain, expected, atol=1e-6, rtol=1e-4)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_a_token_outside_the_vocabulary_is_a_draft_refused() -> None:
    """It teaches drafting nothing, and the confidence head that nothing was accepted."""
    net, (blocks, hidden, _) = random_drafter(DSPARK), blocks_of(DSPARK)
    blocks = dataclasses.replace(blocks, labels=torch.full_like(blocks.labels, 5))
    loss = member_loss(net, Objective("ce"), HEADS["restricted"], hidden, blocks, None)
    assert (loss.positions, loss.hits) == (0, 0)
    first = net.confidence(net.drafting_rows(hidden), predecessors(blocks, 0))[:, 0]
    weights = blocks.weights[:, 0]
    expected = (F.softplus(first) * weights).sum() / weights.sum()
    torch.testing.assert_close(loss.value.double(), expected, atol=1e-5, rtol=1e-4)


def trained(
    config: DrafterConfig,
    texts: Callable[[int], Sequence[Trajectory]],
    steps: int,
    compute: torch.dtype = torch.float32,
) -> DFlash:
    """A net after some updates; `texts` gives those of each."""
    net = initialise(config, torch.Generator().manual_seed(0))
    trainer = DrafterTrainer(
        net,
        embedding=TABLE,
        head=Head(TABLE),
        objective=Objective("ce"),
        gamma=4.0,
        anchors=6,
        weight_decay=0.01,
        compute=compute,
    )
    for step in range(steps):
        trainer.update(texts(step), torch.Generator().manual_seed(step), 5e-3)
    return net.requires_grad_(False)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_what_drafts_learns_the_same_with_and_without_it(compute: torch.dtype) -> None:
    def pairs(step: int) -> Sequence[Trajectory]:
        return TRAJECTORIES[step % 5 : step % 5 + 2]

    with_it = dict(trained(DSPARK, pairs, 12, compute).named_parameters())
    without = dict(trained(WITHOUT, pairs, 12, compute).named_parameters())
    before = initialise(WITHOUT, torch.Generator().manual_seed(0)).state_dict()
    added = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert with_it.keys() - without.keys() == added
    for name, parameter in without.items():
        assert torch.equal(parameter, with_it[name]), name
        assert not torch.equal(parameter, before[name]), name


def half_known(number: int) -> Trajectory:
    """A text where an even token is followed by the next odd one, an odd one by any even one."""
    even = torch.randint(0, 5, (20,), generator=torch.Generator().manual_seed(number)) * 2
    token_ids = torch.stack((even, even + 1), dim=1).flatten()
    return dataclasses.replace(trajectory(number, len(token_ids)), token_ids=token_ids)


def test_it_learns_which_drafts_are_accepted() -> None:
    """It comes to know behind which tokens a draft is right, and beats the best single number."""
    net = trained(DSPARK, lambda step: [half_known(2 * step), half_known(2 * step + 1)], 150)
    unseen = [half_known(number) for number in range(1000, 1006)]
    anchors = [torch.arange(5, 30) for _ in unseen]
    blocks = make_blocks(unseen, anchors, DSPARK, 4.0)
    embeddings = TABLE[blocks.token_ids.flatten()]
    hidden = forward_blocks(net, blocks, pack_features(blocks, unseen), embeddings)
    rows, previous = net.drafting_rows(hidden), predecessors(blocks, 0)
    assert net.markov_head is not None
    logits = rows @ TABLE.T + net.markov_head.bias(rows, previous)
    is_right, sure = logits.argmax(-1) == blocks.labels, net.confidence(rows, previous)
    is_even = previous % 2 == 0
    for is_known in (True, False):
        share = float(is_right[is_even == is_known].float().mean())
        assert share == pytest.approx(1.0 if is_known else 0.2, abs=0.1)
        assert float(sure[is_even == is_known].sigmoid().mean()) == pytest.approx(share, abs=0.2)
    guessed = confidence_loss(sure, is_right, blocks.weights)
    constants = torch.linspace(-5, 5, 101)
    best = min(confidence_loss(c.expand_as(sure), is_right, blocks.weights) for c in constants)
    assert guessed < 0.6 * best
