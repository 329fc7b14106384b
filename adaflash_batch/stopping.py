"""Signals that ask a job to stop: at once while nothing is in hand, gently while it decodes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """SIGTERM, SIGINT and SIGUSR1, for as long as it is entered.

    A signal raises KeyboardInterrupt. Within `gently()` the first one only sets `at`; a second one
    raises, and after that a third one kills, as if nobody had asked for signals.

    Args:
        clock: seconds, the one that deadlines are kept by.

    Attributes:
        at: when the first one came, by the clock; None before.
        name: of it, like `SIGTERM`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_gentle = False
        self._before: dict[signal.Signals, Any] = {}
        self.at: float | None = None
        self.name = ""

    def __enter__(self) -> StopSignal:
        # Python runs handlers in the main thread, and lets no other one set them.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @contextmanager
    def gently(self) -> Iterator[None]:
        """Within it the first signal raises nothing: whoever entered looks at `at`."""
        self._is_gentle = True
        try:
            yield
        finally:
            self._is_gentle = False

    def _take(self, number: int, _: FrameType | None) -> None:
        is_first = self.at is None
        if is_first:
            self.at, self.name = self._clock(), signal.Signals(number).name
        if is_first and self._is_gentle:
            return
        self._restore()
        raise KeyboardInterrupt(signal.Signals(number).name)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
