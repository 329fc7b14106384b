"""Counters add up, and their ratios never exceed what they can."""

from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.stats import SpeculationCounts


@st.composite
def step(draw: st.DrawFn) -> tuple[int, int, int]:
    drafted = draw(st.integers(0, 16))
    verified = draw(st.integers(0, drafted))
    return drafted, verified, draw(st.integers(0, verified))


def count(steps: list[tuple[int, int, int]]) -> SpeculationCounts:
    counts = SpeculationCounts()
    for drafted, verified, accepted in steps:
        counts.record(drafted, verified, accepted)
    return counts


@given(st.lists(step()))
def test_histogram_agrees_with_the_counters(steps: list[tuple[int, int, int]]) -> None:
    counts = count(steps)
    hist = counts.accepted_hist
    assert sum(hist) == counts.steps == len(steps)
    assert sum(length * number for length, number in enumerate(hist)) == counts.accepted
    assert counts.accepted <= counts.verified <= counts.drafted
    assert not hist or hist[-1] > 0


@given(st.lists(step()))
def test_ratios_are_bounded(steps: list[tuple[int, int, int]]) -> None:
    counts = count(steps)
    rate, emitted = counts.acceptance_rate, counts.emitted_per_step
    assert (rate is None) == (counts.verified == 0)
    assert (emitted is None) == (not steps)
    assert rate is None or 0 <= rate <= 1
    assert emitted is None or 1 <= emitted <= 17


@given(st.lists(step()), st.lists(step()))
def test_adding_is_counting_on(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]]
) -> None:
    added, other = count(first), count(second)
    added.add(other)
    assert added == count(first + second)
    assert other == count(second)


def test_first_and_last_drafter_of_several() -> None:
    total = SpeculationCounts()
    total.add(SpeculationCounts())
    assert (total.drafter_first, total.drafter_last) == (None, None)
    total.add(SpeculationCounts(drafter_first=0, drafter_last=2))
    total.add(SpeculationCounts(drafter_first=2, drafter_last=5))
    total.add(SpeculationCounts())
    assert (total.drafter_first, total.drafter_last) == (0, 5)


def test_bonus_token_is_not_accepted_but_emitted() -> None:
    counts = count([(7, 7, 7), (7, 3, 0), (0, 0, 0)])
    assert counts.acceptance_rate == 7 / 10
    assert counts.emitted_per_step == 10 / 3
    assert counts.emitted_per_drafting_step == 9 / 2
