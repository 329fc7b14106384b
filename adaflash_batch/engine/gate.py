"""Whether drafting pays at the moment: told by what steps with and without drafts have taken.

A step with drafts takes longer than one without and emits τ tokens a request instead of one, so it
pays while τ times the seconds of a plain step is more than the seconds of a step with drafts. What
they take depends on how many requests run, so it is kept for each power of two of them.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

# Steps that a median is taken of, and the fewest that say something.
_REMEMBERED = 15
_ENOUGH = 5
# Requests' steps with drafts that say something of τ, and those that it looks back on.
_ENOUGH_DRAFTED = 32
_SPAN = 500.0
# What does not pay is tried again after so many steps, twice as many each time, up to the most; and
# never so soon that the trial would cost more than this share of them.
_FIRST_PAUSE = 128
_MOST_PAUSE = 2048
_TRIAL_SHARE = 0.02
# The way changes only for a difference above noise.
_MARGIN = 1.02


def _last_seconds() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


@dataclass(slots=True)
class _Load:
    """What is known for one number of running requests.

    Attributes:
        plain, drafting: seconds of the last steps of either kind.
        is_on: whether drafting paid when that was last asked.
        pause: steps between two trials of the other way.
        age: steps since the last one.
        trial: steps of the other way that are still to come.
    """

    plain: deque[float] = field(default_factory=_last_seconds)
    drafting: deque[float] = field(default_factory=_last_seconds)
    is_on: bool = True
    pause: int = _FIRST_PAUSE
    age: int = 0
    trial: int = 0

    def price(self) -> float | None:
        """What a step with drafts takes of one without; None while that is not known."""
        if min(len(self.plain), len(self.drafting)) < _ENOUGH:
            return None
        plain = statistics.median(self.plain)
        return statistics.median(self.drafting) / plain if plain > 0.0 else None


class SpeculationGate:
    """Says before every step whether to draft. It counts steps and reads no clock.

    Attributes:
        emitted: τ of late, what a request's step with drafts emits; 1 before the first.
        num_closed: steps that it kept from drafting.
    """

    def __init__(self) -> None:
        self.emitted = 1.0
        self.num_closed = 0
        self._weight = 0.0  # of the steps behind `emitted`
        self._loads: dict[int, _Load] = {}
        self._load = _Load()

    def opens(self, running: int) -> bool:
        """Whether the next step drafts, with so many requests in it."""
        self._load = load = self._loads.setdefault(running.bit_length(), _Load())
        is_open = self._next(load, running)
        self.num_closed += not is_open
        return is_open

    def _next(self, load: _Load, running: int) -> bool:
        if len(load.drafting) < _ENOUGH or self._weight < _ENOUGH_DRAFTED:
            return True
        if len(load.plain) < _ENOUGH:
            return False
        if load.trial:
            return not load.is_on
        load.age += 1
        # A trial without drafts tells seconds; one with drafts tells τ too, by every request.
        trial = _ENOUGH if load.is_on else max(_ENOUGH, _ENOUGH_DRAFTED // max(running, 1))
        if load.age < max(load.pause, trial * self._loss(load) / _TRIAL_SHARE):
            return load.is_on
        load.age, load.trial = 0, trial
        return not load.is_on

    def _loss(self, load: _Load) -> float:
        """What a step of the other way would take more, as a share of one of this way."""
        ratio = (load.price() or 1.0) / self.emitted
        return max(1.0 / ratio if load.is_on else ratio, 1.0) - 1.0

    def observe(self, seconds: float, *, drafted: bool) -> None:
        """Take in what the step that was asked for last took; prefill is not to be in it."""
        load = self._load
        (load.drafting if drafted else load.plain).append(seconds)
        if load.trial and drafted != load.is_on:
            load.trial -= 1
            if load.trial == 0 and not self._judge(load):
                load.pause = min(2 * load.pause, _MOST_PAUSE)
        elif not load.trial:
            self._judge(load)

    def count(self, steps: int, accepted: int) -> None:
        """Take in what requests accepted in a step with drafts.

        Args:
            steps: requests that drafted.
            accepted: tokens of their drafts, together.
        """
        if steps:
            kept = self._weight * max(1.0 - steps / _SPAN, 0.0)
            self._weight = kept + steps
            self.emitted = (self.emitted * kept + steps + accepted) / self._weight

    def expect_change(self) -> None:
        """The drafter has other weights: τ so far says less, and what did not pay is tried soon."""
        self._weight = min(self._weight, float(_ENOUGH_DRAFTED))
        for load in self._loads.values():
            load.pause = _FIRST_PAUSE

    @property
    def price(self) -> float | None:
        """What a step with drafts takes of one without, at the present load; None if not known."""
        return self._load.price()

    def _judge(self, load: _Load) -> bool:
        """Whether another way is taken from now on."""
        price = load.price()
        if price is None or self._weight < _ENOUGH_DRAFTED:
            return False
        was_on = load.is_on
        load.is_on = self.emitted / price > (1.0 / _MARGIN if was_on else _MARGIN)
        if load.is_on != was_on:
            load.pause, load.age = _FIRST_PAUSE, 0
        return load.is_on != was_on
