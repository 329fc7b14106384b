"""Blocks: anchors, labels, weights, who sees what; attention and gradients equal the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import CAUSAL, DFLASH2, DSPARK, PROJECTED, TINY, WINDOWED, random_drafter, random_rows
from torch import Tensor

from adaflash_batch.adapt import block_attention
from adaflash_batch.adapt.block_attention import forward_blocks
from adaflash_batch.adapt.blocks import (
    Blocks,
    anchor_range,
    make_blocks,
    pack_features,
    pack_teacher,
    sample_blocks,
)
from adaflash_batch.adapt.losses import Head, draft_loss
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.drafter.reference import reference_block

MEMBERS = {
    "full": TINY,
    "windowed": WINDOWED,
    "dspark": DSPARK,
    "dflash2": DFLASH2,
    "causal": CAUSAL,
    "projected": PROJECTED,
}


@dataclasses.dataclass
class Finished:
    token_ids: Tensor
    prompt_length: int
    features: Tensor
    last_hidden: Tensor | None
    first_hidden: int = 0


def finished(
    length: int, prompt_length: int, number: int = 0, config: DrafterConfig = TINY
) -> Finished:
    """A trajectory whose last token was not fed; hidden states say whose and where they are."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, config.vocab_size - 1, (length,), generator=generator)
    features = random_rows(length - 1, config.num_features, torch.float64, 50 + number)
    hidden = torch.stack((torch.full((length - 1,), number), torch.arange(length - 1)), dim=1)
    return Finished(tokens, prompt_length, features, hidden.double())


def sample(
    trajectories: Sequence[Finished],
    config: DrafterConfig = TINY,
    num_anchors: int = 100,
    seed: int = 0,
) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    return sample_blocks(trajectories, config, 4.0, num_anchors, generator)


@st.composite
def any_trajectory(draw: st.DrawFn) -> Finished:
    length = draw(st.integers(1, 14))
    prompt_length = draw(st.integers(1, length))
    made = finished(length, prompt_length, draw(st.integers(0, 5)))
    is_last_token_fed = draw(st.booleans())
    if is_last_token_fed:
        made.features = torch.cat((made.features, made.features.new_zeros(1, TINY.num_features)))
    kind = draw(st.sampled_from(["whole", "from the prompt's end", "cut", "hard labels only"]))
    assert made.last_hidden is not None
    if kind == "from the prompt's end":
        made.first_hidden = prompt_length - 1
        made.last_hidden = made.last_hidden[prompt_length - 1 :]
    elif kind == "cut":
        made.last_hidden = made.last_hidden[: draw(st.integers(0, length))]
    elif kind == "hard labels only":
        made.last_hidden = None
    return made


@settings(max_examples=150, deadline=None)
@given(
    st.lists(any_trajectory(), max_size=3),
    st.integers(2, 6),
    st.booleans(),
    st.integers(0, 8),
    st.integers(0, 99),
)
def test_every_slot_is_what_hindsight_says(
    trajectories: list[Finished], block_size: int, from_anchor: bool, num_anchors: int, seed: int
) -> None:
    trajectories = [t for t in trajectories if (t.last_hidden is None) == (seed % 4 == 0)]
    config = dataclasses.replace(TINY, block_size=block_size, from_anchor=from_anchor)
    blocks = sample(trajectories, config, num_anchors, seed)
    teacher = pack_teacher(trajectories)
    owners = [s.trajectory for s in blocks.spans for _ in range(s.blocks.stop - s.blocks.start)]
    assert len(owners) == len(blocks.anchors) == len(blocks.token_ids)
    for row, owner in enumerate(owners):
        trajectory, anchor = trajectories[owner], int(blocks.anchors[row])
        check_anchor(trajectory, anchor)
        tokens = trajectory.token_ids.tolist()
        assert blocks.token_ids[row].tolist() == [tokens[anchor]] + [99] * (block_size - 1)
        assert blocks.positions[row].tolist() == [anchor + j for j in range(block_size)]
        for slot in range(block_size):
            ahead = slot + from_anchor
            is_taught = ahead > 0 and anchor + ahead < known_tokens(trajectory)
            weight = blocks.weights[row, slot].item()
            assert weight == pytest.approx(2.718281828 ** (-(ahead - 1) / 4) if is_taught else 0)
            if not is_taught:
                assert blocks.labels[row, slot] == blocks.teacher_rows[row, slot] == 0
                continue
            assert blocks.labels[row, slot] == tokens[anchor + ahead]
            if teacher is not None and trajectory.last_hidden is not None:
                state = teacher[blocks.teacher_rows[row, slot]]
                expected = trajectory.last_hidden[anchor + ahead - 1 - trajectory.first_hidden]
                assert state.tolist() == expected.tolist()
                assert state[1] == anchor + ahead - 1


