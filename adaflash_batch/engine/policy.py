"""What speculation is asked, and what it answers: policy, candidates, and what each verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adaflash_batch.engine.hindsight import Guess, Prospect
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.request import RowKey

WidthPolicy = Literal["survival", "adaflash", "fixed"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How much is verified.

    Attributes:
        widths: `survival` maximises the expected tokens a second over the whole batch; `adaflash`
            follows the scalar head of the paper; `fixed` verifies all.
        most: drafts verified behind an anchor at the most; None for the drafter's block.
        only_if_it_pays: nothing is drafted or verified where plain decoding is faster.
    """

    widths: WidthPolicy = "fixed"
    most: int | None = None
    only_if_it_pays: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could verify drafts in this step.

    Attributes:
        tokens: prompt and text so far; the last is the anchor.
        room: drafts that could be accepted at the most, above 0.
    """

    key: RowKey
    sequence: ScheduledSequence
    prospect: Prospect
    tokens: Sequence[int]
    room: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a request verifies.

    Attributes:
        guess: whose first `width` tokens are verified; None where there is none.
        num_drafted: tokens that were proposed for it, verified or not.
    """

    guess: Guess | None = None
    width: int = 0
    num_drafted: int = 0

    @property
    def is_lookup(self) -> bool:
        """Whether it was looked up."""
        return self.guess is not None and self.guess.source == "lookup"

    @property
    def token_ids(self) -> list[int]:
        """Those that are verified."""
        return [] if self.guess is None else self.guess.token_ids[: self.width]


NOTHING = Chosen()
WHOLE_BLOCKS = Policy()
