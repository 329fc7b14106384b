"""Moments in the work of a device: to wait for, and to measure between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Marks(Protocol):
    """Marks are opaque; all come from the same thread."""

    def mark(self) -> Any:
        """Behind all that was launched so far."""

    def wait(self, mark: Any) -> None:
        """Until the device has come to it."""

    def is_reached(self, mark: Any) -> bool:
        """Whether it has."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks that it has come to."""


class HostMarks:
    """For work that is done when its call returns."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def mark(self) -> float:
        """See Marks."""
        return self._clock()

    def wait(self, mark: float) -> None:
        """See Marks."""

    def is_reached(self, mark: float) -> bool:
        """See Marks."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """See Marks."""
        return end - begin


class CudaMarks:
    """Events of the current stream."""

    def mark(self) -> Any:
        """See Marks."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """See Marks."""
        mark.synchronize()

    def is_reached(self, mark: Any) -> bool:
        """See Marks."""
        return bool(mark.query())

    def seconds(self, begin: Any, end: Any) -> float:
        """See Marks."""
        return float(begin.elapsed_time(end)) / 1000.0


def marks_of(device: torch.device, clock: Callable[[], float]) -> Marks:
    """For the work of this device."""
    return CudaMarks() if device.type == "cuda" else HostMarks(clock)