def known_tokens(trajectory: Finished) -> int:
    """Tokens from the start on whose teacher is known, where a teacher is needed."""
    if trajectory.last_hidden is None:
        return len(trajectory.token_ids)
    with_teacher = trajectory.first_hidden + len(trajectory.last_hidden) + 1
    return min(len(trajectory.token_ids), with_teacher)


def check_anchor(trajectory: Finished, anchor: int) -> None:
    assert trajectory.prompt_length - 1 <= anchor <= len(trajectory.features)
    assert anchor + 1 < known_tokens(trajectory)
    assert anchor >= trajectory.first_hidden or trajectory.last_hidden is None


@settings(max_examples=60, deadline=None)
@given(any_trajectory(), st.integers(0, 15), st.integers(0, 99))
def test_anchors_are_drawn_without_repetition(
    trajectory: Finished, num_anchors: int, seed: int
) -> None:
    possible = list(anchor_range(trajectory))
    first, last = trajectory.prompt_length - 1, len(trajectory.token_ids) - 2
    if trajectory.last_hidden is None or len(trajectory.last_hidden) > last:
        assert possible == list(range(first, last + 1))
    anchors = sample([trajectory], num_anchors=num_anchors, seed=seed).anchors.tolist()
    assert len(anchors) == min(num_anchors, len(possible))
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(possible)


def test_the_generator_alone_decides() -> None:
    trajectories = [finished(60, 4), finished(50, 9, 1)]
    state = torch.get_rng_state()
    drawn = [sample(trajectories, num_anchors=8, seed=seed).anchors for seed in (3, 3, 4)]
    assert drawn[0].tolist() == drawn[1].tolist() != drawn[2].tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_every_anchor_gets_its_turn() -> None:
    trajectory = finished(12, 3)
    seen = {
        anchor
        for seed in range(60)
        for anchor in sample([trajectory], num_anchors=2, seed=seed).anchors.tolist()
    }
    assert seen == set(range(2, 11))


def test_a_given_anchor_out_of_range_is_refused() -> None:
    for anchor in (2, 9):
        with pytest.raises(AssertionError, match="range"):
            make_blocks([finished(10, 4)], [torch.tensor([anchor])], TINY, 4.0)


def test_context_is_packed_only_as_far_as_it_is_seen() -> None:
    trajectories = [finished(12, 3), finished(5, 5, 1), finished(9, 2, 2)]
    anchors = [torch.tensor([2, 7]), torch.tensor([]).long(), torch.tensor([1, 4, 6])]
    blocks = make_blocks(trajectories, anchors, TINY, 4.0)
    features = pack_features(blocks, trajectories)
    expected = torch.cat((trajectories[0].features[:7], trajectories[2].features[:6]))
    assert torch.equal(features, expected)
    assert blocks.context_positions.tolist() == [*range(7), *range(6)]
    assert [span.trajectory for span in blocks.spans] == [0, 2]


def test_blocks_move_to_a_device_whole() -> None:
    moved = sample([finished(12, 3)]).to(torch.device("meta"))
    names = ("token_ids", "positions", "labels", "weights", "teacher_rows", "anchors")
    assert all(getattr(moved, name).is_meta for name in (*names, "context_positions"))
    assert len(moved.spans) == 1


def embedded(blocks: Blocks, config: DrafterConfig) -> Tensor:
    table = random_rows(config.vocab_size, config.hidden_size, torch.float64, 7)
    return table[blocks.token_ids.flatten()]


