"""What a trainer hands over when a version proved better, and who takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adaflash_batch.adapt.scoring import Comparison
from adaflash_batch.exchange import DrafterWeights, WeightsMailbox


@dataclass(slots=True)
class TrainerCounters:
    """What an OnlineTrainer did so far, rounds that were taken back included.

    Attributes:
        rounds: that ended.
        updates: of all rounds; numbers the next one.
        published: rounds whose weights are served, or were.
        not_better: rounds after which held-back texts were not drafted better.
        not_finite: rounds taken back for a loss or gradient that was not finite.
        refused: trajectories with states that are not finite.
    """

    rounds: int = 0
    updates: int = 0
    published: int = 0
    not_better: int = 0
    not_finite: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where training stands between rounds.

    Attributes:
        tensors: weights in float32, the optimiser's memory, averaged weights, by name.
        counters: a TrainerCounters as numbers.
    """

    tensors: Mapping[str, Tensor]
    counters: Mapping[str, int]


class Publisher(Protocol):
    """Takes the versions that proved better."""

    def publish(
        self, weights: Mapping[str, Tensor], state: TrainerState, comparison: Comparison
    ) -> int:
        """Hand weights to the decoder, and keep them where they are to be kept.

        Args:
            weights: every parameter by name, in the dtype of decoding; nobody writes to them.
            state: from which training goes on exactly; likewise.
            comparison: what they were published for.

        Returns:
            The number of the version.
        """


@dataclass(slots=True)
class MailboxPublisher:
    """Keeps nothing: the decoder gets the weights, numbered one after another."""

    mailbox: WeightsMailbox
    version: int = 0

    def publish(
        self, weights: Mapping[str, Tensor], state: TrainerState, comparison: Comparison
    ) -> int:
        """See Publisher."""
        self.version += 1
        self.mailbox.put(DrafterWeights(self.version, weights))
        return self.version
