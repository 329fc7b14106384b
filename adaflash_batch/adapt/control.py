"""When to learn: only while it pays, and never for more than its share of the time.

A job knows how much is left of it. What learning has cost and gained so far is measured, so before
every piece of work these questions are asked:

    stop     is what one more round would save over the tokens that are left below its price?
    risk     has learning cost so much more than it has brought that the job would be the slower
             for it if nothing more came of it?
    share    has learning had its share of the time already?
    restart  learning has stopped: has acceptance fallen behind its own long average since?

(TIDE, arXiv 2602.05145, stops after a round that gained nothing and starts again by two averages.)
No clock is read here: time comes in as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from adaflash_batch.adapt.balance import Balance, Outlook
from adaflash_batch.stats import SpeculationCounts

Aim = Literal["fastest", "even", "most"]


class Verdict(NamedTuple):
    """Whether to go on learning now.

    kind: `learn`; `wait`, since the share of the time is used up; `stop`, since it does not pay.
    reason: why, in words.
    """

    kind: Literal["learn", "wait", "stop"]
    reason: str


class Allowance:
    """Seconds that may be spent: a share of the time that passes.

    Spending may begin while something is left, and may then take more; that is owed. So over any
    stretch of time t no more is spent than share * t + most_saved + the longest single piece, and
    from the beginning on no more than share * t + the last piece.

    Args:
        share: from 0 to 1.
        most_saved: seconds of allowance that are kept where they are not used.
    """

    def __init__(self, share: float, most_saved: float) -> None:
        assert 0.0 <= share <= 1.0
        self._share, self._most_saved = share, most_saved
        self._left = 0.0
        self._now: float | None = None

    def is_left(self, now: float) -> bool:
        """Whether something may be spent."""
        if self._now is not None:
            earned = self._share * max(now - self._now, 0.0)
            self._left = min(self._left + earned, self._most_saved)
        self._now = now
        return self._left > 0.0

    def spend(self, seconds: float) -> None:
        """Charge what was spent."""
        self._left -= seconds


@dataclass(slots=True)
class Average:
    """Emitted tokens per step with drafts, over about the last `span` of them.

    Attributes:
        steps: how many, those long past counted less.
        emitted: their tokens, likewise.
    """

    span: float
    steps: float = 0.0
    emitted: float = 0.0

    def add(self, counts: SpeculationCounts) -> None:
        """Count what drafting did for a request."""
        keep = math.exp(-counts.drafting / self.span)
        self.steps = self.steps * keep + counts.drafting
        self.emitted = self.emitted * keep + counts.drafting + counts.accepted

    @property
    def value(self) -> float:
        """The mean; 1 (no draft was accepted) before the first step."""
        return self.emitted / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The constants of a LearningControl.

    Attributes:
        share: of wall time, for learning.
        most_saved: see Allowance, seconds.
        first_gain: what a round is expected to add to τ before any was measured, as a share of it.
        memory: weight of what was expected against what a round has shown, from 0 to 1.
        fall: how far the short average of τ must be below the long one, as a share of it.
        short, long: steps that these averages look back.
        risk: share of the job's whole time that learning may cost beyond what it has brought.
        least_risked: seconds of that, below which nothing is begun: too little would come of it.
        trust: share of what a gain promises for the time ahead that counts as brought already.
        hope: what learning is expected to add to τ in the end while it is too low for drafting to
            pay, as a share of it; the risk bounds what that costs.
        aim: `fastest` learns what pays within the job; `even`, for later jobs, all that the job can
            bear without being the slower for it; `most` looks at the share of the time alone.
    """

    share: float = 0.5
    most_saved: float = 5.0
    first_gain: float = 0.1
    memory: float = 0.7
    fall: float = 0.07
    short: float = 3000.0
    long: float = 30000.0
    risk: float = 0.03
    least_risked: float = 2.0
    trust: float = 0.3
    hope: float = 2.0
    aim: Aim = "fastest"


