"""What a decoder's process and its trainer's tell each other, as bytes through a socket.

Plain bytes rather than tensors in shared memory: each of those takes a file descriptor or a file in
/dev/shm, which containers give little of, and a text is a few hundred kilobytes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torch import Tensor

from adaflash_batch.adapt.publishing import TrainerCounters
from adaflash_batch.adapt.recipe import TrainerRecipe
from adaflash_batch.adapt.thread import News
from adaflash_batch.exchange import Trajectory


class Order(NamedTuple):
    """The first thing that a trainer's process is told.

    store: folder of the versions.
    threads: CPU threads.
    """

    recipe: TrainerRecipe
    store: str
    threads: int


class Told(NamedTuple):
    """News of the decode, and which versions must stay on disk."""

    news: News
    pinned: frozenset[int]


class End(NamedTuple):
    """Nothing follows."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a trainer is.

    Attributes:
        seconds: of learning.
        counters: its own.
        num_dropped: trajectories that came and were dropped.
    """

    seconds: float
    counters: TrainerCounters
    num_dropped: int


class Line(NamedTuple):
    """Something for people."""

    text: str


class Published(NamedTuple):
    """A version is on disk."""

    version: int


class Failure(NamedTuple):
    """A version cannot be kept: the trainer has ended."""

    message: str


def send(connection: Connection[Any, Any], message: object) -> None:
    """Send something; waits until the other side has taken it, or most of it."""
    if isinstance(message, Trajectory):
        message = _whole(message)
    # Not connection.send, which would put tensors into shared memory.
    connection.send_bytes(pickle.dumps(message, protocol=5))


def receive(connection: Connection[Any, Any]) -> object:
    """What the other side, a process of ours, sent next. Raises EOFError where it is gone."""
    return pickle.loads(connection.recv_bytes())


def _whole(trajectory: Trajectory) -> Trajectory:
    """On the CPU and without the rest of the memory that its tensors are views of."""
    hidden = trajectory.last_hidden
    return replace(
        trajectory,
        token_ids=_copy(trajectory.token_ids),
        features=_copy(trajectory.features),
        last_hidden=None if hidden is None else _copy(hidden),
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
