"""Whether what a drafter says of its own drafts came true, and that this decides what is served."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import DSPARK, random_drafter
from test_length_training import MARKOV, headed, trainer_of
from torch import Tensor
from trajectories import TABLE, learner, trajectory

from adaflash_batch.adapt.evaluate import evaluate
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.scoring import Comparison, Scorer
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.exchange import Trajectory
from adaflash_batch.stats import Calibration

PLENTY = 2**26
Said = list[tuple[float, bool]]


def counted(said: Said) -> Calibration:
    found = Calibration()
    for predicted, happened in said:
        found.observe(predicted, happened)
    return found


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans())), st.integers(0, 20))
def test_the_error_is_the_mean_distance_of_ten_bins(said: Said, cut: int) -> None:
    together = counted(said[:cut])
    together.add(counted(said[cut:]))
    if not said:
        assert together.ece is None
        assert together.mean_squared_error is None
        assert together.curve() == []
        return
    bins: dict[int, Said] = {}
    for predicted, happened in said:
        bins.setdefault(9 if predicted == 1.0 else int(predicted * 10), []).append(
            (predicted, happened)
        )
    distance = sum(abs(sum(p for p, _ in each) - sum(h for _, h in each)) for each in bins.values())
    assert together.ece == pytest.approx(distance / len(said), abs=1e-9)
    squares = [(p - h) ** 2 for p, h in said]
    assert together.mean_squared_error == pytest.approx(sum(squares) / len(said), abs=1e-9)
    assert [point["count"] for point in together.curve()] == [len(bins[b]) for b in sorted(bins)]


def own_text(net: DFlash) -> Trajectory:
    """A text of which the net drafts the first tokens behind some places right."""
    given = trajectory(1, 40, net.config)
    given = dataclasses.replace(given, features=given.features.double())
    for anchor in range(5, 36, 4):
        drafts = drafted(net, given, anchor)[0]
        right = anchor % 4 + (anchor // 4) % 4
        given.token_ids[anchor + 1 : anchor + 1 + right] = drafts[:right]
    return given


def drafted(net: DFlash, text: Trajectory, anchor: int) -> tuple[Tensor, list[float], float | None]:
    """(drafts, survival, length) behind one token."""
    from adaflash_batch.adapt.block_attention import forward_blocks
    from adaflash_batch.adapt.blocks import make_blocks, pack_features

    blocks = make_blocks([text], [torch.tensor([anchor])], net.config, 1.0)
    embeddings = TABLE.double()[blocks.token_ids.flatten()]
    with torch.no_grad():
        hidden = forward_blocks(net, blocks, pack_features(blocks, [text]), embeddings)
        found = net.propose_judged(hidden, blocks.token_ids[:, 0], lambda x: x @ TABLE.double().T)
    survival = [] if found.survival is None else found.survival[0].tolist()
    return found.drafts[0], survival, None if found.length is None else float(found.length)


@pytest.mark.parametrize(
    "config", [headed(DSPARK, "hazard"), DSPARK, headed(MARKOV, "adaflash")], ids=str
)
def test_evaluation_compares_what_was_said_with_the_text(config: DrafterConfig) -> None:
    net = random_drafter(config)
    text = own_text(net)
    expected = Calibration()
    for anchor in range(5, 39):
        drafts, survival, length = drafted(net, text, anchor)
        known = text.token_ids[anchor + 1 : anchor + 1 + config.num_drafts].tolist()
        right = [a == b for a, b in zip(drafts.tolist(), known, strict=False)]
        accepted = right.index(False) if False in right else len(right)
        if length is None:
            for place in range(len(known)):
                expected.observe(survival[place], place < accepted)
        elif False in right or len(right) == config.num_drafts:
            expected.observe(length, (accepted + 1) / (config.num_drafts + 1))
    found = evaluate(net, text, TABLE.double(), lambda x: x @ TABLE.double().T).calibration
    assert found.counts == expected.counts
    assert sum(found.counts) > 25
    assert found.ece == pytest.approx(expected.ece, abs=1e-5)
    assert found.mean_squared_error == pytest.approx(expected.mean_squared_error, abs=1e-5)


def test_without_a_head_nothing_is_said() -> None:
    net = random_drafter(MARKOV)
    found = evaluate(net, own_text(net), TABLE.double(), lambda x: x @ TABLE.double().T)
    assert found.reached[0] > 0
    assert found.calibration.ece is None


@pytest.mark.parametrize(
    ("comparison", "is_better"),
    [
        (Comparison(2.0, 2.1), True),
        (Comparison(2.0, 2.0), False),
        (Comparison(2.0, 2.1, 0.1, 0.3), True),
        (Comparison(2.1, 2.0, 0.3, 0.1), False),
        (Comparison(2.0, 2.0, 0.3, 0.1), True),
        (Comparison(2.0, 2.0, 0.1, 0.1), False),
        (Comparison(2.0, 2.0, 0.1, 0.3), False),
    ],
    ids=str,
)
def test_drafts_come_before_what_is_said_of_them(comparison: Comparison, is_better: bool) -> None:
    assert comparison.is_better is is_better


@pytest.mark.parametrize("kind", ["hazard", "adaflash"])
def test_a_round_of_heads_alone_is_published_for_being_truer(kind: str) -> None:
    net = random_drafter(headed(MARKOV, kind), torch.float32)
    served = copy.deepcopy(net)
    core = trainer_of(net, parameters="heads")
    scorer = Scorer(served, embedding=TABLE, head=Head(TABLE), most_anchors=None)
    trainer, outbox = learner(core, scorer)
    report = trainer.run_round()
    assert report.fault is None
    assert report.tau_before == report.tau_after
    published = outbox.take()
    assert published is not None
    for name, parameter in served.named_parameters():
        is_same = torch.equal(published.tensors[name], parameter)
        assert is_same is not name.startswith("length_head."), name
