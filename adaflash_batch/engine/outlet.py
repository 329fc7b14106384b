"""The way of what a device computed to the host's memory, beside the work that goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from adaflash_batch.engine.packing import ranges
from adaflash_batch.engine.upload import Upload, upload_to

Use = Callable[..., None]

# Some hundred steps of 128 requests of a model of 8B parameters.
MOST_WAITING = 512 * 2**20


class Outlet(Protocol):
    """Whatever is given to it is done in order, in the thread that calls it.

    Attributes:
        is_busy: whether half of its room is taken.
    """

    @property
    def is_busy(self) -> bool:
        """See the class."""

    def pick(
        self, states: Tensor, begins: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Rows [begin, begin + count) of [.., H], or more than that; where each run begins."""

    def take(self, tensors: tuple[Tensor, ...], use: Use, *, waits: bool) -> bool:
        """Call `use` with these on the host, later; False where there is no room.

        Args:
            waits: for room, so that it is never False.
        """

    def then(self, action: Callable[[], None]) -> None:
        """Call this behind what was taken before."""

    def drain(self, *, to_the_end: bool = False) -> None:
        """Do what is due by now, or wait for all of it."""


class HostOutlet:
    """What is on the host already is used at once."""

    is_busy = False

    def pick(
        self, states: Tensor, begins: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """See Outlet."""
        return states, list(begins)

    def take(self, tensors: tuple[Tensor, ...], use: Use, *, waits: bool) -> bool:
        """See Outlet."""
        use(*tensors)
        return True

    def then(self, action: Callable[[], None]) -> None:
        """See Outlet."""
        action()

    def drain(self, *, to_the_end: bool = False) -> None:
        """See Outlet."""


class Link(Protocol):
    """Copies to the host. A mark is opaque."""

    def send(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
        """Copies that are whole once the mark is reached."""

    def wait(self, mark: Any) -> None:
        """Until it is."""

    def is_reached(self, mark: Any) -> bool:
        """Whether it is."""


class CudaLink:
    """Through pinned memory, on a stream of its own: the passes that follow do not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
        """See Link."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = tuple(_copied(tensor) for tensor in tensors)
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(self._stream)
        for tensor in tensors:
            # Its memory is not given to others before this stream has read it.
            tensor.record_stream(self._stream)
        return copies, mark

    def wait(self, mark: Any) -> None:
        """See Link."""
        mark.synchronize()

    def is_reached(self, mark: Any) -> bool:
        """See Link."""
        return bool(mark.query())


def _copied(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class _Due(NamedTuple):
    mark: Any
    num_bytes: int
    action: Callable[[], None]


class DeviceOutlet:
    """Copies on their way wait here, so many bytes of them.

    Args:
        link: that copies.
        upload: takes row numbers to the device.
    """

    def __init__(self, link: Link, upload: Upload, most_waiting: int = MOST_WAITING) -> None:
        self._link, self._upload = link, upload
        self._room, self._half = most_waiting, most_waiting // 2
        self._due: deque[_Due] = deque()

    @property
    def is_busy(self) -> bool:
        """See Outlet."""
        return self._room < self._half

    def pick(
        self, states: Tensor, begins: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """See Outlet. Only what is wanted makes the way."""
        sizes = np.array(counts)
        rows = self._upload(ranges(np.array(begins), sizes))
        return states[rows], (np.cumsum(sizes) - sizes).tolist()

    def take(self, tensors: tuple[Tensor, ...], use: Use, *, waits: bool) -> bool:
        """See Outlet."""
        size = sum(tensor.nbytes for tensor in tensors)
        while waits and self._due and size > self._room:
            self._do_first()
        if size > self._room and not waits:
            return False
        copies, mark = self._link.send(tensors)
        self._room -= size
        self._due.append(_Due(mark, size, lambda: use(*copies)))
        return True

    def then(self, action: Callable[[], None]) -> None:
        """See Outlet."""
        if self._due:
            self._due.append(_Due(self._due[-1].mark, 0, action))
        else:
            action()

    def drain(self, *, to_the_end: bool = False) -> None:
        """See Outlet."""
        while self._due and (to_the_end or self._link.is_reached(self._due[0].mark)):
            self._do_first()

    def _do_first(self) -> None:
        first = self._due.popleft()
        self._link.wait(first.mark)
        self._room += first.num_bytes
        first.action()


def outlet_of(device: torch.device) -> Outlet:
    """From this device."""
    if device.type != "cuda":
        return HostOutlet()
    return DeviceOutlet(CudaLink(device), upload_to(device))
