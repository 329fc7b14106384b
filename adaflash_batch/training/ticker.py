"""Lines about progress, a few seconds apart."""

from __future__ import annotations

import time
from collections.abc import Callable

from adaflash_batch.adapt.pretrain import TrainingProgress
from adaflash_batch.report.live import FIRST_LINE_S, LINE_EVERY_S, duration


class Ticker:
    """Lets a line through every ten seconds."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._next = time.monotonic() + FIRST_LINE_S
        self._first: tuple[int, int, float] | None = None

    def say(self, line: Callable[[], str]) -> None:
        """Tell it, if it is time; only then it is made."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            self._notify(line())

    def left(self, progress: TrainingProgress) -> str:
        """Time to the end of the round, at the pace since this process began it."""
        first = self._first
        if first is None or first[0] != progress.round:
            first = self._first = (progress.round, progress.step, progress.elapsed_s)
        done = progress.step - first[1]
        if not done:
            return "unknown yet"
        pace = (progress.elapsed_s - first[2]) / done
        return duration(pace * (progress.num_steps - progress.step))
