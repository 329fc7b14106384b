"""When to learn: the share of the time, the stop rule, the restart rule. Nothing here is timed."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.adapt.balance import Balance, Outlook
from adaflash_batch.adapt.control import Allowance, LearningControl, Rules, Verdict
from adaflash_batch.stats import SpeculationCounts

SECONDS = st.floats(0.0, 100.0)
RULES = Rules(share=1.0, most_saved=1e9, short=200.0, long=2000.0, fall=0.1, risk=1e9)


def request(tau: float, steps: int = 20) -> SpeculationCounts:
    return SpeculationCounts(steps=steps, drafting=steps, accepted=round((tau - 1.0) * steps))


@given(
    st.floats(0.0, 1.0),
    st.floats(0.1, 20.0),
    st.lists(st.tuples(SECONDS, st.floats(0.0, 30.0)), min_size=1, max_size=80),
)
def test_no_stretch_of_time_sees_more_than_its_share(
    share: float, most_saved: float, events: list[tuple[float, float]]
) -> None:
    """A spender that never rests, with pieces of any length."""
    allowance, now, spent, points = Allowance(share, most_saved), 0.0, 0.0, [(0.0, 0.0)]
    longest = max(piece for _, piece in events)
    allowance.is_left(now)
    for passed, piece in events:
        now += passed
        if allowance.is_left(now):
            assert spent < share * now + 1e-6, "it began with nothing left"
            points.append((now, spent))
            allowance.spend(piece)
            now, spent = now + piece, spent + piece
            points.append((now, spent))
    for index, (begin, before) in enumerate(points):
        for end, after in points[index:]:
            bound = share * (end - begin) + most_saved + longest
            assert after - before <= bound + 1e-6


def test_all_of_the_share_can_be_had() -> None:
    allowance, now, spent = Allowance(0.25, 5.0), 0.0, 0.0
    for _ in range(4000):
        now += 0.1
        if allowance.is_left(now):
            allowance.spend(0.3)
            now, spent = now + 0.3, spent + 0.3
    assert 0.24 < spent / now < 0.26


def test_what_is_owed_is_paid_back_first_and_little_is_saved() -> None:
    allowance = Allowance(0.5, 2.0)
    assert not allowance.is_left(0.0)
    assert allowance.is_left(1.0)
    allowance.spend(10.5)  # 10 s owed
    assert not allowance.is_left(20.9)
    assert allowance.is_left(21.1)
    assert allowance.is_left(1e6)
    allowance.spend(2.1)  # no more than 2 s were saved
    assert not allowance.is_left(1e6 + 0.1)
    assert not allowance.is_left(0.0), "a clock that is set back gives nothing"


def decide(control: LearningControl, now: float = 1.0, **changes: float) -> Verdict:
    terms = {"tokens_left": 1e5, "seconds_per_token": 0.01}
    terms |= changes
    round_done = terms.pop("round_done", 0.0)
    ahead = Outlook(terms["tokens_left"], terms["seconds_per_token"])
    verdict = control.decide(now, ahead, round_done=round_done)
    assert verdict.reason
    assert not verdict.reason.endswith(".")
    assert control.is_learning == (verdict.kind != "stop")
    return verdict


def ready(rules: Rules = RULES) -> LearningControl:
    """Time has passed, so that something may be spent."""
    control = LearningControl(rules)
    control.decide(0.0, Outlook(1e9, 1.0))
    return control


def measured(gain: float, price: float, rounds: int = 12) -> LearningControl:
    control = ready()
    for _ in range(rounds):
        control.charge(price)
        control.end_round(gain)
    return control


@given(
    st.floats(0.001, 1.0),
    st.floats(0.01, 1000.0),
    st.floats(0.0, 1e6),
    st.floats(1e-4, 1.0),
    st.floats(0.0, 0.99),
)
def test_learning_goes_on_only_while_it_pays(
    gain: float, price: float, tokens_left: float, seconds: float, round_done: float
) -> None:
    control = measured(gain, price, rounds=60)
    kind = decide(
        control,
        now=1e9,
        tokens_left=tokens_left,
        seconds_per_token=seconds,
        round_done=round_done,
    ).kind
    saving = tokens_left * seconds * (1.0 - 1.0 / (1.0 + gain))
    rest = price * (1.0 - round_done)
    if not math.isclose(saving, rest, rel_tol=1e-6):
        assert kind == ("learn" if saving > rest else "stop")


@given(st.floats(0.0, 0.5), st.floats(0.1, 100.0), st.lists(st.floats(0.0, 1e6), min_size=2))
def test_more_that_is_left_never_stops_what_less_would_not(
    gain: float, price: float, tokens: list[float]
) -> None:
    kinds = [
        decide(measured(gain, price), now=1e9, tokens_left=left).kind for left in sorted(tokens)
    ]
    assert all((one, other) != ("learn", "stop") for one, other in pairwise(kinds))


def test_rounds_that_gain_nothing_end_it() -> None:
    """Each of 10 s, with 1000 s ahead: the first expectation is given up after a few."""
    control, num_rounds = ready(), 0
    while decide(control, now=1e6 * (num_rounds + 1)).kind == "learn":
        control.charge(10.0)
        control.end_round(0.0)
        num_rounds += 1
    assert num_rounds == 7
    assert "save" in measured(0.0, 10.0).decide(1e9, Outlook(1.0, 1.0)).reason


def test_a_regression_is_no_more_than_no_gain() -> None:
    one, other = measured(0.0, 1.0), measured(-0.5, 1.0)
    assert one.expected_gain == other.expected_gain > 0.0


def test_the_first_piece_tells_what_a_round_takes() -> None:
    control = ready()
    verdict = decide(control, now=2.0)
    assert (verdict.kind, "not known" in verdict.reason) == ("learn", True)
    control.charge(2.0)
    # A fiftieth took 2 s, so 98 s are to come; 0.1 / 1.1 of the 1000 s ahead is less.
    assert decide(control, now=3.0, round_done=0.02).kind == "stop"
    control = ready()
    control.charge(1.5)
    assert decide(control, now=3.0, round_done=0.02).kind == "learn"


def test_what_was_spent_on_a_round_is_no_reason_to_stop() -> None:
    control = measured(0.02, 30.0)
    assert decide(control, now=1e6, round_done=0.5).kind == "learn"
    assert decide(control, now=1e6, round_done=0.1).kind == "stop"


def test_nothing_left_or_nothing_known_never_learns() -> None:
    assert decide(ready(), tokens_left=0).kind == "stop"
    assert decide(ready(), seconds_per_token=0.0).kind == "stop"
    assert decide(ready(), seconds_per_token=math.nan).kind == "stop"
    assert decide(ready(dataclasses.replace(RULES, share=0.0)), now=1e9).kind == "wait"


def test_the_share_makes_it_wait() -> None:
    control = ready(Rules(share=0.2, most_saved=5.0))
    assert decide(control, now=1.0).kind == "learn"
    control.charge(2.2)  # 0.2 s were left
    verdict = decide(control, now=10.0, round_done=0.5)
    assert (verdict.kind, verdict.reason) == ("wait", "learning has had 20% of the time")
    assert decide(control, now=11.5, round_done=0.5).kind == "learn"


def stopped(tau: float, price: float | None = None) -> LearningControl:
    control = ready() if price is None else measured(0.0, price)
    for _ in range(200):
        control.observe(request(tau))
    assert decide(control, tokens_left=0).kind == "stop"
    return control


def test_a_fall_of_acceptance_starts_it_again() -> None:
    control = stopped(2.0)
    num_requests = 0
    while decide(control, now=1e6).kind == "stop":
        control.observe(request(1.5))
        num_requests += 1
        assert num_requests < 100
    assert 3 < num_requests < 20
    assert control.expected_gain == RULES.first_gain
    control = stopped(2.0)
    for _ in range(num_requests):
        control.observe(request(1.5))
    assert "fell" in decide(control, now=1e6).reason
    assert "fell" not in decide(control, now=1e6).reason, "it is said once"


def test_a_fall_near_the_end_starts_nothing() -> None:
    control = stopped(2.0, price=10.0)
    for _ in range(30):
        control.observe(request(1.5))
    assert decide(control, now=1e6, tokens_left=100).kind == "stop"


@given(st.integers(0, 2**32), st.floats(1.0, 4.0))
@settings(max_examples=20)
def test_what_stays_as_it_was_starts_nothing(seed: int, tau: float) -> None:
    """Requests around one mean, each step by chance."""
    control, dice = stopped(tau), random.Random(seed)
    for _ in range(300):
        accepted = sum(dice.random() < (tau - 1.0) / 4.0 for _ in range(4 * 20))
        control.observe(SpeculationCounts(steps=20, drafting=20, accepted=accepted))
        assert decide(control).kind == "stop"


@given(st.lists(st.floats(1.0, 4.0), max_size=60), st.floats(1.0, 4.0))
@settings(max_examples=30)
def test_a_rise_starts_nothing(taus: list[float], first: float) -> None:
    control = stopped(first)
    for tau in sorted(max(tau, first) for tau in taus):
        control.observe(request(tau))
        assert decide(control).kind == "stop"


def test_one_fall_starts_it_once() -> None:
    """Rounds that gain nothing end it again, though the long average is still high."""
    control = stopped(2.0)
    for _ in range(30):
        control.observe(request(1.5))
    assert decide(control, now=1e6).kind == "learn"
    for _ in range(10):
        control.charge(20.0)
        control.end_round(0.0)
    for _ in range(100):
        control.observe(request(1.5))
        assert decide(control, now=2e6).kind == "stop"


def test_few_steps_say_nothing() -> None:
    control = ready(dataclasses.replace(RULES, fall=0.05))
    decide(control, tokens_left=0)
    control.observe(request(5.0, steps=50))
    control.observe(request(1.0, steps=49))
    assert decide(control).kind == "stop"
    control.observe(request(1.0, steps=49))
    assert decide(control).kind == "learn"


def test_a_restored_control_decides_alike() -> None:
    for control in (measured(0.05, 7.0), stopped(2.0), ready()):
        again = ready()
        again.restore(control.state())
        for tau in (1.8, 1.5, 1.2):
            for _ in range(20):
                control.observe(request(tau))
                again.observe(request(tau))
            for left in (1e6, 1e5, 1e3, 0.0):
                verdict = decide(control, now=1e9, tokens_left=left)
                assert decide(again, now=1e9, tokens_left=left) == verdict


def test_a_job_never_bears_more_than_its_risk() -> None:
    """Rounds that bring nothing: what is spent stays below the share of the whole time."""
    rules = dataclasses.replace(RULES, risk=0.03, least_risked=1.0)
    control, now, spent, left = LearningControl(rules), 0.0, 0.0, 1e5
    while left > 0:
        now, left = now + 1.0, left - 100.0
        ahead = Outlook(left, 0.01)
        while control.decide(now, ahead).kind == "learn":
            control.charge(2.0)
            spent, now = spent + 2.0, now + 2.0
            control.end_round(0.0001 if spent < 10 else 0.2)
            control.balance.gained = 1.0  # a promise that is never kept
    assert 10.0 < spent <= 0.03 * 1000.0 + 1e-6


def test_what_learning_brings_is_spent_again() -> None:
    rules = dataclasses.replace(RULES, risk=0.01, least_risked=1.0)
    control = LearningControl(rules)
    control.charge(9.5)
    control.end_round(0.0)
    ahead = Outlook(1e5, 0.01)
    decide_ahead(control, 0.0, ahead)
    assert decide_ahead(control, 10.0, ahead) == "wait", "10 s may be lost, a round takes 9.5"
    control.balance.gained = 1.25
    assert decide_ahead(control, 20.0, ahead) == "learn", "250 s are saved ahead"
    control.balance.spent = 185.0
    assert decide_ahead(control, 200.0, ahead) == "wait", "a part of that is trusted"


def test_what_was_measured_counts_more_than_what_rounds_promised() -> None:
    control = LearningControl(RULES)
    for _ in range(3):
        control.end_round(0.1)
    assert math.isclose(control.balance.gained, 1.1**3)
    control.end_round(0.1, gained=1.05)
    assert control.balance.gained == 1.05


def test_what_a_job_can_bear_is_learnt_for_later_ones() -> None:
    """Where a round brings nothing more within the job, but earlier ones have brought much."""
    rules = dataclasses.replace(RULES, risk=0.03, aim="even", trust=0.5)
    fastest = LearningControl(dataclasses.replace(rules, aim="fastest"))
    even = LearningControl(rules)
    ahead = Outlook(1000.0, 1.0)
    for control in (fastest, even):
        control.decide(0.0, ahead)
        control.charge(9.5)
        control.end_round(0.25)
        control.expected_gain = 0.0
    assert fastest.decide(20.0, ahead).kind == "stop"
    assert even.decide(20.0, ahead).kind == "learn"
    # 125 s of what is ahead are trusted, and 30 s may be lost.
    even.balance.spent = 140.0
    assert even.decide(30.0, ahead).kind == "learn"
    even.balance.spent = 165.0
    assert even.decide(40.0, ahead).kind == "wait"
    assert even.decide(2000.0, Outlook(10.0, 1.0)).kind == "learn", "what it brought is spent again"


def decide_ahead(control: LearningControl, now: float, ahead: Outlook) -> str:
    control.expected_gain = 0.1
    return control.decide(now, ahead).kind


def test_a_short_job_learns_nothing() -> None:
    control = LearningControl(dataclasses.replace(RULES, risk=0.03, least_risked=2.0))
    control.decide(0.0, Outlook(6600.0, 0.01))
    verdict = control.decide(1.0, Outlook(6500.0, 0.01))
    assert (verdict.kind, "too short" in verdict.reason) == ("wait", True)
    always = LearningControl(dataclasses.replace(RULES, aim="most"))
    assert [always.decide(now, Outlook(0.0, 0.0)).kind for now in (0.0, 1.0)] == ["wait", "learn"]


def test_what_a_gain_saves_depends_on_whether_drafting_pays() -> None:
    assert math.isclose(Outlook(100.0, 1.0).saving(0.25), 0.2)
    assert math.isclose(Outlook(1.0, 1.0, tau=2.0, step_price=1.0).saving(0.25), 0.2)
    off = Outlook(1.0, 1.0, tau=1.5, step_price=3.0)
    assert (off.is_drafting, off.saving(0.5)) == (False, 0.0)
    assert off.saving(3.0) == 0.5, "τ 6 at three times the price: twice as fast as plain"


def test_the_balance_knows_what_was_brought() -> None:
    balance, ahead = Balance(), Outlook(100.0, 1.0)
    balance.pass_time(0.0, ahead)
    balance.spent, balance.gained = 5.0, 1.5
    balance.pass_time(25.0, ahead)
    assert balance.decoded == 20.0
    assert math.isclose(balance.brought, 10.0), "they would have taken 30"
    assert math.isclose(balance.debt(ahead, trust=0.5), 5.0 - 10.0 - 25.0)
    balance.pass_time(45.0, Outlook(100.0, 1.0, share=0.5))
    assert math.isclose(balance.brought, 15.0), "half of these 20 s was prefill"
