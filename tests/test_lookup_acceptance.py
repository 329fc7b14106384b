"""Predicted survival of lookup proposals, on streams whose truth is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.engine.lookup_acceptance import LookupAcceptance, Proposal, Source

K = 7


def proposal(length: int = 3, source: Source = "job", support: int = 0, size: int = K) -> Proposal:
    return Proposal(list(range(size)), length, source, support)


def accepted_of(chance: random.Random, hazards: list[float]) -> int:
    """How far a proposal is right."""
    return next((i for i, hazard in enumerate(hazards) if chance.random() < hazard), len(hazards))


def survival_of(hazards: list[float]) -> list[float]:
    alive, found = 1.0, []
    for hazard in hazards:
        alive *= 1.0 - hazard
        found.append(alive)
    return found


OBSERVED = st.tuples(
    st.integers(1, 30),
    st.sampled_from(["own", "job"]),
    st.integers(0, 3),
    st.integers(0, 12),
    st.integers(0, 12),
)


@given(observations=st.lists(OBSERVED, max_size=60), asked=OBSERVED)
def test_survival_never_rises_and_is_a_probability(
    observations: list[tuple[int, Source, int, int, int]],
    asked: tuple[int, Source, int, int, int],
) -> None:
    acceptance = LookupAcceptance()
    for length, source, support, accepted, known in observations:
        seen = proposal(length, source, support, size=12)
        acceptance.observe(seen, min(accepted, known), known)
    wanted = proposal(*asked[:3], size=12)
    survival = acceptance.survival(wanted)
    assert len(survival) == 12
    assert all(0.0 < value < 1.0 for value in survival)
    assert survival == sorted(survival, reverse=True)
    assert acceptance.expected(wanted) == pytest.approx(sum(survival))


def test_predictions_become_calibrated_in_every_bucket() -> None:
    chance, acceptance = random.Random(5), LookupAcceptance()
    starts: list[tuple[Source, float]] = [("own", 0.5), ("job", 0.8)]
    truths = {
        (source, length, support): [first, *[later] * (K - 1)]
        for source, start in starts
        for length, better in ((2, 1.0), (4, 0.7), (12, 0.3))
        for support, factor in ((0, 1.0), (3, 0.5))
        for first, later in [(start * better * factor, 0.4 * better)]
    }
    for _ in range(20_000):
        source, length, support = chance.choice([*truths])
        hazards = truths[source, length, support]
        acceptance.observe(proposal(length, source, support), accepted_of(chance, hazards), K)
    for (source, length, support), hazards in truths.items():
        found = acceptance.survival(proposal(length, source, support))
        assert found == pytest.approx(survival_of(hazards), abs=0.06)


def test_the_end_of_a_text_is_no_miss() -> None:
    """Of proposals that were right as far as the text went nothing is held against the rest."""
    chance, hazards = random.Random(2), [0.3] * K
    acceptance, seen = LookupAcceptance(), proposal()
    for _ in range(6000):
        known = chance.randrange(K + 1)
        acceptance.observe(seen, min(accepted_of(chance, hazards), known), known)
    assert acceptance.survival(seen) == pytest.approx(survival_of(hazards), abs=0.05)


def test_an_observation_of_nothing_changes_nothing() -> None:
    acceptance = LookupAcceptance()
    acceptance.observe(proposal(), 1, 4)
    before = acceptance.survival(proposal())
    acceptance.observe(proposal(), 0, 0)
    assert acceptance.survival(proposal()) == before


def test_a_bucket_without_history_takes_after_its_source() -> None:
    acceptance = LookupAcceptance()
    untaught = acceptance.survival(proposal(length=8))[0]
    for _ in range(300):
        acceptance.observe(proposal(length=3, support=1), K, K)
    assert acceptance.survival(proposal(length=3, support=2))[0] > 0.9
    assert acceptance.survival(proposal(length=8))[0] > 0.9 > untaught
    assert acceptance.survival(proposal(length=8, source="own"))[0] < 0.9


def test_a_support_without_history_takes_after_its_length() -> None:
    acceptance = LookupAcceptance()
    for _ in range(300):
        acceptance.observe(proposal(length=3, support=1), K, K)
        acceptance.observe(proposal(length=12, support=1), 0, K)
    assert acceptance.survival(proposal(length=3, support=2))[0] > 0.9
    assert acceptance.survival(proposal(length=12, support=2))[0] < 0.1


def test_what_changes_is_noticed() -> None:
    acceptance = LookupAcceptance()
    for _ in range(20_000):
        acceptance.observe(proposal(), K, K)
    for _ in range(4000):
        acceptance.observe(proposal(), 0, K)
    assert acceptance.survival(proposal())[0] < 0.05


def test_a_prediction_that_is_handed_out_is_the_callers() -> None:
    acceptance = LookupAcceptance()
    first = acceptance.survival(proposal())
    first[0] = 0.0
    assert acceptance.survival(proposal())[0] > 0.0
