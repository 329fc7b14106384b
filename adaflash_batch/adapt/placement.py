"""Where a trainer runs: between the decoder's steps, in a thread or in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.stats import SpeculationCounts

if TYPE_CHECKING:
    from adaflash_batch.adapt.publishing import TrainerCounters

Place = Literal["auto", "inline", "thread", "process"]

# By the kind of the decoder's device, measured on CPUs only (docs/log.md, "Where the trainer
# runs"). A GPU leaves the cores alone while it decodes, so there something can run beside it.
_DEFAULT: dict[str, Place] = {"cpu": "inline"}
_ELSEWHERE: Place = "thread"


class Placement(Protocol):
    """A trainer at work, as the loop of a job sees it.

    Trajectories go to it through a mailbox, weights come back through another one; neither side
    waits. All methods are for the decoder's thread.
    """

    @property
    def seconds(self) -> float:
        """That pieces of learning took; beside decoding where it has its own thread or process."""

    @property
    def counters(self) -> TrainerCounters:
        """What came of it so far, as far as is known here."""

    @property
    def num_dropped(self) -> int:
        """Trajectories that it never saw, since it did not keep up."""

    @property
    def wants_texts(self) -> bool:
        """Whether texts that are begun now would be learnt from."""

    def observe(self, counts: SpeculationCounts) -> None:
        """Take in what speculation did for a finished request."""

    def between_steps(self, ahead: Outlook) -> None:
        """Go on learning, with what is ahead of the job; call it after every step.

        Raises AdaflashError or OSError where a version cannot be kept; only close it then.
        """

    def close(self) -> None:
        """End it between two pieces, within seconds; no thread or process is left. May be repeated.

        What is lost is the round under way.
        """


def place_for(place: Place, device_type: str) -> Place:
    """Where a trainer runs beside a decoder on such a device; never `auto`."""
    return place if place != "auto" else _DEFAULT.get(device_type, _ELSEWHERE)
