"""What CUDA graphs do, on tensors of the CPU: a capture runs nothing, a replay writes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from adaflash_batch.engine.graphs import Captured

Result = TypeVar("Result")


class ReplayingCapturer:
    """Replays by doing the work again and writing what comes of it where the first result is.

    Graphs of one capturer share memory: a replay writes over what others returned.
    """

    def __init__(self) -> None:
        self._results: list[Any] = []

    @property
    def num_captured(self) -> int:
        return len(self._results)

    def capture(self, work: Callable[[], Result]) -> Captured[Result]:
        result = work()
        self._results.append(result)
        _poison(result)

        def replay() -> None:
            for other in self._results:
                if other is not result:
                    _poison(other)
            for old, new in zip(tensors_of(result), tensors_of(work()), strict=True):
                if old is not new:
                    old.copy_(new.clone())

        return Captured(result, replay, num_bytes=1)


class Capturers:
    """One whenever it is asked for one."""

    def __init__(self) -> None:
        self._made: list[ReplayingCapturer] = []

    def __call__(self, device: torch.device) -> ReplayingCapturer:
        self._made.append(ReplayingCapturer())
        return self._made[-1]

    @property
    def num_captured(self) -> int:
        return sum(each.num_captured for each in self._made)


def _poison(result: Any) -> None:
    for tensor in tensors_of(result):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 7)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """All tensors in tuples and dicts."""
    if isinstance(result, torch.Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    if not isinstance(result, dict | tuple | list):
        return []
    return [tensor for part in parts for tensor in tensors_of(part)]
