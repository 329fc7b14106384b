"""A request while it is decoded, and its part in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from adaflash_batch.engine.capture import Piece, Recording
from adaflash_batch.engine.sampling import TokenHistory
from adaflash_batch.engine.scheduler import Scheduled
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.request import FinishReason, Request
from adaflash_batch.stats import SpeculationCounts


@dataclass(slots=True, eq=False)
class Entry:
    """A request on its way.

    Attributes:
        tokens: prompt and completion so far.
        added, admitted, first_token: when it came, began and had its first new token; seconds.
        history: for sampling that depends on what was written before.
        reason: why it ended, None before.
    """

    request: Request
    sequence: ScheduledSequence
    tokens: list[int]
    added: float
    admitted: float | None = None
    first_token: float | None = None
    history: TokenHistory | None = None
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    recording: Recording | None = None
    reason: FinishReason | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the completion so far."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Item:
    """One request's part in this step, with its drafts.

    num_choices: rows of logits wanted, none in the middle of a prefill.
    """

    entry: Entry
    scheduled: Scheduled
    drafts: list[int]
    num_drafted: int
    num_choices: int

    @property
    def is_single(self) -> bool:
        """Whether one known token is in it, as in every step of a text (and in few prefills)."""
        return self.scheduled.num_known == 1

    @property
    def is_verification(self) -> bool:
        """Whether a text is extended, rather than a prompt (or a preempted text) computed."""
        entry = self.entry
        return entry.num_generated > 0 and self.scheduled.sequence.is_decoding


def piece_of(recording: Recording, item: Item, row: int, position: int, choice_row: int) -> Piece:
    """What stays of a part, once it was committed: `computed` is behind the last such token.

    Args:
        recording: of its request.
        row: the packed row of its first token.
        position: that token's.
        choice_row: its first row of those that the lm_head was given.
    """
    num_known = item.scheduled.num_known
    count = item.scheduled.sequence.computed - position
    num_chosen = count - num_known + 1 if item.num_choices and count else 0
    return Piece(recording, row, position, count, choice_row, num_chosen)
