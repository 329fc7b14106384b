"""Widths for a whole batch: the choice against all choices that there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.engine.widths import (
    Floats,
    Integers,
    Widths,
    adaflash_width,
    choose_widths,
    who_drafts,
)

Seconds = Callable[[Integers], Floats]


def table(costs: Sequence[float]) -> Seconds:
    """The cost of n drafts by a list."""
    known = np.array(costs)
    return lambda drafts: known[np.minimum(drafts, len(costs) - 1)]


def line(fixed: float, each: float) -> Seconds:
    return lambda drafts: fixed + each * drafts.astype(np.float64)


def stairs(step: int, free: int = 0) -> Seconds:
    """`free` tokens are on the first stair already."""
    return lambda drafts: (-(-(drafts + free) // step)).astype(np.float64)


def promised(survivals: Sequence[Sequence[float]], widths: Sequence[int]) -> float:
    """Expected tokens of a choice."""
    kept = [
        list(itertools.accumulate(row, min))[:w] for row, w in zip(survivals, widths, strict=True)
    ]
    return len(survivals) + math.fsum(itertools.chain(*kept))


def speed(survivals: Sequence[Sequence[float]], widths: Sequence[int], seconds: Seconds) -> float:
    return promised(survivals, widths) / float(seconds(np.array([sum(widths)]))[0])


CHANCES = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
SMALL = st.lists(st.lists(CHANCES, max_size=3), min_size=1, max_size=3)
# Any cost of 0 to 9 drafts that never falls: lines, plateaus and staircases.
COSTS = st.lists(st.integers(1, 12), min_size=10, max_size=10).map(
    lambda costs: [0.1 * each for each in sorted(costs)]
)


@given(SMALL, COSTS)
def test_no_other_widths_are_faster(survivals: list[list[float]], costs: list[float]) -> None:
    seconds = table(costs)
    chosen = choose_widths(survivals, seconds)
    assert all(0 <= w <= len(row) for w, row in zip(chosen.widths, survivals, strict=True))
    assert chosen.emitted == pytest.approx(promised(survivals, chosen.widths))
    assert chosen.seconds == costs[sum(chosen.widths)]
    best = max(
        speed(survivals, widths, seconds)
        for widths in itertools.product(*(range(len(row) + 1) for row in survivals))
    )
    assert chosen.speed == pytest.approx(best)


@given(SMALL, COSTS)
def test_the_choice_is_the_same_whatever_array_it_comes_in(
    survivals: list[list[float]], costs: list[float]
) -> None:
    padded = np.zeros((len(survivals), 3))
    for row, chances in enumerate(survivals):
        padded[row, : len(chances)] = chances
    assert choose_widths(padded, table(costs)) == choose_widths(survivals, table(costs))


SURVIVALS = [[0.9, 0.7, 0.5, 0.1], [0.6, 0.2], [], [0.95, 0.9, 0.85, 0.8]]


def test_where_drafts_are_free_all_are_verified() -> None:
    assert choose_widths(SURVIVALS, line(1.0, 0.0)).widths == [4, 2, 0, 4]


def test_where_they_are_dear_none_is() -> None:
    assert choose_widths(SURVIVALS, line(0.0, 1.0)).widths == [0, 0, 0, 0]
    assert choose_widths(SURVIVALS, line(1.0, 1.0)).widths == [0, 0, 0, 0]


def test_a_draft_that_is_never_right_is_not_verified_though_it_is_free() -> None:
    assert choose_widths([[0.5, 0.0, 0.0], [0.0]], line(1.0, 0.0)).widths == [1, 0]


def test_a_stair_is_filled_and_the_next_not_begun() -> None:
    chosen = choose_widths([[0.5] * 7] * 4, stairs(16, free=4))
    assert sum(chosen.widths) == 12
    assert chosen.widths == [3, 3, 3, 3]


def test_a_rise_of_the_price_hides_no_better_stair_behind_it() -> None:
    costs = [1.0, 1.6, 1.6, 1.6, 1.6]  # the first draft alone does not pay, four do
    assert choose_widths([[0.9, 0.9, 0.9, 0.9]], table(costs)).widths == [4]


def test_equal_drafts_are_taken_in_the_order_of_block_and_batch() -> None:
    seconds = table([1.0, 0.9, 0.8, 0.7, 9.0, 9.0, 9.0])
    assert choose_widths([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], seconds).widths == [1, 1, 1]
    assert choose_widths([[0.5, 0.5], [0.5, 0.5]], table([1.0, 1.0, 1.0, 0.5, 9.0])).widths == [
        2,
        1,
    ]


def test_survival_that_rises_or_is_no_chance_is_mended() -> None:
    assert choose_widths([[0.2, 0.9]], table([1.0, 1.1, 1.3])).widths == [1]
    assert choose_widths([[math.nan, 0.9], [7.0]], line(1.0, 0.0)) == Widths([0, 1], 3.0, 1.0, 1.0)


def test_costs_that_are_not_known_yet_are_no_trouble() -> None:
    assert choose_widths([[0.5, 0.25]], line(0.0, 0.0)).widths == [2]


@given(st.lists(st.lists(CHANCES, min_size=7, max_size=7), min_size=1, max_size=40), st.data())
def test_no_uniform_width_is_faster(survivals: list[list[float]], data: Any) -> None:
    seconds = stairs(data.draw(st.integers(1, 64)), free=len(survivals))
    chosen = choose_widths(survivals, seconds)
    for width in range(8):
        uniform = speed(survivals, [width] * len(survivals), seconds)
        assert chosen.speed >= uniform * (1 - 1e-9)


@pytest.mark.parametrize(
    ("length", "num_drafts", "width"),
    [(0.0, 15, 0), (1.0, 15, 15), (1 / 16, 15, 0), (2 / 16, 15, 1), (0.49, 15, 6), (0.29, 99, 28)],
)
def test_the_scalar_head_counts_the_anchor(length: float, num_drafts: int, width: int) -> None:
    assert adaflash_width(length, num_drafts) == width


@given(st.integers(1, 40), st.data())
def test_a_head_that_is_right_verifies_what_is_accepted(num_drafts: int, data: Any) -> None:
    accepted = data.draw(st.integers(0, num_drafts))
    assert adaflash_width((accepted + 1) / (num_drafts + 1), num_drafts) == accepted


def of_every_set(
    drafted: list[list[float]], free: list[list[float]], price: Seconds, seconds: Seconds
) -> float:
    """The best speed over all sets of requests that may draft."""
    best, batch = 0.0, range(len(drafted))
    for size in range(len(drafted) + 1):
        extra = float(price(np.array([size]))[0]) if size else 0.0
        for chosen in itertools.combinations(batch, size):
            mixed = [drafted[r] if r in chosen else free[r] for r in batch]
            costs = (seconds(np.arange(20)) + extra).tolist()
            best = max(best, choose_widths(mixed, table(costs)).speed)
    return best


@given(
    st.lists(st.floats(0.0, 0.98), min_size=1, max_size=3),
    st.lists(st.floats(0.0, 0.5), min_size=3, max_size=3),
    COSTS,
)
def test_no_other_set_of_requests_drafts_better(
    chances: list[float], prices: list[float], costs: list[float]
) -> None:
    drafted = [[chance ** (i + 1) for i in range(3)] for chance in chances]
    nothing: list[list[float]] = [[] for _ in chances]
    price, seconds = table([0.0, *itertools.accumulate(prices)]), table(costs)
    choice = who_drafts(drafted, nothing, price, seconds)
    assert choice.step.speed == pytest.approx(of_every_set(drafted, nothing, price, seconds))
    assert choice.step.widths == [
        width if request in choice.requests else 0
        for request, width in enumerate(choice.step.widths)
    ]


def test_those_with_good_drafts_for_free_do_not_buy_others() -> None:
    drafted, free = [[0.6, 0.4, 0.2]] * 4, [[], [0.9, 0.9, 0.9], [], [0.1]]
    choice = who_drafts(drafted, free, line(0.05, 0.01), line(1.0, 0.02))
    assert choice.requests == [0, 2, 3]
    assert choice.step.widths == [3, 3, 3, 3]
    assert choice.step.emitted == pytest.approx(4 + 3 * 1.2 + 2.7)
    assert choice.step.seconds == pytest.approx(1.0 + 0.02 * 12 + 0.05 + 0.03)


def test_a_drafter_that_costs_too_much_is_not_run() -> None:
    choice = who_drafts([[0.6, 0.4, 0.2]] * 4, [[0.3]] * 4, line(2.0, 0.0), line(1.0, 0.02))
    assert choice.requests == []
    assert choice.step.widths == [1, 1, 1, 1]


def test_it_is_run_for_those_alone_that_it_can_do_something_for() -> None:
    drafted = [[0.9, 0.8, 0.7] if r % 8 == 0 else [0.02] for r in range(64)]
    choice = who_drafts(drafted, [[]] * 64, line(0.0, 0.02), line(1.0, 0.001))
    assert choice.requests == list(range(0, 64, 8))


def test_the_drafter_is_not_run_for_nothing() -> None:
    choice = who_drafts([[0.5, 0.2]] * 3, [[]] * 3, line(0.0, 0.0), line(0.1, 1.0))
    assert choice.requests == []
    assert who_drafts([], [], line(1.0, 0.0), line(1.0, 0.0)).step.widths == []
