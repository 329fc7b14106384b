"""Figures of a section of benchmarks/gpu.py: kept as they come, timed on the device."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# (name begins with, bytes a second, bf16 operations a second): NVIDIA's data sheets, dense.
_PEAKS = (
    ("NVIDIA H200", 4.8e12, 989e12),
    ("NVIDIA H100 PCIe", 2.0e12, 756e12),
    ("NVIDIA H100", 3.35e12, 989e12),
    ("NVIDIA A100", 2.0e12, 312e12),
)
# More than any L2 cache: what is written between two runs, so that each begins with a cold one.
_FLUSH_BYTES = 256 * 2**20


class Notes:
    """A JSON file that is written anew with every figure, and the time that is left.

    Args:
        path: of the file.
        budget: seconds from now on.
    """

    def __init__(self, path: Path, budget: float) -> None:
        self._path, self._end = path, time.monotonic() + budget
        self._figures: dict[str, Any] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def put(self, name: str, figure: Any) -> None:
        """Keep one."""
        self._figures[name] = figure
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps(self._figures))
        os.replace(scratch, self._path)

    def attempt(self, name: str, needed: float, work: Callable[[], Any]) -> None:
        """Keep what the work returns, or why there is nothing; skipped without `needed` seconds."""
        if self.left < needed:
            self.put(name, "no time was left")
            return
        try:
            self.put(name, work())
        except Exception as error:  # one kernel's trouble must not cost the others' figures
            self.put(name, f"{type(error).__name__}: {str(error).strip()[:500]}")


def peaks() -> tuple[float, float] | None:
    """(bytes, bf16 operations) a second of this device at the most; None where they are unknown."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    found = (peak for prefix, *peak in _PEAKS if name.startswith(prefix))
    return next(((rate, work) for rate, work in found), None)


def floor_s(num_bytes: float, num_operations: float) -> float | None:
    """The least time that moving and computing so much can take."""
    found = peaks()
    return None if found is None else max(num_bytes / found[0], num_operations / found[1])


def timed(work: Callable[[], Any], device: torch.device, most: float = 1.0) -> float:
    """Median seconds of a run with a cold cache, compiled before; of `most` seconds of runs."""
    work()
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    seconds, began = list[float](), time.monotonic()
    while len(seconds) < 5 or (len(seconds) < 50 and time.monotonic() - began < most):
        flush.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        work()
        events[1].record()
        events[1].synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1000)
    return statistics.median(seconds)
