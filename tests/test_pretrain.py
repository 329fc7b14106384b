"""Stored trajectories, updates, evaluation: the parts of training a drafter from nothing."""

from __future__ import annotations

import dataclasses
import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from nets import DFLASH2, DSPARK, PROJECTED, TINY, random_drafter, random_rows
from torch import Tensor
from trajectories import TABLE, TRAJECTORIES, blocks_of, trajectory

from adaflash_batch.adapt.block_attention import forward_blocks
from adaflash_batch.adapt.blocks import make_blocks, pack_features
from adaflash_batch.adapt.evaluate import Acceptance, evaluate
from adaflash_batch.adapt.losses import Head, draft_loss
from adaflash_batch.adapt.member_losses import member_loss, predecessors
from adaflash_batch.adapt.new_drafter import copy_target_layers, frequent_tokens
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer, learning_rate
from adaflash_batch.adapt.optimiser import Optimiser, OptimiserKind
from adaflash_batch.adapt.pretrain import Rounds
from adaflash_batch.adapt.training_state import Cursor, load_state, save_state
from adaflash_batch.adapt.trajectory_store import TrajectoryStore
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import initialise
from adaflash_batch.errors import ConfigError
from adaflash_batch.request import RowKey

MARKOV = dataclasses.replace(
    DSPARK, enable_confidence_head=False, confidence_head_with_markov=False
)
MEMBERS = {"dflash": TINY, "dspark": MARKOV, "dspark and confidence": DSPARK, "dflash2": DFLASH2}
MEMBERS["projected"] = PROJECTED
PLENTY = 2**30


def test_what_is_stored_is_read_in_order_of_the_rows(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path, PLENTY, pytest.fail)
    assert store.progress == (0, 0)
    with store.chunk() as writer:
        for each in reversed(TRAJECTORIES):
            writer.add(each, f"domain {each.key.row % 2}")
    assert store.progress == (1, sum(len(t.token_ids) - 5 for t in TRAJECTORIES))
    entries = TrajectoryStore(tmp_path, PLENTY, pytest.fail).entries()
    assert [entry.key for entry in entries] == [t.key for t in TRAJECTORIES]
    for entry, wanted in zip(entries, TRAJECTORIES, strict=True):
        found = entry.read()
        assert entry.domain == f"domain {entry.key.row % 2}"
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(entry.read_tokens(), wanted.token_ids[5:])
        assert torch.equal(found.features, wanted.features.bfloat16())
        assert found.last_hidden is not None
        assert wanted.last_hidden is not None
        assert torch.equal(found.last_hidden, wanted.last_hidden.bfloat16())
        assert (found.prompt_length, found.first_hidden) == (5, 4)
        assert entry.read(with_teacher=False).last_hidden is None


def test_the_store_keeps_its_bound_and_drops_the_oldest(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path / "one", PLENTY, pytest.fail).chunk() as writer:
        writer.add(TRAJECTORIES[0], "x")
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    bound, told = 5 * size, list[str]()
    store = TrajectoryStore(tmp_path / "many", bound, told.append)
    for row in range(12):
        with store.chunk() as writer:
            writer.add(dataclasses.replace(TRAJECTORIES[0], key=RowKey(0, row, 0)), "x")
        assert store.num_bytes <= bound
    rows = [entry.key.row for entry in store.entries()]
    assert rows == list(range(12 - len(rows), 12))
    assert 2 <= len(rows) <= 5
    assert len(told) == 12 - len(rows)
    assert store.progress == (12, 12 * 10)
    small = TrajectoryStore(tmp_path / "small", size // 2, told.append)
    with pytest.raises(ConfigError, match="--disk"), small.chunk() as writer:
        writer.add(TRAJECTORIES[0], "x")
    assert small.num_bytes == 0


def test_a_chunk_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path, PLENTY, pytest.fail)
    with store.chunk() as writer:
        writer.add(TRAJECTORIES[0], "x")
    dying = store.chunk()
    dying.__enter__().add(TRAJECTORIES[1], "x")
    assert dying.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is False
    (tmp_path / ".chunk-000001.partial").mkdir()  # as a kill leaves it
    store = TrajectoryStore(tmp_path, PLENTY, pytest.fail)
    assert [entry.key.row for entry in store.entries()] == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunk-000000"]


def test_entries_up_to_some_tokens_are_those_of_the_first_chunks(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path, PLENTY, pytest.fail)
    for each in TRAJECTORIES[:3]:  # of 10, 11, 12 tokens
        with store.chunk() as writer:
            writer.add(each, "x")
    assert [len(store.entries(most)) for most in (1, 10, 11, 21, 22, 99)] == [1, 1, 2, 2, 3, 3]


