"""What a round of learning came to, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What came of a round.

    Attributes:
        number: of the round, from 1.
        updates: that changed something.
        seconds: that its work took.
        loss: mean over its updates; NaN without any.
        clip_rate: share of the vocabulary entries of supervised positions that were clipped.
        tau_before: τ of the served weights on held-back texts; None where it did not come to that.
        tau_after: τ of the round's weights on the same.
        version: that is served now.
        fault: why it was not published; None where it was.
        is_kept: whether its weights are trained on all the same, instead of being taken back.
        tau_first: τ of the weights that were served at first, on the same.
    """

    number: int
    updates: int
    seconds: float
    loss: float
    clip_rate: float
    tau_before: float | None
    tau_after: float | None
    version: int
    fault: str | None
    is_kept: bool = False
    tau_first: float | None = None

    @property
    def gained(self) -> float | None:
        """τ of what is served now, over that of what was served at first, on the same texts."""
        now = self.tau_after if self.fault is None else self.tau_before
        return None if now is None or self.tau_first is None else now / self.tau_first

    @property
    def gain(self) -> float:
        """What it added to τ of what is served, as a share of it."""
        if self.fault is not None or self.tau_before is None or self.tau_after is None:
            return 0.0
        return self.tau_after / self.tau_before - 1.0

    def describe(self) -> str:
        """One line."""
        parts = [f"learning, round {self.number}: {self.updates} updates in {self.seconds:.1f} s"]
        if self.updates:
            parts.append(f"loss {self.loss:.3f}")
        if self.clip_rate:
            parts.append(f"{self.clip_rate:.2%} clipped")
        if self.tau_before is not None and self.tau_after is not None:
            parts.append(f"τ {self.tau_before:.3f} -> {self.tau_after:.3f} on held-back rows")
        return ", ".join(parts) + f": {self._outcome()}"

    def _outcome(self) -> str:
        if self.fault is None:
            return f"published as version {self.version}"
        if self.is_kept:
            return f"{self.fault} yet, version {self.version} goes on drafting"
        return f"{self.fault}, back to version {self.version}"
