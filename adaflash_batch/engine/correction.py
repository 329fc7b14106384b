"""By how much a head's survivals were too high or too low of late, position by position.

A head is trained on texts of a while ago, of other rows and with other weights of the drafter. What
it says ranks drafts well before it hits their level, and the choice of widths needs the level.
"""

from __future__ import annotations

from collections.abc import Sequence

# Blocks looked back on, and those that are taken to have come out as stated before any was seen.
_SPAN = 400.0
_PRIOR = 8.0


class Correction:
    """Scales survivals so that on average they say what happens."""

    def __init__(self) -> None:
        self._stated: list[float] = []
        self._happened: list[float] = []

    def observe(self, stated: Sequence[float], accepted: int) -> None:
        """Take in what became of a block.

        Args:
            stated: its survivals, of the positions that are known.
            accepted: drafts that were right, from the first on.
        """
        missing = len(stated) - len(self._stated)
        if missing > 0:
            self._stated += [0.0] * missing
            self._happened += [0.0] * missing
        keep = 1.0 - 1.0 / _SPAN
        for index, each in enumerate(stated):
            self._stated[index] = self._stated[index] * keep + each
            self._happened[index] = self._happened[index] * keep + (index < accepted)

    def corrected(self, stated: Sequence[float]) -> list[float]:
        """The same survivals at the level of what happened; they never rise along a block."""
        corrected: list[float] = []
        lowest = 1.0
        for index, each in enumerate(stated):
            lowest = min(lowest, each * self._factor(index))
            corrected.append(lowest)
        return corrected

    def expect_change(self) -> None:
        """The head has other weights: what was seen counts as little as a few blocks."""
        for sums in (self._stated, self._happened):
            sums[:] = [each * _PRIOR / _SPAN for each in sums]

    def _factor(self, index: int) -> float:
        if index >= len(self._stated):
            return 1.0
        # The prior blocks were as likely as the mean of those that were seen.
        prior = _PRIOR * max(self._stated[index] / _SPAN, 1.0 / _SPAN)
        return (self._happened[index] + prior) / (self._stated[index] + prior)
