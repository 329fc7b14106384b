"""What a decoder's process and its trainer's tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from adaflash_batch.adapt.messages import pack
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
        message = message.alone()
    connection.send_bytes(pack(message))
