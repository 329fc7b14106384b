"""What a step would take with drafts added, and what steps with drafts took of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.scheduler import Scheduled
from adaflash_batch.engine.widths import Floats, Integers, Widths, choose_widths

Seconds = Callable[[Integers], Floats]
"""Of a step, by the tokens that are verified in it."""

# Requests' steps that the mean of emitted tokens looks back on.
_SPAN = 500.0
# Share that the means of seconds keep of themselves in a step, and steps without drafts after
# which they say nothing of the present.
_KEPT = 0.95
_STALE = 64
# Steps with drafts before they are judged, the most that one counts as, and steps without after
# they were found to lose, at first and at most.
_FEWEST_STEPS, _MOST_PRICE = 24, 4.0
_FIRST_BAR, _LONGEST_BAR = 64, 1024
# Blocks that foresight is based on, the fewest, and the steps that it holds for.
_FORESEEN_BLOCKS, _FEWEST_BLOCKS, _FORESEEN_STEPS = 64, 16, 16


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes before any draft is added.

    Attributes:
        tokens: that go through the layers, prompts included.
        rows: of logits.
        keys: that all tokens together attend to.
        running: requests.
        decoding: those of them whose texts are extended.
        decoding_keys: that their anchors attend to.
    """

    tokens: int
    rows: int
    keys: int
    running: int
    decoding: int = 0
    decoding_keys: int = 0


def load_without_drafts(decoding: Sequence[Scheduled], num_prefilled: int) -> Load:
    """Of a step that extends these texts and takes in so many tokens of prompts."""
    keys = sum(each.sequence.known for each in decoding)
    return Load(
        tokens=len(decoding) + num_prefilled,
        rows=len(decoding),
        keys=keys + num_prefilled * num_prefilled // 2,
        running=len(decoding),
        decoding=len(decoding),
        decoding_keys=keys,
    )


class StepPrices:
    """What a step would take with drafts added to its load."""

    def __init__(self, cost: StepCost, load: Load) -> None:
        self.load, self._cost = load, cost
        self._rest_s = cost.rest_at(load.running)
        # A draft attends to about what its request's anchor does.
        self._keys = load.decoding_keys / max(load.decoding, 1)

    @cached_property
    def plain_s(self) -> float:
        """Seconds without drafts."""
        return float(self.seconds(0)(np.zeros(1, dtype=np.int64))[0])

    def seconds(self, num_blocks: int) -> Seconds:
        """Seconds of the step with this many blocks drafted, by the tokens verified behind."""
        load, cost = self.load, self._cost
        other = self._rest_s + cost.draft_at(num_blocks)
        return lambda more: (
            cost.target(load.tokens + more, load.rows + more, load.keys + more * self._keys) + other
        )

    def of_token(self, chosen: Widths, num_blocks: int) -> float:
        """Tokens emitted that one more verified token costs."""
        num_verified, span = sum(chosen.widths), max(self.load.decoding, 4)
        now, then = self.seconds(num_blocks)(np.array([num_verified, num_verified + span]))
        return float((then - now) / span * chosen.emitted / now)


class Pace:
    """Steps with drafts of late: what they emit, and what they take.

    Attributes:
        emitted: by a request in such a step (τ); 1 before the first.
    """

    def __init__(self) -> None:
        self.emitted = 1.0
        self._weight = 0.0
        self._seconds = self._plain_s = 0.0
        self._age = 0

    @property
    def is_fresh(self) -> bool:
        """Whether there was one lately."""
        return self._weight > 0.0 and self._age < _STALE

    @property
    def price(self) -> float | None:
        """What one takes of one without drafts."""
        return self._seconds / self._plain_s if self._plain_s > 0.0 else None

    def note_seconds(self, seconds: float, plain_s: float) -> None:
        """Of a step with drafts, and what it would have taken without."""
        self._seconds = self._seconds * _KEPT + seconds
        self._plain_s = self._plain_s * _KEPT + plain_s

    def note_step(self, num_requests: int, num_accepted: int) -> None:
        """A step is over in which so many requests verified drafts."""
        if not num_requests:
            self._age += 1
            return
        self._age = 0
        kept = self._weight * max(1.0 - num_requests / _SPAN, 0.0)
        self._weight = kept + num_requests
        self.emitted = (self.emitted * kept + num_requests + num_accepted) / self._weight


class Ledger:
    """What steps with drafts brought over steps without: not what was promised, what came.

    Promises rest on curves and on chances, and whoever takes the best of many takes errors with it.
    Where less comes than plain decoding brings, nothing is verified for a while, each time longer.
    """

    def __init__(self) -> None:
        self._emitted = self._plain = self._weight = 0.0
        self._num_steps = 0
        self._left, self._next = 0, _FIRST_BAR

    def note(self, decoding: int, emitted: int, seconds: float, plain_s: float) -> None:
        """A step with drafts is over.

        Args:
            decoding: requests whose texts it extended.
            emitted: tokens that it added to them.
            seconds: that it took.
            plain_s: what it would have taken without drafts.
        """
        if plain_s <= 0.0:
            return
        kept = max(1.0 - decoding / _SPAN, _KEPT)
        # A machine that is busy for a moment says nothing of drafts.
        plain = decoding * min(seconds / plain_s, _MOST_PRICE)
        self._emitted = self._emitted * kept + emitted
        self._plain = self._plain * kept + plain
        self._weight = self._weight * kept + decoding
        self._num_steps += 1
        if self._num_steps >= _FEWEST_STEPS and self._weight >= _SPAN / 2:
            self._judge()

    def _judge(self) -> None:
        if self._emitted >= self._plain:
            self._next = _FIRST_BAR
            return
        self._left, self._next = self._next, min(2 * self._next, _LONGEST_BAR)
        self._emitted = self._plain = self._weight = 0.0
        self._num_steps = 0

    def bars(self) -> bool:
        """Whether nothing is to be verified in the next step; asked once for each."""
        self._left = max(self._left - 1, 0)
        return self._left > 0


class Foresight:
    """What drafting for all would come to, with widths that a head chooses block by block.

    A head tells good blocks from bad ones, so that a batch of them is worth more than their mean.
    """

    def __init__(self) -> None:
        self._blocks: deque[list[float]] = deque(maxlen=_FORESEEN_BLOCKS)
        self._gain, self._running, self._age = 0.0, 0, 0

    def add(self, survival: list[float]) -> None:
        """A block was drafted whose survival is this."""
        self._blocks.append(survival)

    def speed(self, running: int, prices: StepPrices) -> float:
        """Expected tokens a second with blocks like those of late for so many requests.

        0 while too few were seen. What it gains over plain decoding is worked out anew every few
        steps; its speed follows the machine's in between.
        """
        self._age += 1
        if running != self._running or self._age >= _FORESEEN_STEPS:
            self._running, self._age = running, 0
            self._gain = self._work_out(running, prices) * prices.plain_s / running
        return self._gain * running / prices.plain_s

    def _work_out(self, running: int, prices: StepPrices) -> float:
        blocks = list(self._blocks)
        if len(blocks) < _FEWEST_BLOCKS:
            return 0.0
        seconds = prices.seconds(running)
        batches = max(_FEWEST_BLOCKS // running, 1)
        steps = [
            choose_widths([blocks[(first + i) % len(blocks)] for i in range(running)], seconds)
            for first in range(0, batches * running, running)
        ]
        return sum(step.emitted for step in steps) / sum(step.seconds for step in steps)
