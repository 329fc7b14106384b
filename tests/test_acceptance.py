"""What drafts of late were worth: learnt from blocks whose chances are known."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.engine.acceptance import AcceptanceHistory, RequestRecord
from adaflash_batch.stats import Calibration

CHANCES = [0.8, 0.7, 0.65, 0.6, 0.6, 0.5, 0.5]


def survival_of(chances: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(chances, lambda a, b: a * b))


def accepted_of(chances: Sequence[float], generator: random.Random) -> int:
    """A block's right drafts, none of them cut off by the text's end."""
    right = itertools.takewhile(lambda chance: generator.random() < chance, chances)
    return sum(1 for _ in right)


def feed(
    history: AcceptanceHistory,
    chances: Sequence[float],
    blocks: int,
    *,
    record: RequestRecord | None = None,
    seed: int = 0,
) -> None:
    generator = random.Random(seed)
    for _ in range(blocks):
        history.observe(record, accepted_of(chances, generator), len(chances))


def taught(chances: Sequence[float], blocks: int = 3000) -> AcceptanceHistory:
    history = AcceptanceHistory(len(chances))
    feed(history, chances, blocks)
    return history


@pytest.mark.parametrize("shortest", [7, 3, 0])
def test_the_curve_is_right_wherever_texts_end(shortest: int) -> None:
    history, generator = AcceptanceHistory(7), random.Random(1)
    for _ in range(20000):
        known = generator.randint(shortest, 7)
        history.observe(None, min(accepted_of(CHANCES, generator), known), known)
    assert history.survival() == pytest.approx(survival_of(CHANCES), abs=0.05)
    assert history.tau == pytest.approx(1 + sum(survival_of(CHANCES)), abs=0.12)


def test_drafting_is_tried_before_anything_is_known() -> None:
    assert AcceptanceHistory(7).tau > 4.0
    assert AcceptanceHistory(7).survival() == pytest.approx([0.9 ** (i + 1) for i in range(7)])


def test_a_drafter_that_is_never_right_is_found_out_in_a_few_blocks() -> None:
    assert taught([0.0] * 7, 30).tau < 1.15
    assert taught([0.0] * 7, 300).tau < 1.02


def test_nothing_is_learnt_where_nothing_is_known() -> None:
    history, record = AcceptanceHistory(7), RequestRecord()
    history.observe(record, 0, 0)
    assert history.survival() == AcceptanceHistory(7).survival()
    assert record == RequestRecord()


def test_a_text_that_ends_within_a_block_rejects_none_of_it() -> None:
    history = AcceptanceHistory(4)
    for _ in range(500):
        history.observe(None, 2, 2)
    assert history.survival()[1] > 0.99
    assert history.survival()[3] > 0.98  # by the place before, nothing speaks against it


def test_what_is_long_past_is_forgotten() -> None:
    history = taught([0.9] * 7)
    feed(history, [0.3] * 7, 4000, seed=1)
    assert history.survival(num_drafts=2) == pytest.approx([0.3, 0.09], abs=0.05)


def test_new_weights_are_judged_by_what_they_do() -> None:
    told, untold = taught([0.1] * 7), taught([0.1] * 7)
    before = told.tau
    told.expect_change()
    assert told.tau > before + 0.2  # worth another try
    for history in (told, untold):
        feed(history, [0.8] * 7, 60, seed=1)
    assert told.survival()[0] == pytest.approx(0.8, abs=0.12)
    assert untold.survival()[0] < 0.3


def test_a_request_that_was_not_seen_is_like_all_others() -> None:
    history = taught(CHANCES)
    assert history.survival(RequestRecord()) == history.survival()


@pytest.mark.parametrize(("own", "seed"), [(0.9, 1), (0.5, 2), (0.2, 3)])
def test_a_request_is_drawn_from_the_shared_curve_to_its_own(own: float, seed: int) -> None:
    history, record = taught([0.7] * 7), RequestRecord()
    distances = []
    for blocks in (0, 4, 60):
        feed(history, [own] * 7, blocks, record=record, seed=seed)
        distances.append(abs(history.survival(record)[0] - own))
    assert distances[0] > distances[1] > distances[2]
    assert distances[1] > 0.25 * distances[0]  # a few blocks alone are not believed
    assert distances[2] < 0.07


def test_records_foretell_the_blocks_of_their_requests() -> None:
    history, generator = AcceptanceHistory(7), random.Random(3)
    with_record = without = 0.0
    for request in range(300):
        record, chances = RequestRecord(), [generator.choice([0.9, 0.4])] * 7
        truth = sum(survival_of(chances))
        for _ in range(20):
            if request >= 100:
                with_record += (sum(history.survival(record)) - truth) ** 2
                without += (sum(history.survival()) - truth) ** 2
            history.observe(record, accepted_of(chances, generator), 7)
    assert with_record < 0.6 * without


BLOCKS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()).map(
        lambda block: (min(block[:2]), max(block[:2]), block[2])
    ),
    max_size=60,
)


@given(BLOCKS, st.integers(1, 7))
def test_survival_falls_from_one_to_zero_whatever_was_seen(
    blocks: list[tuple[int, int, bool]], num_drafts: int
) -> None:
    history, record = AcceptanceHistory(num_drafts), RequestRecord()
    for accepted, known, changes in blocks:
        history.observe(record, accepted, known)
        if changes:
            history.expect_change()
    for survival in (history.survival(), history.survival(record)):
        assert len(survival) == num_drafts
        assert all(1.0 >= a >= b >= 0.0 for a, b in itertools.pairwise([1.0, *survival]))
        assert history.survival(num_drafts=2) == history.survival()[:2]
    assert record.passed <= record.tries + 1e-9


def test_what_comes_true_as_often_as_predicted_is_calibrated() -> None:
    calibration, generator = Calibration(), random.Random(4)
    for _ in range(20000):
        chance = generator.random()
        calibration.observe(chance, generator.random() < chance)
    assert calibration.ece is not None
    assert calibration.ece < 0.02
    for point in calibration.curve():
        assert point["happened"] == pytest.approx(point["predicted"], abs=0.05)


def test_what_is_promised_too_often_is_told() -> None:
    calibration = Calibration()
    assert calibration.ece is None
    for turn in range(100):
        calibration.observe(0.85, turn % 2 == 0)
        calibration.observe(0.0, False)
        calibration.observe(1.0, True)
    assert calibration.ece == pytest.approx(0.35 / 3)
    expected = [(0.0, 0.0, 100), (0.85, 0.5, 100), (1.0, 1.0, 100)]
    assert json.loads(json.dumps(calibration.curve())) == [
        {"predicted": pytest.approx(predicted), "happened": happened, "count": count}
        for predicted, happened, count in expected
    ]


def test_places_behind_the_texts_end_are_no_predictions_that_failed() -> None:
    history, generator, calibration = taught(CHANCES, 8000), random.Random(5), Calibration()
    for _ in range(5000):
        known = generator.randint(0, 7)
        accepted = min(accepted_of(CHANCES, generator), known)
        calibration.observe_block(history.survival(), accepted, known)
    assert calibration.ece is not None
    assert calibration.ece < 0.03
    assert sum(calibration.counts) < 5000 * 7


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans())), st.data())
def test_counts_added_up_are_those_of_all(pairs: list[tuple[float, bool]], data: Any) -> None:
    cut = data.draw(st.integers(0, len(pairs)))
    parts = [Calibration(), Calibration()]
    whole = Calibration()
    for place, pair in enumerate(pairs):
        parts[place >= cut].observe(*pair)
        whole.observe(*pair)
    parts[0].add(parts[1])
    assert parts[0].counts == whole.counts
    assert parts[0].happened == whole.happened
    assert parts[0].predicted == pytest.approx(whole.predicted)
    assert sum(whole.counts) == len(pairs)