class LearningControl:
    """Says before every piece of learning whether to go on.

    Attributes:
        is_learning: whether learning has not been stopped.
        expected_gain: what the next round is expected to add to τ, as a share of it.
        balance: what learning has cost and brought.
    """

    def __init__(self, rules: Rules) -> None:
        self.is_learning = True
        self.expected_gain = rules.first_gain
        self._rules = rules
        self._allowance = Allowance(rules.share, rules.most_saved)
        self._price: float | None = None  # seconds of a round
        self._spent = 0.0  # on the round under way
        self._short, self._long = Average(rules.short), Average(rules.long)
        self.balance = Balance()

    def observe(self, counts: SpeculationCounts) -> None:
        """Take in what speculation did for a finished request."""
        self._short.add(counts)
        self._long.add(counts)

    def charge(self, seconds: float) -> None:
        """Take in what a piece of learning took."""
        self._spent += seconds
        self.balance.spent += seconds
        self._allowance.spend(seconds)

    def end_round(self, gain: float, gained: float | None = None) -> None:
        """Take in what the round that was charged for came to.

        Args:
            gain: what it added to τ of what is served, as a share of it; 0 if it was taken back.
            gained: τ of what is served now over that of what was served at first, where it was
                measured; else the gains of all rounds make it up, which is too much: what is
                published was chosen for a gain that is partly chance.
        """
        memory = self._rules.memory
        self.balance.gained = gained or self.balance.gained * (1.0 + gain)
        self.expected_gain = memory * self.expected_gain + (1.0 - memory) * max(gain, 0.0)
        before = self._spent if self._price is None else self._price
        self._price = memory * before + (1.0 - memory) * self._spent
        self._spent = 0.0

    def decide(self, now: float, ahead: Outlook, *, round_done: float = 0.0) -> Verdict:
        """Whether to do the next piece.

        Args:
            now: seconds, on any clock that does not stand still while learning.
            ahead: of the job.
            round_done: share of the round under way that is done.
        """
        is_left = self._allowance.is_left(now)
        self.balance.pass_time(now, ahead)
        price = self._price_left(round_done)
        if self._rules.aim == "fastest":
            verdict = self._worth(ahead, price)
        elif self._rules.aim == "even":
            verdict = self._bearable(ahead, price or 0.0, "learning goes on while the job bears it")
        else:
            verdict = Verdict("learn", "learning goes on for as long as the job does")
        if verdict.kind == "learn" and not is_left:
            return Verdict("wait", f"learning has had {self._rules.share:.0%} of the time")
        return verdict

    def _worth(self, ahead: Outlook, price: float | None) -> Verdict:
        """Whether the round under way, or the next, is worth its price."""
        has_fallen = self.has_fallen
        if not (self.is_learning or has_fallen):
            return Verdict("stop", "learning has stopped")
        # After a fall times have changed: earlier rounds say little about the next one's gain.
        gain = self._rules.first_gain if has_fallen else self.expected_gain
        if not ahead.is_drafting:
            gain = max(gain, self._rules.hope)
        saving = ahead.seconds * ahead.saving(gain)
        terms = _terms(price, saving, ahead.seconds)
        if not saving > (price or 0.0):
            self._stop()
            return Verdict("stop", f"learning has stopped: {terms}")
        self.is_learning = True
        if has_fallen:
            short, long = self._short.value, self._long.value
            terms = f"τ fell to {short:.2f} from {long:.2f}, learning goes on: {terms}"
            self.expected_gain = gain
        return self._bearable(ahead, price or 0.0, terms)

    def _bearable(self, ahead: Outlook, price: float, terms: str) -> Verdict:
        """Whether the job can bear the price should nothing come of it."""
        rules, balance = self._rules, self.balance
        limit = rules.risk * (balance.decoded + ahead.seconds)
        debt = balance.debt(ahead, rules.trust)
        if limit < rules.least_risked and not balance.spent:
            return Verdict("wait", f"the job is too short to learn anything in it: {terms}")
        if debt + price > limit:
            return Verdict(
                "wait", f"learning has cost {debt:.3g} s more than it has brought: {terms}"
            )
        return Verdict("learn", terms)

    def _price_left(self, round_done: float) -> float | None:
        """Seconds to the end of the round; None where nothing was measured: a first piece tells."""
        if self._price is not None:
            return self._price * (1.0 - round_done)
        return self._spent / round_done * (1.0 - round_done) if round_done > 0.0 else None

    @property
    def has_fallen(self) -> bool:
        """Whether acceptance fell while learning had stopped."""
        lowest = self._long.value * (1.0 - self._rules.fall)
        return not self.is_learning and self._is_known and self._short.value < lowest

    def _stop(self) -> None:
        """From here on a fall is one below what is usual now."""
        self.is_learning = False
        if self._is_known:
            # With its full weight: an average of few steps would fall along with the other.
            self._long.steps = self._rules.long
            self._long.emitted = self._rules.long * self._short.value

    @property
    def _is_known(self) -> bool:
        """Whether the short average has seen enough to say something."""
        return self._short.steps >= self._rules.short / 2

    def state(self) -> dict[str, float | None]:
        """What was learnt about learning, for a process that goes on; the allowance begins anew."""
        averages = {"short": self._short, "long": self._long}
        kept = {f"{name}_steps": each.steps for name, each in averages.items()}
        kept |= {f"{name}_emitted": each.emitted for name, each in averages.items()}
        measured = {"expected_gain": self.expected_gain, "price": self._price}
        return {"is_learning": float(self.is_learning), **measured, **kept}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Go on from a `state`."""
        known = {name: value for name, value in state.items() if value is not None}
        self.is_learning = bool(known["is_learning"])
        self.expected_gain, self._price = known["expected_gain"], known.get("price")
        for name, average in (("short", self._short), ("long", self._long)):
            average.steps, average.emitted = known[f"{name}_steps"], known[f"{name}_emitted"]


def _terms(price: float | None, saving: float, ahead: float) -> str:
    saved = f"it would save {saving:.3g} of the {ahead:.3g} s ahead"
    if price is None:
        return f"what a round takes is not known yet, {saved}"
    return f"the round takes {price:.3g} s more, {saved}"
