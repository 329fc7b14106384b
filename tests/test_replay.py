"""What is trained on, what is replayed, what is held back."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import of_size

from adaflash_batch.adapt.randomness import seed_of, share_of
from adaflash_batch.adapt.replay import ReplayPool, Reservoir
from adaflash_batch.request import RowKey

PLENTY = 10**9
SIZES = st.lists(st.integers(1, 9), max_size=60)


def pool(**changes: float) -> ReplayPool:
    sizes = {"recent_bytes": PLENTY, "replay_bytes": PLENTY, "held_back_bytes": PLENTY}
    return ReplayPool(**({"seed": 0} | sizes | changes))  # type: ignore[arg-type]


def kept_rows(reservoir: Reservoir) -> set[int]:
    drawn = reservoir.draw(random.Random(0), len(reservoir))
    assert len({each.key for each in drawn}) == len(reservoir)
    return {each.key.row for each in drawn}


@given(SIZES, st.integers(0, 60), st.randoms(use_true_random=False))
def test_what_is_replayed_is_bounded_and_knows_no_order(
    sizes: list[int], max_bytes: int, dice: random.Random
) -> None:
    given_ = [of_size(row, size) for row, size in enumerate(sizes)]
    reservoir = Reservoir(3, max_bytes)
    for each in given_:
        reservoir.add(each)
        assert reservoir.num_bytes <= max_bytes
    rows = kept_rows(reservoir)
    assert reservoir.num_bytes == sum(sizes[row] for row in rows)
    # The lowest ranks, up to the first that found no room.
    ranked = sorted(range(len(sizes)), key=lambda row: share_of(3, "replay", 0, row, 0))
    assert rows == set(ranked[: len(rows)])
    if len(rows) < len(sizes):
        assert reservoir.num_bytes + sizes[ranked[len(rows)]] > max_bytes
    again = Reservoir(3, max_bytes)
    for each in dice.sample(given_ + given_, 2 * len(given_)):
        again.add(each)
    assert kept_rows(again) == rows


def test_old_and_new_are_replayed_alike() -> None:
    """Over many seeds every trajectory of a job is kept as often, the large ones too."""
    counts: Counter[int] = Counter()
    given_ = [of_size(row, 1 + 2 * (row % 2)) for row in range(200)]
    for seed in range(100):
        reservoir = Reservoir(seed, 200)
        for each in given_:
            reservoir.add(each)
        counts.update(kept_rows(reservoir))
    assert 0.45 < counts.total() / (100 * 200) < 0.55
    halves = [sum(counts[row] for row in part) for part in (range(100), range(100, 200))]
    parities = [sum(counts[row] for row in range(first, 200, 2)) for first in (0, 1)]
    for one, other in (halves, parities):
        assert abs(one - other) < 0.04 * (one + other)


@given(st.floats(0.0, 1.0), st.integers(1, 9))
@settings(max_examples=15)
def test_the_share_of_replay_is_met(share: float, size: int) -> None:
    """Seen in what is no longer recent: the recent ones are the last 100 rows."""
    made = pool(replay_share=share, held_back_share=0.0, recent_bytes=100)
    for row in range(1000):
        made.add(of_size(row, 1))
    for row in range(1000, 1100):
        made.add(of_size(row, 1))
    num_old = 0
    for number in range(200):
        batch = made.batch(number, size)
        assert len(batch) == len({each.key for each in batch}) == size
        num_old += sum(each.key.row < 1000 for each in batch)
    # A tenth of what is replayed is recent, too.
    expected = 200 * size * share * 10 / 11
    assert abs(num_old - expected) < 5 + 0.1 * expected


def test_a_batch_follows_from_seed_and_number() -> None:
    def drawn(seed: int, number: int) -> list[int]:
        made = pool(seed=seed, held_back_share=0.0)
        for row in range(50):
            made.add(of_size(row, 1))
        return [each.key.row for each in made.batch(number, 6)]

    assert drawn(1, 7) == drawn(1, 7)
    assert drawn(1, 7) != drawn(1, 8)
    assert drawn(1, 7) != drawn(2, 7)


def test_a_small_pool_gives_what_it_has() -> None:
    made = pool(held_back_share=0.0)
    assert made.batch(0, 4) == []
    for row in range(3):
        made.add(of_size(row, 1))
    assert sorted(each.key.row for each in made.batch(0, 8)) == [0, 1, 2]


@given(st.integers(0, 99), st.floats(0.0, 1.0))
def test_what_is_held_back_is_never_trained_on(seed: int, share: float) -> None:
    made = pool(seed=seed, held_back_share=share)
    for row in range(30):
        made.add(of_size(row, 1))
    held = {each.key.row for each in made.held_back}
    assert held == {row for row in range(30) if made.is_held_back(RowKey(0, row, 0))}
    assert made.num_added == 30 - len(held)
    trained = {each.key.row for number in range(20) for each in made.batch(number, 10)}
    assert trained.isdisjoint(held)
    for row in range(30):
        assert made.is_held_back(RowKey(0, row, 0)) == made.is_held_back(RowKey(0, row, 5))


def test_the_share_that_is_held_back_is_met() -> None:
    made = pool(held_back_share=0.1)
    held = sum(made.is_held_back(RowKey(2, row, 0)) for row in range(5000))
    assert 420 < held < 580


def test_the_newest_of_those_held_back_are_kept() -> None:
    made = pool(held_back_share=1.0, held_back_bytes=5)
    for row in range(20):
        made.add(of_size(row, 1))
    assert [each.key.row for each in made.held_back] == [15, 16, 17, 18, 19]


def test_seeds_are_those_of_every_machine() -> None:
    assert seed_of(0, "order", 1) == 4004135407344543170
    assert all(0.0 <= share_of(number) < 1.0 for number in range(100))
