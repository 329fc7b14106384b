"""A request while it is decoded, and its part in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from adaflash_batch.engine.accept import Emission
from adaflash_batch.engine.capture import Piece, Recording
from adaflash_batch.engine.device_drafting import LateDrafter
from adaflash_batch.engine.hindsight import Prospect
from adaflash_batch.engine.packing import Int32, Packed, pack
from adaflash_batch.engine.passes import Pass
from adaflash_batch.engine.policy import Candidate, Chosen
from adaflash_batch.engine.sampling import ChoiceBlock, TokenHistory
from adaflash_batch.engine.scheduler import Scheduled
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Completion, FinishReason, Request, RowError, Timing
from adaflash_batch.stats import SpeculationCounts


@dataclass(slots=True, eq=False)
class Entry:
    """A request on its way.

    Attributes:
        tokens: prompt and completion so far.
        added, admitted, first_token: when it came, began and had its first new token; seconds.
        prospect: what speculation knows of it.
        history: for sampling that depends on what was written before.
        reason: why it ended, None before.
    """

    request: Request
    sequence: ScheduledSequence
    tokens: list[int]
    added: float
    prospect: Prospect
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

    def ends(self, of_model: frozenset[int]) -> frozenset[int]:
        """Tokens that end its text; the model's own are given."""
        sampling = self.request.sampling
        own = frozenset() if sampling.ignore_eos else of_model
        return own.union(sampling.stop_token_ids) if sampling.stop_token_ids else own

    def watched(self, emission: Emission) -> Emission:
        """Cut behind the token that completes a stop string, if one does."""
        watch, tokens = self.request.stop_watch, emission.tokens
        if watch is None:
            return emission
        # The token that ends a text is no part of what is watched.
        shown = tokens[:-1] if emission.reason == "stop" else tokens
        stop = next((count for count, token in enumerate(shown, 1) if watch.feed(token)), None)
        return emission if stop is None else emission.cut(stop)

    def candidate(self, room: int) -> Candidate:
        """As one that has room for so many drafts."""
        return Candidate(self.request.key, self.sequence, self.prospect, self.tokens, room)

    def completion(self, reason: FinishReason, error: RowError | None, now: float) -> Completion:
        """What came of it."""
        admitted = self.admitted if self.admitted is not None else now
        first = self.first_token if self.first_token is not None else now
        return Completion(
            key=self.request.key,
            token_ids=[] if error else self.tokens[self.num_prompt :],
            finish_reason=reason,
            prompt_tokens=self.num_prompt,
            truncated_tokens=self.request.truncated_tokens,
            counts=self.counts,
            timing=Timing(admitted - self.added, first - admitted, now - first),
            error=error,
        )


@dataclass(slots=True)
class Item:
    """One request's part in this step, with its drafts.

    Attributes:
        chosen: where its drafts come from.
        drafts: that are verified.
        num_choices: rows of logits wanted, none in the middle of a prefill.
        num_shareable: of its tokens, those in pages of a prompt that others may use.
        num_accepted: of the drafts, once that is known.
    """

    entry: Entry
    scheduled: Scheduled
    chosen: Chosen
    drafts: list[int]
    num_choices: int
    num_shareable: int
    num_accepted: int = 0

    @property
    def is_single(self) -> bool:
        """Whether one known token is in it, as in every step of a text (and in few prefills)."""
        return self.scheduled.num_known == 1

    def choice_block(self, end_ids: frozenset[int]) -> ChoiceBlock:
        """Its rows of logits; its drafts may be learnt later. The model's own ends are given."""
        entry, request = self.entry, self.entry.request
        return ChoiceBlock(
            sampling=request.sampling,
            history=entry.history,
            drafts=self.drafts,
            key=(request.identity, request.key.sample),
            position=len(entry.tokens),
            end_ids=entry.ends(end_ids),
            room=request.sampling.max_new_tokens - entry.num_generated,
        )

    @property
    def may_go_on(self) -> bool:
        """Whether there may be room for a draft behind what it emits."""
        sequence = self.scheduled.sequence
        return sequence.known + 2 < sequence.limit

    @property
    def late_place(self) -> int | None:
        """Where the device has its drafts, if the host did not know them when they were chosen."""
        return None if self.chosen.guess is None else self.chosen.guess.place

    @property
    def is_verification(self) -> bool:
        """Whether a text is extended, rather than a prompt (or a preempted text) computed."""
        entry = self.entry
        return entry.num_generated > 0 and self.scheduled.sequence.is_decoding


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was begun at `began`."""

    items: list[Item]
    packed: Packed
    begun: Pass
    began: float


def choice_blocks(items: Sequence[Item], end_ids: frozenset[int]) -> list[ChoiceBlock]:
    """Of those that choose. The model's own ends are given."""
    return [item.choice_block(end_ids) for item in items if item.num_choices]


def learn_drafts(drafter: LateDrafter, flight: Flight) -> None:
    """Take over the drafts that only the device knew when the step began."""
    drafter.settle(flight.begun.drafted())
    for item in flight.items:
        if item.late_place is not None:
            item.drafts[:] = item.chosen.token_ids


def pack_items(items: Sequence[Item]) -> Packed:
    """The arrays of a step."""
    pieces, contexts = [], []
    for item in items:
        begin = item.scheduled.sequence.computed
        known = item.entry.tokens[begin : begin + item.scheduled.num_known]
        pieces.append(known + item.drafts)
        contexts.append(begin)
    return pack(pieces, contexts, [item.num_choices for item in items])


def sources_of(items: Sequence[Item], packed: Packed) -> Int32:
    """Where the device has the drafts that the host does not know: see StepInputs.sources."""
    sources = np.full(len(packed.token_ids), -1, dtype=np.int32)
    for item, start in zip(items, packed.start.tolist(), strict=True):
        place = item.late_place
        if place is not None:
            begin, count = start + item.scheduled.num_known, len(item.drafts)
            sources[begin : begin + count] = np.arange(place, place + count)
    return sources


def misfit(limit: int, context: int, needed: int, num_pages: int) -> RowError | None:
    """Why a request of so many tokens can never run; None if it can.

    Args:
        context: the longest that can.
        needed: pages that it takes, of `num_pages`.
    """
    if limit > context:
        message = f"prompt and max_new_tokens are {limit} tokens, the context is {context}"
        return RowError("prompt_too_long", message)
    if needed > num_pages:
        message = f"prompt and max_new_tokens are {limit} tokens, KV memory holds "
        return RowError("kv_memory_too_small", f"{message}{num_pages * PAGE}")
    return None


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