def trainer(
    config: DrafterConfig = TINY,
    kind: str = "ce",
    compute: torch.dtype = torch.float32,
    head: Head | None = None,
    optimiser: OptimiserKind = "adamw",
) -> DrafterTrainer:
    return DrafterTrainer(
        initialise(config, torch.Generator().manual_seed(0)),
        embedding=TABLE,
        head=head or Head(TABLE),
        objective=Objective(kind),  # type: ignore[arg-type]
        gamma=4.0,
        anchors=6,
        weight_decay=0.01,
        compute=compute,
        optimiser=optimiser,
    )


def run(made: DrafterTrainer, steps: range) -> list[float]:
    rounds = Rounds(0, 1, 2, None, 1.0, 1e-3, 0.0)
    batches = islice(rounds.batches(0, len(TRAJECTORIES), steps.start), len(steps))
    losses = []
    for step, batch in zip(steps, batches, strict=True):
        chosen = [TRAJECTORIES[index] for index in batch]
        losses.append(made.update(chosen, rounds.generator("anchors", step), 3e-3).loss)
    return losses


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["ce", "forward_kl", "opd"])
@pytest.mark.parametrize("member", MEMBERS)
def test_every_member_learns_by_every_objective(
    member: str, kind: str, compute: torch.dtype
) -> None:
    made = trainer(MEMBERS[member], kind, compute)
    losses = run(made, range(30))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(p.dtype == torch.float32 for p in made.net.parameters())
    # All parts of a member are trained.
    first = dict(initialise(MEMBERS[member], torch.Generator().manual_seed(0)).named_parameters())
    for name, parameter in made.net.named_parameters():
        assert not torch.equal(parameter, first[name]), name


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_restored_trainer_goes_on_to_the_same_weights(
    tmp_path: Path, compute: torch.dtype, optimiser: OptimiserKind
) -> None:
    kinds = {"compute": compute, "optimiser": optimiser}
    whole, first, second = (trainer(DSPARK, **kinds) for _ in range(3))  # type: ignore[arg-type]
    run(whole, range(9))
    run(first, range(5))
    save_state(tmp_path, first.state(), Cursor(step=5, history=[(5, 1.5, 1.25)]))
    loaded = load_state(tmp_path)
    assert loaded is not None
    assert (loaded[1].step, list(map(tuple, loaded[1].history))) == (5, [(5, 1.5, 1.25)])
    second.restore(loaded[0])
    run(second, range(5, 9))
    for ours, theirs in zip(second.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_muon_moves_the_projections_by_their_size_alone() -> None:
    """Whatever the gradient's scale, a step is near orthogonal, of AdamW's usual size."""
    steps = []
    for scale in (2.0**-10, 2.0**10):
        net = initialise(DFLASH2, torch.Generator().manual_seed(0))
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        for name, parameter in net.named_parameters():
            parameter.grad = scale * random_rows(
                parameter.numel(), 1, torch.float32, len(name)
            ).view_as(parameter)
        Optimiser(dict(net.named_parameters()), kind="muon", weight_decay=0.0).step(0.01)
        steps.append({name: (p - before[name]) / 0.01 for name, p in net.named_parameters()})
    for name in ("fc.weight", "layers.1.mlp.down_proj.weight"):
        torch.testing.assert_close(steps[0][name], steps[1][name], atol=1e-2, rtol=1e-2)
        scale = 6 * 0.2 * max(steps[0][name].shape) ** 0.5
        values = torch.linalg.svdvals(steps[0][name] / scale)
        assert values.min() > 0.3
        assert values.max() < 1.5
    # The rest is AdamW's, whose first step is the sign of the gradient.
    for name in ("candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel"):
        assert steps[1][name].abs().allclose(torch.ones_like(steps[1][name]), atol=1e-3)


def test_an_update_that_is_not_finite_is_dropped() -> None:
    made = trainer()
    before = [p.clone() for p in made.net.parameters()]
    broken = dataclasses.replace(TRAJECTORIES[0], features=TRAJECTORIES[0].features * math.nan)
    assert made.update([broken], torch.Generator().manual_seed(0), 1e-2).is_dropped
    for now, then in zip(made.net.parameters(), before, strict=True):
        assert torch.equal(now, then)
    assert not math.isnan(run(made, range(1))[0])


def test_batches_shuffle_all_and_can_be_entered_anywhere() -> None:
    rounds = Rounds(3, 1, 4, None, 1.0, 1e-3, 0.0)
    batches = list(islice(rounds.batches(0, 10, 0), 15))
    flat = [index for batch in batches for index in batch]
    for begin in range(0, 60, 10):
        assert sorted(flat[begin : begin + 10]) == list(range(10))
    assert flat[:10] != flat[10:20]
    assert list(islice(rounds.batches(0, 10, 7), 8)) == batches[7:]
    assert list(islice(rounds.batches(1, 10, 0), 2)) != batches[:2]
    other = dataclasses.replace(rounds, seed=4)
    assert list(islice(other.batches(0, 10, 0), 2)) != batches[:2]


def test_steps_of_the_rounds_add_up() -> None:
    rounds = Rounds(0, 3, 4, 10, 1.0, 1e-3, 0.0)
    assert sum(rounds.steps_in(number, 7) for number in range(3)) == 10
    assert dataclasses.replace(rounds, steps=None, epochs=2.5).steps_in(0, 10) == 7


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(2.0, 0.1, (step + 1) / 100) for step in range(100)]
    assert rates.index(max(rates)) == 9
    assert max(rates) == pytest.approx(2.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert learning_rate(2.0, 0.0, 1e-6) == pytest.approx(2.0)


HEADS = {
    "whole": Head(TABLE.double()),
    "restricted": Head.restricted(TABLE.double(), torch.tensor([*range(90, 30, -1), 3])),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("kind", ["ce", "forward_kl", "opd"])
def test_a_markov_head_that_says_nothing_leaves_the_plain_loss(kind: str, head: Head) -> None:
    objective = Objective(kind, clip=0.01)  # type: ignore[arg-type]
    blocks, hidden, teacher = blocks_of(MARKOV)
    net = random_drafter(MARKOV)
    assert net.markov_head is not None
    torch.nn.init.zeros_(net.markov_head.markov_w2.weight)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = member_loss(net, objective, head, ours, blocks, teacher)
    expected, stats = draft_loss(
        objective,
        head,
        theirs,
        blocks.weights.flatten(),
        teacher[blocks.teacher_rows.flatten()],
        blocks.labels.flatten(),
    )
    # Logits enter the one in float32, the other in float64.
    torch.testing.assert_close(loss.value.double(), expected.double(), atol=1e-5, rtol=1e-5)
    assert (loss.positions, loss.hits) == (stats.positions, int(stats.hits.sum()))
    loss.value.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_a_markov_head_is_taught_given_the_true_predecessor() -> None:
    blocks, hidden, _ = blocks_of(MARKOV)
    net = random_drafter(MARKOV)
    assert net.markov_head is not None
    loss = member_loss(net, Objective("ce"), HEADS["whole"], hidden, blocks, None)
    rows, previous = net.drafting_rows(hidden), predecessors(blocks, 0)
    logits = rows @ TABLE.double().T + net.markov_head.bias(rows, previous)
    entropies = -logits.log_softmax(-1).gather(-1, blocks.labels.unsqueeze(-1)).squeeze(-1)
    expected = (entropies * blocks.weights).sum() / blocks.weights.sum()
    torch.testing.assert_close(loss.value.double(), expected, atol=1e-5, rtol=1e-5)
    for block in range(len(previous)):
        assert previous[block, 0] == blocks.token_ids[block, 0]
        assert torch.equal(previous[block, 1:], blocks.labels[block, :-1])


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_selector_is_taught_where_the_label_is_a_candidate(head: Head) -> None:
    blocks, hidden, _ = blocks_of(DFLASH2)
    net = random_drafter(DFLASH2)
    selector = net.candidate_selector
    assert selector is not None
    with_selector = member_loss(net, Objective("ce"), head, hidden, blocks, None).value
    plain, _ = draft_loss(
        Objective("ce"), head, hidden, blocks.weights.flatten(), None, blocks.labels.flatten()
    )
    tokens = list(range(100)) if head.row_of_token is None else [*range(90, 30, -1), 3]
    rows = net.drafting_rows(hidden)
    logits = rows @ head.weight.T
    total = weight = 0.0
    for block in range(len(rows)):
        for slot in range(rows.shape[1]):
            label, w = int(blocks.labels[block, slot + 1]), float(blocks.weights[block, slot + 1])
            if w == 0 or label not in tokens:
                continue
            weight += w
            best = logits[block, slot].topk(7).indices.tolist()
            candidates = [tokens[index] for index in best]
            if label not in candidates:
                continue
            before = blocks.labels[block, slot] if slot else blocks.token_ids[block, 0]
            scores = net.scaled(logits[block, slot, best]) + selector.edges(
                rows[block, slot], before, torch.tensor(candidates)
            )
            total -= w * float(scores.detach().log_softmax(-1)[candidates.index(label)])
    assert total > 0
    assert float(with_selector.detach() - plain) == pytest.approx(total / weight, rel=1e-4)


@pytest.mark.parametrize("config", MEMBERS.values(), ids=MEMBERS)
def test_evaluation_counts_what_would_be_accepted(config: DrafterConfig) -> None:
    """Against a count by hand of each anchor by itself, with a text that the net itself wrote."""
    net, table = random_drafter(config), TABLE.double()
    given = trajectory(1, 40, config)
    given = dataclasses.replace(given, features=given.features.double())

    def head(hidden: Tensor) -> Tensor:
        return hidden @ table.T

    def drafts_at(anchor: int) -> list[int]:
        blocks = make_blocks([given], [torch.tensor([anchor])], config, 1.0)
        features = pack_features(blocks, [given])
        hidden = forward_blocks(net, blocks, features, table[blocks.token_ids.flatten()])
        drafts: list[int] = net.propose(hidden, blocks.token_ids[:, 0], head)[0].tolist()
        return drafts

    # Some drafts come true: the text takes on what is drafted, a few tokens at a time.
    for anchor in range(5, 36, 4):
        given.token_ids[anchor + 1 : anchor + 1 + anchor % 3] = torch.tensor(
            drafts_at(anchor)[: anchor % 3], dtype=torch.int64
        )
    tokens, expected = given.token_ids.tolist(), {}
    for anchor in range(5, 39):
        known = tokens[anchor + 1 : anchor + 1 + config.num_drafts]
        pairs = list(zip(drafts_at(anchor), known, strict=False))
        right = [a == b for a, b in pairs]
        expected[anchor] = right.index(False) if False in right else len(right)
    assert len(set(expected.values())) > 1
    result = evaluate(net, given, table, head)
    assert sum(result.right) == sum(expected.values())
    assert result.reached[0] == len(expected)
    walked, place = [], 5
    while place < 39:
        # The last token is the target's own, drafted or not.
        walked.append(min(expected[place], 38 - place))
        place += expected[place] + 1
    assert result.walked.steps == len(walked)
    assert result.walked.accepted == sum(walked)
    few = evaluate(net, given, table, head, most_anchors=10)
    assert (few.reached[0], few.walked.steps) == (10, 0)


def test_the_end_of_a_text_is_no_failure() -> None:
    """Of two anchors right as far as can be known, one sees a single token: no draft was wrong."""
    whole, cut = Acceptance([1, 1, 1], [1, 1, 1]), Acceptance([1, 0, 0], [1, 0, 0])
    whole.add(cut)
    assert whole.survival == [1.0, 1.0, 1.0]
    assert whole.emitted_per_anchor == 4.0
    whole.add(Acceptance([2, 0, 0], [0, 0, 0]))
    assert whole.survival == [0.5, 0.5, 0.5]
    assert Acceptance().emitted_per_anchor is None


def test_the_draft_vocabulary_is_the_most_frequent_and_the_ends() -> None:
    texts = [torch.tensor([5, 5, 7]), torch.tensor([7, 9, 5, 8])]
    assert frequent_tokens(texts, 12, 3, [2]).tolist() == [2, 5, 7]
    assert frequent_tokens(texts, 12, 5, [2]).tolist() == [2, 5, 7, 8, 9]
    with pytest.raises(ConfigError, match="--draft-vocabulary"):
        frequent_tokens(texts, 12, 13, [])


def test_layers_of_the_target_are_taken_over_where_they_fit() -> None:
    net = initialise(TINY, torch.Generator().manual_seed(0))
    before = {name: p.clone() for name, p in net.named_parameters()}
    asked = []

    def read(name: str) -> Tensor | None:
        asked.append(name)
        ours = name.replace("layers.1.", "layers.0.").replace("layers.4.", "layers.1.")
        ours = ours.replace("model.norm", "norm")
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return None
        shape = (3, 3) if "up_proj" in name else before[ours].shape
        return torch.full(shape, 0.5)

    copied = copy_target_layers(net, 6, read)
    assert any("layers.4.mlp.down_proj" in name for name in asked)
    for name, parameter in net.named_parameters():
        if name in copied:
            assert (parameter == 0.5).all()
        elif name != "fc.weight":
            assert torch.equal(parameter, before[name])
    assert not any("up_proj" in n or "q_norm" in n or "hidden_norm" in n for n in copied)
    assert "layers.1.self_attn.o_proj.weight" in copied
    features = random_rows(4, TINY.num_features, torch.float32, 0)
    assert torch.equal(net.fc(features), features[:, -TINY.hidden_size :])
