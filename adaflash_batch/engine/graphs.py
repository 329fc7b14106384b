"""Passes kept as CUDA graphs: launched once by the host, again and again by the device alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from adaflash_batch.errors import first_line

Result = TypeVar("Result")

# A third of a minute of capturing for a model of 8B parameters, at the most.
MOST_GRAPHS = 64
# Of the memory of the device; activations of the largest pass, in the main.
MOST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Captured(Generic[Result]):
    """A graph.

    Attributes:
        result: what the work returned; every replay writes its tensors anew.
        replay: runs it.
        num_bytes: memory that it took beyond that of the graphs before it.
    """

    result: Result
    replay: Callable[[], None]
    num_bytes: int


class Capturer(Protocol):
    """Makes graphs."""

    def capture(self, work: Callable[[], Result]) -> Captured[Result]:
        """The graph of what the work launches; nothing has run when it returns.

        Raises RuntimeError where the work does what no graph can hold.
        """


class CudaCapturer:
    """Graphs of one device, in one pool of memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Result]) -> Captured[Result]:
        """See Capturer."""
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # A trainer's thread may ask for memory meanwhile; by default that would end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        grown = torch.cuda.memory_reserved(self._device) - before
        return Captured(result, graph.replay, max(grown, 0))


class Graphs(Generic[Result]):
    """Runs work by its key, from a graph where there is one.

    Work of a key is run as it is the first time, which sets up what kernels need; the second time a
    graph is made of it. Where one cannot be made, or there is no room, it is run as it is.

    Args:
        whose: passes they are, for people.
        capturer: None makes no graphs.
        most: graphs.
        max_bytes: once they take so much, no more are made.

    Attributes:
        num_replays: how often a graph ran.
        failure: why the first graph that could not be made could not; None where all could.
        notify: is told that, once; None tells nobody.
    """

    def __init__(
        self, whose: str, capturer: Capturer | None, *, most: int = MOST_GRAPHS, max_bytes: int
    ) -> None:
        self._whose = whose
        self.num_replays = 0
        self.failure: str | None = None
        self.notify: Callable[[str], None] | None = None
        self._capturer, self._most, self._room = capturer, most, max_bytes
        self._graphs: dict[Hashable, Captured[Result]] = {}
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """What the work returns.

        Args:
            key: the same for work that launches the same on the same memory.
        """
        captured = self._graphs.get(key)
        if captured is None and self._is_due(key):
            captured = self._capture(key, work)
        if captured is None:
            return work()
        captured.replay()
        self.num_replays += 1
        return captured.result

    def _is_due(self, key: Hashable) -> bool:
        if self._capturer is None or self.failure is not None:
            return False
        if len(self._graphs) >= self._most or self._room <= 0:
            return False
        is_first = key not in self._seen
        self._seen.add(key)
        return not is_first

    def _capture(self, key: Hashable, work: Callable[[], Result]) -> Captured[Result] | None:
        assert self._capturer is not None
        try:
            captured = self._capturer.capture(work)
        except RuntimeError as error:
            # What cannot be captured once never can: the model reads something back, say.
            self._give_up(first_line(error))
            return None
        self._graphs[key] = captured
        self._room -= captured.num_bytes
        return captured

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        if self.notify is not None:
            self.notify(f"{self._whose} run slower, without CUDA graphs, which fail: {reason}")


def graph_memory(device: torch.device) -> int:
    """Bytes that the graphs of the target, or of the drafter, may take there."""
    if device.type != "cuda":
        return 2**63 - 1
    return int(torch.cuda.get_device_properties(device).total_memory * MOST_SHARE)
