"""What a step takes: learnt on machines that are made up, with what disturbs real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.cost_curve import CostCurve, bin_of, rising

Law = Callable[[int], float]


def linear(tokens: int) -> float:
    return 0.03 + 0.001 * tokens


def stairs(tokens: int) -> float:
    """Flat from 1 to 16 and twice as much at 17."""
    return 0.02 * math.ceil(tokens / 16)


def convex(tokens: int) -> float:
    return 0.03 + 0.00001 * tokens**2


LAWS = [linear, stairs, convex]


@dataclass
class Machine:
    """Steps of `requests` with up to 7 drafts each, now and then beside a piece of a prompt."""

    law: Law
    noise: float = 0.1
    outliers: float = 0.05
    per_row: float = 0.0
    per_key: float = 0.0
    seed: int = 0
    slowness: float = 1.0
    requests: int = 4
    cost: StepCost = field(default_factory=StepCost)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def shape(self) -> tuple[int, int, int]:
        rows = self.requests + int(self.random.integers(0, 7 * self.requests + 1))
        piece = int(self.random.integers(1, 200)) if self.random.random() < 0.05 else 0
        return rows + piece, rows, (rows + piece) * int(self.random.integers(50, 1000))

    def truth(self, tokens: int, rows: int, context: int) -> float:
        own = self.law(tokens) + self.per_row * rows + self.per_key * context
        return self.slowness * own

    def seconds(self, *shape: int) -> float:
        taken = self.truth(*shape) * math.exp(self.random.normal(0.0, self.noise))
        return taken * 10.0 if self.random.random() < self.outliers else taken

    def run(self, steps: int) -> None:
        for _ in range(steps):
            shape = self.shape()
            self.cost.observe_target(*shape, self.seconds(*shape))
            self.cost.observe_draft(self.requests, self.slowness * (0.01 + 0.001 * self.requests))
            self.cost.observe_rest(self.requests, self.slowness * 0.0005 * self.requests)

    def error(self, steps: int = 200) -> float:
        """Median error on steps that are not learnt from."""
        shapes = [self.shape() for _ in range(steps)]
        tokens, rows, context = np.array(shapes).T
        predicted = self.cost.target(tokens, rows, context)
        taken = np.array([self.seconds(*shape) for shape in shapes])
        return float(np.median(np.abs(predicted / taken - 1.0)))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("requests", [1, 4, 16, 64])
def test_held_out_steps_are_predicted(law: Law, requests: int) -> None:
    machine = Machine(law, requests=requests)
    machine.run(300)
    assert machine.error() < 0.12
    machine.noise = machine.outliers = 0.0
    assert machine.error() < 0.08


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("before", "after"), [(1, 16), (64, 4), (2, 128)])
def test_another_concurrency_is_known_within_fifty_steps(law: Law, before: int, after: int) -> None:
    machine = Machine(law, requests=before)
    machine.run(300)
    machine.requests = after
    machine.run(50)
    assert machine.error() < 0.15


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("factor", [2.0, 0.5, 5.0])
def test_a_machine_of_another_speed_is_known_within_fifty_steps(law: Law, factor: float) -> None:
    machine = Machine(law)
    machine.run(300)
    machine.slowness = factor
    machine.run(15)
    assert machine.error() < 0.13
    machine.run(35)
    assert machine.error() < 0.13
    # What was seen at the old speed counts as well: no step of so many tokens came since.
    machine.requests = 2
    assert machine.error() < 0.13


def test_another_process_for_a_while_leaves_no_trace() -> None:
    machine = Machine(stairs)
    machine.run(200)
    for _ in range(6):
        machine.slowness = 2.0
        machine.run(40)
        machine.slowness = 1.0
        machine.run(40)
    machine.noise = machine.outliers = 0.0
    assert machine.error() < 0.08


def test_slow_single_steps_change_nothing() -> None:
    undisturbed, disturbed = (Machine(linear, noise=0.05, outliers=share) for share in (0.0, 0.1))
    undisturbed.run(200)
    disturbed.run(200)
    tokens = np.arange(4, 33)
    clean, other = (m.cost.target(tokens, tokens, 500 * tokens) for m in (undisturbed, disturbed))
    assert np.abs(other / clean - 1.0).max() < 0.12


def test_a_stair_is_seen_where_it_is() -> None:
    machine = Machine(stairs, noise=0.03)
    machine.run(400)
    before, behind = machine.cost.target([16, 17], [16, 17], [8000, 8500])
    assert before < 1.1 * stairs(16)
    assert behind > 0.9 * stairs(17)


def test_context_and_rows_are_told_from_tokens() -> None:
    machine = Machine(linear, per_row=0.0005, per_key=2e-6, requests=16)
    machine.run(600)
    little, much = machine.cost.target(64, 64, [64 * 100, 64 * 900])
    assert much - little == pytest.approx(2e-6 * 64 * 800, rel=0.2)
    assert machine.error() < 0.12


def test_counts_never_seen_follow_from_those_that_were() -> None:
    machine = Machine(linear, requests=16, noise=0.05)
    machine.run(100)
    for tokens in (1, 4, 8, 200, 300):  # 16 to 128 were seen
        assert machine.cost.target(tokens, tokens, 0) == pytest.approx(linear(tokens), rel=0.2)


def test_drafting_and_the_rest_are_learnt_too() -> None:
    machine = Machine(linear)
    machine.run(100)
    machine.slowness = 3.0
    machine.run(50)
    np.testing.assert_allclose(machine.cost.draft([0, 4]), [0.0, 3 * 0.014], rtol=0.1)
    np.testing.assert_allclose(machine.cost.rest([0, 4]), [0.0, 3 * 0.002], rtol=0.1)


@pytest.mark.parametrize(("steps", "is_known"), [(0, False), (10, False), (20, True)])
def test_nothing_is_believed_too_soon(steps: int, is_known: bool) -> None:
    machine = Machine(linear)
    machine.run(steps)
    assert machine.cost.is_known == is_known
    assert bool(machine.cost.target(8, 8, 100) > 0.0) == (steps > 0)


OBSERVATIONS = st.lists(
    st.tuples(
        st.integers(-2, 5000),
        st.integers(0, 500),
        st.integers(0, 10**7),
        st.one_of(st.floats(1e-5, 10.0), st.sampled_from([0.0, -1.0, math.inf, math.nan])),
    ),
    max_size=120,
)


@given(OBSERVATIONS)
def test_more_never_costs_less_and_nothing_costs_less_than_nothing(
    observations: list[tuple[int, int, int, float]],
) -> None:
    cost = StepCost()
    for tokens, rows, context, seconds in observations:
        cost.observe_target(tokens, rows, context, seconds)
        cost.observe_draft(rows, seconds)
        cost.observe_rest(rows, seconds)
    counts = np.arange(1, 6000)
    for curve in (cost.target(counts, 0, 0), cost.draft(counts), cost.rest(counts)):
        assert np.isfinite(curve).all()
        assert (curve >= 0.0).all()
        assert (np.diff(curve) >= -1e-9 * curve[1:]).all()
    for count in (0, 1, 2, 7, 40, 3000, 5999):
        assert cost.draft_at(count) == pytest.approx(float(cost.draft(count)))
        assert cost.rest_at(count) == pytest.approx(float(cost.rest(count)))
    assert (np.diff(cost.target(64, [0, 8, 64], 0)) >= 0.0).all()
    assert (np.diff(cost.target(64, 64, [0, 8, 64])) >= 0.0).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=6))
def test_no_rising_curve_is_nearer_to_the_levels(pairs: list[tuple[int, int]]) -> None:
    levels, weights = (np.array(column) for column in zip(*pairs, strict=True))
    best = min(
        float((weights * np.abs(levels - curve)).sum())
        for curve in combinations_with_replacement(range(7), len(pairs))
    )
    found = rising(levels.astype(float), weights)
    assert (np.diff(found) >= 0.0).all()
    assert (weights * np.abs(levels - found)).sum() == pytest.approx(best)


def test_bins_are_in_order_and_end_where_tiles_do() -> None:
    bins = [bin_of(count) for count in range(1, 20000)]
    assert bins[0] == 0
    assert all(0 <= after - before <= 1 for before, after in pairwise(bins))
    for tile in (16, 32, 64, 128, 256):
        for edge in range(tile, 16 * tile, tile):
            assert bin_of(edge) < bin_of(edge + 1)


def test_an_observation_in_a_full_ring_replaces_the_oldest() -> None:
    curve = CostCurve()
    for seconds in [5.0] * 30 + [1.0] * 13:
        curve.settle(curve.add(3, (), seconds), seconds)
    assert curve.seconds(3) == 1.0


def trained() -> StepCost:
    machine = Machine(stairs, cost=StepCost("this machine"))
    machine.run(150)
    machine.slowness = 2.0
    machine.run(60)
    return machine.cost


def test_what_was_learnt_comes_back_from_a_file(tmp_path: Path) -> None:
    cost, other = trained(), StepCost("this machine")
    path = tmp_path / "new" / "cost.json"
    cost.save(path)
    assert other.load(path) is None
    assert other.is_known
    tokens = np.arange(1, 64)
    now, then = (each.target(tokens, tokens, 300 * tokens) for each in (other, cost))
    assert np.median(np.abs(now / then - 1.0)) < 0.08
    np.testing.assert_allclose(other.draft([4, 8]), cost.draft([4, 8]), rtol=0.1)
    assert other.slowness == 1.0


def test_what_came_back_is_learnt_on_from() -> None:
    machine = Machine(stairs, slowness=4.0, cost=StepCost("this machine"))
    assert machine.cost.restore(trained().state()) is None
    machine.run(15)
    assert machine.error() < 0.15


def test_a_file_that_will_not_do_is_left_aside(tmp_path: Path) -> None:
    cost, path = StepCost("another machine"), tmp_path / "cost.json"
    trained().save(path)
    whole = path.read_bytes()
    state = json.loads(whole)
    assert "about this machine, not about another" in str(cost.load(path))
    assert "cannot be read" in str(cost.load(tmp_path / "none.json"))
    state["about"] = "another machine"
    row = state["parts"]["target"][0]
    wrong: list[object] = [[], {}, None, state | {"format": 0}, state | {"parts": None}]
    for bad in (
        [*row, 1.0],
        row[:2],
        ["a", *row[1:]],
        [0, *row[1:]],
        [1, -1.0, 0, 0],
        [1, 1, 0, -1],
    ):
        wrong.append(state | {"parts": state["parts"] | {"target": [row, bad]}})
    for each in wrong:
        path.write_text(json.dumps(each))
        assert cost.load(path) is not None
    for damaged in (whole[:100], b"", b"\xff\x00", b"[" * 100_000):
        path.write_bytes(damaged)
        assert cost.load(path) == "it is not JSON"
    path.write_text(json.dumps(state).replace(str(row[1]), "NaN", 1))
    assert cost.load(path) == "its part target is damaged"
    assert not cost.is_known
    assert cost.target(4, 4, 0) == 0.0
