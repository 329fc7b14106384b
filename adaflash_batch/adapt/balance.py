"""What a job has ahead, and what learning has cost and brought it: seconds of its time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is ahead of a job.

    Attributes:
        tokens: yet to generate.
        seconds_per_token: what decoding has taken of late for one of them, all requests together,
            without learning.
        tau: tokens that a request's step with drafts emits.
        step_price: what a step with drafts takes of one without; None where that is not known.
            While `tau` is below it nothing is drafted.
        share: of the time of decoding that is not prefill, which no drafts shorten.
    """

    tokens: float
    seconds_per_token: float
    tau: float = 1.0
    step_price: float | None = None
    share: float = 1.0

    @property
    def seconds(self) -> float:
        """That decoding will take as things are."""
        return self.tokens * self.seconds_per_token

    @property
    def is_drafting(self) -> bool:
        """Whether drafting pays as things are."""
        return self.step_price is None or self.tau > self.step_price

    def saving(self, gain: float) -> float:
        """Share of the time that a τ higher by this share of itself saves."""
        return 1.0 - self._time(self.tau * (1.0 + gain)) / self._time(self.tau)

    def spared(self, gained: float) -> float:
        """What every second would take longer with a τ so many times lower."""
        return self._time(self.tau / gained) / self._time(self.tau) - 1.0

    def _time(self, tau: float) -> float:
        """Of a token, over that of one without drafts where it is known what they cost."""
        return 1.0 / tau if self.step_price is None else min(self.step_price / tau, 1.0)


class Balance:
    """Learning's account.

    Attributes:
        spent: seconds of learning.
        brought: seconds that the job has been spared by what was learnt.
        gained: τ with what was learnt, over τ without, by held-back texts.
        decoded: seconds of decoding so far.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self.brought = 0.0
        self.gained = 1.0
        self.decoded = 0.0
        self._then: float | None = None
        self._spent_then = 0.0

    def pass_time(self, now: float, ahead: Outlook) -> None:
        """Note how late it is; what is not learning is decoding."""
        if self._then is not None:
            decoded = max(now - self._then - (self.spent - self._spent_then), 0.0)
            self.decoded += decoded
            self.brought += decoded * ahead.share * ahead.spared(self.gained)
        self._then, self._spent_then = now, self.spent

    def debt(self, ahead: Outlook, trust: float) -> float:
        """Seconds that the job will have lost by learning if it ends now.

        Args:
            ahead: of the job.
            trust: share of what the gain so far promises for the time ahead that is counted.
        """
        return self.spent - self.brought - trust * ahead.seconds * ahead.spared(self.gained)
