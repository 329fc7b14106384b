"""Length heads: what they compute, that they change no draft, and where they are kept."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import DFLASH2, DSPARK, PROJECTED, TINY, random_drafter, random_rows
from torch import Tensor
from trajectories import TABLE

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.growing import grow_dflash2, grow_length_head
from adaflash_batch.drafter.length import (
    AdaFlashHead,
    HazardHead,
    certainty,
    is_ended,
    log_likelihood,
    num_accepted,
    sufficient_share,
    survival_of,
    truncated,
    verified_drafts,
)
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.errors import ConfigError
from adaflash_batch.training.export import export
from adaflash_batch.training.view import describe

WIDTHS = {"hazard": 0, "adaflash": 7}
UNSURE = dataclasses.replace(
    DSPARK, enable_confidence_head=False, confidence_head_with_markov=False
)
MEMBERS = {"dflash": TINY, "dspark": DSPARK, "markov": UNSURE, "dflash2": DFLASH2}
TOKENS = torch.tensor([*range(90, 30, -1), 3]).sort().values
HIDDEN = random_rows(4 * TINY.block_size, TINY.hidden_size, torch.float64, 5)
ANCHORS = torch.tensor([3, 40, 41, 77])
FACTS = TargetFacts(TINY.vocab_size, TINY.hidden_size, TINY.num_target_layers, "tiny")


def with_head(config: DrafterConfig, kind: str = "hazard", width: int | None = None) -> DFlash:
    width = WIDTHS[kind] if width is None else width
    changes: dict[str, Any] = {"length_head": kind, "length_head_width": width}
    return random_drafter(dataclasses.replace(config, **changes))


def by_hand(logits: list[float], accepted: int, num_known: int) -> float:
    """Log-likelihood of what happened, a draft at a time."""
    total = 0.0
    for place in range(min(len(logits), num_known)):
        hazard = 1.0 / (1.0 + math.exp(-logits[place]))
        if place == accepted:
            return total + math.log(hazard)
        total += math.log(1.0 - hazard)
    return total


@given(st.lists(st.floats(-6, 6), min_size=1, max_size=7), st.integers(0, 9), st.integers(0, 9))
def test_the_likelihood_is_that_of_every_draft_in_turn(
    logits: list[float], right: int, known: int
) -> None:
    accepted = min(right, known, len(logits))
    columns = torch.tensor([logits], dtype=torch.float64)
    found = log_likelihood(columns, torch.tensor([accepted]), torch.tensor([known]))
    assert float(found) == pytest.approx(by_hand(logits, accepted, known), abs=1e-9)
    survival = survival_of(columns)[0].tolist()
    expected = 1.0
    for logit, share in zip(logits, survival, strict=True):
        expected *= 1.0 - 1.0 / (1.0 + math.exp(-logit))
        assert share == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(0, 9), st.integers(0, 7))
def test_labels_are_the_smallest_width_that_accepts_as_much(
    right: list[bool], known: int, width: int
) -> None:
    is_right = torch.tensor([[r and place < known for place, r in enumerate(right)]])
    accepted = num_accepted(is_right)

    def accepted_at(drafts: int) -> int:
        count = 0
        while count < drafts and bool(is_right[0, count]):
            count += 1
        return count

    num_drafts = len(right)
    smallest = min(w for w in range(num_drafts + 1) if accepted_at(w) == accepted_at(num_drafts))
    share = float(sufficient_share(accepted, num_drafts))
    assert share == pytest.approx((smallest + 1) / (num_drafts + 1))
    assert int(truncated(accepted, torch.tensor([width]))) == accepted_at(min(width, num_drafts))
    assert bool(is_ended(accepted, torch.tensor([known]))) == (accepted_at(num_drafts) >= known)


@pytest.mark.parametrize(
    ("share", "drafts"), [(0.0, 0), (0.19, 0), (0.21, 0), (0.41, 1), (0.999, 3), (1.0, 4), (2.0, 4)]
)
def test_the_papers_width_counts_the_anchor(share: float, drafts: int) -> None:
    assert verified_drafts(torch.tensor([share]), 4).tolist() == [drafts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_certainty_is_of_the_best_and_the_second(dtype: torch.dtype) -> None:
    scores = random_rows(70, 11, torch.float32, 0).mul(3).to(dtype)
    scores[5, 3] = scores[5, 7] = scores[5].max() + 1  # two are the best
    best = scores.argmax(-1)
    found = certainty(scores.view(7, 10, 11), best.view(7, 10))
    assert found.shape == (7, 10, 3)
    found = found.view(70, 3).double()
    logs = scores.double().log_softmax(-1).sort(descending=True).values
    torch.testing.assert_close(found[:, 1], logs[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 0].sigmoid(), logs[:, 0].exp(), atol=1e-6, rtol=0)
    lead = logs[:, 0] - logs[:, 1]
    torch.testing.assert_close(found[:, 2], lead, atol=1e-5, rtol=0)
    assert certainty(scores[:, :1], torch.zeros(70, dtype=torch.int64)).isfinite().all()


def scores_of(net: DFlash, drafts: Tensor, tokens: Tensor) -> list[list[dict[int, float]]]:
    """For each draft the score of every token that it was chosen among."""
    rows = net.drafting_rows(HIDDEN)
    previous = torch.cat((ANCHORS.unsqueeze(1), drafts[:, :-1]), dim=1)
    logits = rows @ TABLE.double()[tokens].T
    if net.markov_head is not None:
        logits = logits + net.markov_head.bias(rows, previous, tokens)
    found: list[list[dict[int, float]]] = []
    for block in range(len(drafts)):
        found.append([])
        for slot in range(drafts.shape[1]):
            scores = dict(zip(tokens.tolist(), logits[block, slot].tolist(), strict=True))
            if net.candidate_selector is not None:
                scores = selected(net, rows[block, slot], int(previous[block, slot]), scores)
            found[-1].append(scores)
    return found


def selected(net: DFlash, row: Tensor, previous: int, scores: dict[int, float]) -> dict[int, float]:
    selector, top = net.candidate_selector, net.config.selector_top_k
    assert selector is not None
    best = sorted(scores, key=lambda token: -scores[token])[:top]
    edges = selector.edges(row, torch.tensor(previous), torch.tensor(best))
    scaled = net.scaled(torch.tensor([scores[token] for token in best]))
    return dict(zip(best, (scaled + edges).tolist(), strict=True))


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("tokens", [torch.arange(len(TABLE)), TOKENS], ids=["all", "some"])
@pytest.mark.parametrize("member", MEMBERS)
@torch.no_grad()
def test_hazards_follow_from_states_and_the_certainty_of_the_choice_as_served(
    member: str, tokens: Tensor, width: int
) -> None:
    net = with_head(MEMBERS[member], width=width)
    head = net.length_head
    assert isinstance(head, HazardHead)
    proposal = net.propose_judged(HIDDEN, ANCHORS, lambda x: x @ TABLE.double()[tokens].T, tokens)
    assert proposal.length is None
    assert proposal.survival is not None
    rows = net.drafting_rows(HIDDEN)
    for block, slots in enumerate(scores_of(net, proposal.drafts, tokens)):
        share = 1.0
        for slot, scores in enumerate(slots):
            draft = int(proposal.drafts[block, slot])
            values = torch.tensor([scores.pop(draft), *scores.values()], dtype=torch.float64)
            chance = values.softmax(0)[0]
            odds = torch.log(chance / (1 - chance))
            sure = torch.stack((odds, torch.log(chance), values[0] - values[1:].max()))
            row = rows[block, slot]
            x = torch.cat((row / (row.square().mean() + 1e-6).sqrt(), sure))
            if head.hidden is not None:
                x = torch.nn.functional.silu(head.hidden.weight @ x + head.hidden.bias)
            logit = float(head.out.weight[0] @ x + head.bias[slot] - odds)
            share *= 1.0 - 1.0 / (1.0 + math.exp(-logit))
            assert float(proposal.survival[block, slot]) == pytest.approx(share, abs=1e-5)


@torch.no_grad()
def test_the_scalar_head_reads_the_mean_and_the_last_row() -> None:
    net = with_head(DSPARK, "adaflash")
    head = net.length_head
    assert isinstance(head, AdaFlashHead)
    proposal = net.propose_judged(HIDDEN, ANCHORS, lambda x: x @ TABLE.double().T)
    assert proposal.length is not None
    silu = torch.nn.functional.silu
    for block, rows in enumerate(HIDDEN.view(len(ANCHORS), DSPARK.block_size, -1)):
        x = torch.cat((rows.sum(0) / len(rows), rows[-1]))
        h = silu(head.down.weight @ x + head.down.bias)
        h = h + silu(head.res.weight @ h + head.res.bias)
        expected = torch.sigmoid(head.out.weight[0] @ h + head.out.bias[0])
        torch.testing.assert_close(proposal.length[block], expected)


@torch.no_grad()
def test_without_a_hazard_head_survival_is_the_confidence_heads() -> None:
    sure = dataclasses.replace(DSPARK, confidence_temperatures=(0.5, 1.0, 1.5, 2.0, 3.0))
    net = random_drafter(sure)
    proposal = net.propose_judged(HIDDEN, ANCHORS, lambda x: x @ TABLE.double().T)
    previous = torch.cat((ANCHORS.unsqueeze(1), proposal.drafts[:, :-1]), dim=1)
    logits = net.confidence(net.drafting_rows(HIDDEN), previous)
    expected = (logits / torch.tensor(sure.confidence_temperatures)).sigmoid().cumprod(1)
    assert proposal.survival is not None
    torch.testing.assert_close(proposal.survival.double(), expected, atol=1e-6, rtol=1e-5)
    for config in (TINY, UNSURE, DFLASH2):
        proposal = random_drafter(config).propose_judged(
            HIDDEN, ANCHORS, lambda x: x @ TABLE.double().T
        )
        assert proposal[1:] == (None, None)


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("member", MEMBERS)
@torch.no_grad()
def test_a_drafter_that_grows_a_head_drafts_the_same_bit_for_bit(member: str, kind: str) -> None:
    net = random_drafter(MEMBERS[member]).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    grown = grow_length_head(net, generator, kind=kind, width=WIDTHS[kind])
    hidden = HIDDEN.to(torch.bfloat16)
    drafts = net.propose(hidden, ANCHORS, lambda x: x @ TABLE.T.to(x.dtype))
    proposal = grown.propose_judged(hidden, ANCHORS, lambda x: x @ TABLE.T.to(x.dtype))
    assert torch.equal(proposal.drafts, drafts)
    if kind == "hazard":
        assert proposal.survival is not None
        tokens, expected = torch.arange(len(TABLE)), torch.ones(drafts.shape)
        double = grown.double()
        for block, slots in enumerate(scores_of(double, drafts, tokens)):
            for slot, scores in enumerate(slots):
                chances = torch.tensor(list(scores.values())).softmax(0)
                best = list(scores).index(int(drafts[block, slot]))
                expected[block, slot] = chances[best]
        survival = proposal.survival
        torch.testing.assert_close(survival, expected.cumprod(1), atol=0.03, rtol=0.05)
    else:
        assert proposal.length is not None
        assert proposal.length.tolist() == [0.5] * len(ANCHORS)
    kept = dict(grown.named_parameters())
    assert all(torch.equal(kept[name], p) for name, p in net.named_parameters())


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("member", MEMBERS)
def test_a_first_drafter_has_the_same_other_weights_with_and_without_a_head(
    member: str, kind: str
) -> None:
    config = MEMBERS[member]
    changed = dataclasses.replace(config, length_head=kind, length_head_width=WIDTHS[kind])
    plain, made = (initialise(c, torch.Generator().manual_seed(0)) for c in (config, changed))
    own = dict(made.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in plain.named_parameters())
    assert made.length_head is not None
    out = made.length_head.out.weight
    assert not out.any()
    hidden = [p for p in made.length_head.parameters() if p.dim() > 1 and p is not out]
    assert all(bool(p.any()) for p in hidden)


def test_a_drafter_with_a_head_grows_dflash2_too() -> None:
    net = with_head(TINY)
    grown = grow_dflash2(net, torch.Generator().manual_seed(0), conv_group_size=8, selector_top_k=7)
    own = dict(grown.named_parameters())
    assert grown.config.length_head == "hazard"
    assert all(torch.equal(own[name], p) for name, p in net.named_parameters())


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("config", [TINY, DSPARK, DFLASH2, PROJECTED], ids=str)
def test_a_head_is_stored_shown_and_left_out_of_what_is_published(
    tmp_path: Path, config: DrafterConfig, kind: str
) -> None:
    net = with_head(config, kind).to(torch.bfloat16)
    checkpoint.save(net, tmp_path / "drafter")
    loaded = checkpoint.load(tmp_path / "drafter", FACTS, dtype=torch.bfloat16)
    assert loaded.config == net.config
    for (name, a), (_, b) in zip(loaded.named_parameters(), net.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    shown = "\n".join(describe(tmp_path / "drafter"))
    assert f"length head: {kind}" in shown
    lines = list(export(tmp_path / "drafter", tmp_path / "published"))
    assert any("length head" in line for line in lines)
    text = (tmp_path / "published" / "config.json").read_text()
    assert "length_head" not in text
    published = checkpoint.load(tmp_path / "published", FACTS, dtype=torch.bfloat16)
    assert published.length_head is None
    assert published.config.markov_rank == config.markov_rank


def test_a_plain_drafters_config_does_not_mention_heads(tmp_path: Path) -> None:
    checkpoint.save(random_drafter(TINY), tmp_path / "drafter")
    assert "length_head" not in (tmp_path / "drafter" / "config.json").read_text()
    assert "length head" not in "\n".join(describe(tmp_path / "drafter"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"length_head": "guess"}, "length_head is 'guess', known are hazard, adaflash"),
        ({"length_head": "hazard", "length_head_width": -1}, "length_head_width is -1"),
        ({"length_head": "adaflash"}, "length_head_width is 0"),
        ({"length_head_width": 5}, "length_head_width is 5 without a length_head"),
    ],
    ids=str,
)
def test_what_is_no_head_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **changes)
    checkpoint.save(with_head(TINY), tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"] |= {"length_head": "", "length_head_width": 0} | changes
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        checkpoint.load(tmp_path / "drafter", FACTS, dtype=torch.bfloat16)