def reference_blocks(net: DFlash, blocks: Blocks, trajectories: Sequence[Finished]) -> Tensor:
    """One block at a time, each with the features before its anchor and no others."""
    rows = embedded(blocks, net.config).split(net.config.block_size)  # type: ignore[no-untyped-call]
    outputs = []
    for span in blocks.spans:
        for block in range(span.blocks.start, span.blocks.stop):
            seen = trajectories[span.trajectory].features[: int(blocks.anchors[block])]
            state = seen.new_zeros(1, net.config.hidden_size)
            if len(seen):
                state = seen[-1:, -net.config.hidden_size :]
            own = net.rows(rows[block], state)
            outputs.append(reference_block(net, net.context(seen), own))
    return torch.cat(outputs)


@pytest.mark.parametrize("group", [1, 3, 32])
@pytest.mark.parametrize("config", MEMBERS.values(), ids=MEMBERS)
def test_training_forward_equals_the_reference_block_by_block(
    config: DrafterConfig, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "_GROUP", group)
    net = random_drafter(config)
    trajectories = [finished(13, 1), finished(4, 4, 1), finished(9, 3, 2), finished(20, 11, 3)]
    for trajectory in trajectories:
        trajectory.features.requires_grad_()
    inputs = [t.features for t in trajectories]
    blocks = sample(trajectories, config, num_anchors=7)
    assert blocks.anchors.min() == 0, "a block without any context belongs to this test"
    features, embeddings = pack_features(blocks, trajectories), embedded(blocks, config)
    output = forward_blocks(net, blocks, features, embeddings)
    expected = reference_blocks(net, blocks, trajectories)
    torch.testing.assert_close(output, expected, atol=1e-11, rtol=1e-11)
    toward = random_rows(len(output), config.hidden_size, torch.float64, 8)
    kinds = ("layers", "fc", "input_projection")
    parameters = [p for name, p in net.named_parameters() if name.startswith(kinds)]
    ours, theirs = (
        torch.autograd.grad((y * toward).sum(), [*parameters, *inputs], allow_unused=True)
        for y in (output, expected)
    )
    for mine, wanted in zip(ours, theirs, strict=True):
        assert (mine is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(mine, wanted, atol=1e-9, rtol=1e-9)


def test_low_precision_follows_the_reference() -> None:
    net = random_drafter(TINY)
    trajectories = [finished(13, 2), finished(9, 3, 2)]
    blocks = sample(trajectories)
    expected = reference_blocks(net, blocks, trajectories)
    net = net.to(torch.bfloat16)
    features = pack_features(blocks, trajectories).bfloat16()
    output = forward_blocks(net, blocks, features, embedded(blocks, TINY).bfloat16())
    assert output.dtype == torch.bfloat16
    assert (output - expected).norm() < 0.03 * expected.norm()


def test_no_blocks_are_an_empty_batch() -> None:
    net = random_drafter(TINY)
    for trajectories in ([], [finished(4, 4)]):
        blocks = sample(trajectories)
        assert blocks.token_ids.shape == blocks.weights.shape == (0, TINY.block_size)
        empty = torch.empty(0, TINY.num_features, dtype=torch.float64)
        assert forward_blocks(net, blocks, empty, embedded(blocks, TINY)).shape == (0, 48)


@pytest.mark.parametrize("config", [TINY, DSPARK, DFLASH2], ids=["dflash", "dspark", "dflash2"])
def test_a_drafter_learns_a_trajectory_by_heart(config: DrafterConfig) -> None:
    """Blocks, attention and loss together; a label off by one could not be learnt to the end."""
    generator = torch.Generator().manual_seed(0)
    net = initialise(config, generator)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    trajectory = finished(24, 4)
    trajectory.features = trajectory.features.float()
    tokens = trajectory.token_ids
    trajectory.last_hidden = table[tokens[1:]]
    blocks = sample([trajectory], config)
    teacher = pack_teacher([trajectory])
    assert teacher is not None
    features = pack_features(blocks, [trajectory])
    optimiser = torch.optim.AdamW(net.parameters(), lr=5e-3)
    accuracy = []
    for _ in range(80):
        hidden = forward_blocks(net, blocks, features, table[blocks.token_ids.flatten()])
        loss, stats = draft_loss(
            Objective("opd", clip=1.0),
            Head(table),
            hidden,
            blocks.weights.flatten(),
            teacher[blocks.teacher_rows.flatten()],
            blocks.labels.flatten(),
        )
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        accuracy.append(stats.hits.sum().item() / stats.positions)
    assert accuracy[0] < 0.2
    assert accuracy[-1] == 1.0
