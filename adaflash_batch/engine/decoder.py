"""The decoder: many requests at once, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adaflash_batch.engine.accept import Emission
from adaflash_batch.engine.capture import Capture
from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.drafting import Drafter
from adaflash_batch.engine.in_flight import (
    Entry,
    Flight,
    Item,
    choice_blocks,
    learn_drafts,
    misfit,
    pack_items,
    sources_of,
)
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.packing import Packed
from adaflash_batch.engine.passes import Pass
from adaflash_batch.engine.placing import Sources, parts_of
from adaflash_batch.engine.policy import NOTHING, WHOLE_BLOCKS, Chosen, Policy
from adaflash_batch.engine.prefixes import page_keys
from adaflash_batch.engine.pricing import Load, load_without_drafts
from adaflash_batch.engine.profile import profile
from adaflash_batch.engine.row_rules import is_left
from adaflash_batch.engine.sampling import ChoiceBlock, TokenHistory
from adaflash_batch.engine.scheduler import Scheduled
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.engine.sizes import Sizes, reserved_for
from adaflash_batch.engine.step_buffers import ALL_KNOWN
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import DrafterWeights, Trajectory
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Completion, FinishReason, Request, RowError


class Decoder:
    """Continuous batching with speculation.

    On a device a step goes on while the host does something else: it ends in the call after the one
    that began it.

    Args:
        target: the model whose choices make the text.
        drafter: proposes tokens; None decodes plainly.
        lookup: the other source of drafts; None looks nothing up.
        policy: which drafts are verified.
        cost: what steps take; None begins without knowing it.
        max_running: most requests in a step.
        token_budget: most tokens in a step.
        kv_tokens: tokens that KV memory holds, over all requests (rounded down to pages).
        context: longest prompt and completion together; None takes the model's.
        end_token_ids: the model's own end-of-sequence tokens.
        share_prefixes: whether requests that begin alike compute that once.
        clock: seconds, for the timings.

    Attributes:
        context: see above.
        cost: what steps were found to take.
        speculator: chooses drafts, and learns from what becomes of them.
        num_steps, num_generated, num_prefilled: steps, and tokens of texts and prompts, so far.
    """

    num_steps = num_generated = num_prefilled = 0
    _entries: dict[ScheduledSequence, Entry]
    _finished: list[Completion]
    _flight: Flight | None = None
    _newest: Callable[[], DrafterWeights | None] | None = None

    def __init__(
        self,
        target: Target,
        *,
        drafter: Callable[[int], Drafter] | None = None,
        lookup: Lookup | None = None,
        policy: Policy = WHOLE_BLOCKS,
        cost: StepCost | None = None,
        max_running: int = 64,
        token_budget: int = 1024,
        kv_tokens: int,
        context: int | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        share_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._clock, self._shares_prefixes = target, clock, share_prefixes
        self.end_token_ids, self._entries, self._finished = end_token_ids, {}, []
        self.context = context if context is not None else target.context
        self.cost = StepCost() if cost is None else cost
        num_pages = kv_tokens // PAGE
        made = None if drafter is None else drafter(num_pages)
        block_size = 0 if made is None else made.block_size
        reserve = reserved_for(block_size, looks_up=lookup is not None)
        self._sizes = Sizes(max_running, token_budget, num_pages, self.context, reserve)
        sources = Sources(made, lookup, policy, self.cost)
        parts = parts_of(target, sources, self._sizes, clock)
        self._passes, self._drafter, self._late_drafter, self._ahead, self._graphs = parts.placed
        self._scheduler, self._table = parts.scheduler, parts.table
        self._keeping, self.speculator = parts.keeping, parts.speculator

    @property
    def target(self) -> Target:
        """The model."""
        return self._target

    def capture(
        self,
        layer_ids: tuple[int, ...],
        emit: Callable[[Trajectory], None],
        wanted: Callable[[], bool] = lambda: True,
        *,
        keeps_all: bool = True,
    ) -> None:
        """From now on hand the states of finished requests to `emit`; see `Capture`."""
        assert not self._entries, "requests are on their way already"
        self._scheduler.prefixes.clear()  # nothing is kept of what these computed
        num_pages = self._scheduler.pool.num_pages if self._shares_prefixes else 0
        self._keeping.capture = Capture(
            self._target, layer_ids, emit, wanted, num_pages, keeps_all=keeps_all
        )

    def tell_of_trouble(self, notify: Callable[[str], None]) -> None:
        """From now on say it to people, once, where passes are slower than they should be."""
        for graphs in self._graphs:
            graphs.notify = notify

    def profile(self) -> None:
        """Measure what steps take, before the first request."""
        assert not self._entries, "requests are on their way already"
        self._scheduler.prefixes.clear()  # a page is written to
        most_requests = self._sizes.max_running
        most = most_requests * (self.speculator.most + 1)
        profile(
            self.cost,
            self._target,
            self._passes,
            self._drafter,
            most_tokens=min(most, self._sizes.token_budget),
            most_requests=most_requests,
            clock=self._clock,
        )

    def follow(self, newest: Callable[[], DrafterWeights | None]) -> None:
        """From now on draft with the weights that `newest` gives, where it gives some.

        It is asked before every step. Between drafting and verifying weights never change: drafts
        that were begun ahead are dropped where there are new ones.
        """
        assert self._drafter is not None, "nothing drafts here"
        self._newest = newest

    @property
    def has_work(self) -> bool:
        """Whether another step would do something."""
        return bool(self._entries or self._finished)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, or wait again after preemption."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold KV memory."""
        return len(self._scheduler.running)

    @property
    def drafter_version(self) -> int | None:
        """The version that drafts, None without a drafter."""
        return None if self._drafter is None else self._drafter.version

    @property
    def drafter_layers(self) -> tuple[int, ...]:
        """Target layers whose states the drafter reads, none without a drafter."""
        return () if self._drafter is None else self._drafter.tapped_layers

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self._target.vocab_size

    def describe(self) -> str:
        """Precision, device and memory, for people."""
        target, pages = self._target, self._scheduler.pool.num_pages
        dtype = str(target.dtype).removeprefix("torch.")
        return f"{dtype} on {target.device}, KV memory for {pages * PAGE} tokens"

    @property
    def num_preemptions(self) -> int:
        """How often a request was sent back to wait."""
        return self._scheduler.num_preemptions

    @property
    def num_shared(self) -> int:
        """Tokens of prompts that were not computed, since another request's were the same."""
        return self._scheduler.num_shared

    def add(self, request: Request) -> None:
        """Queue a request; one that can never run comes back from the next step with an error."""
        prompt, sampling = request.token_ids, request.sampling
        assert prompt, "a prompt has at least one token"
        limit = len(prompt) + sampling.max_new_tokens
        keys = page_keys(prompt) if self._shares_prefixes else ()
        sequence = ScheduledSequence(known=len(prompt), limit=limit, keys=keys)
        entry = Entry(request, sequence, list(prompt), self._clock(), self.speculator.begin(prompt))
        if sampling.reshapes_logits:
            entry.history = TokenHistory(prompt=frozenset(prompt))
        pool = self._scheduler.pool
        error = misfit(limit, self.context, self._scheduler.pages_for(sequence), pool.num_pages)
        if error is not None:
            self._finished.append(entry.completion("error", error, self._clock()))
            return
        self._entries[sequence] = entry
        self._scheduler.add(sequence)
        self._keeping.begin(entry)

    def drop_waiting(self) -> None:
        """Forget the requests that hold no KV memory: nothing comes of them."""
        for sequence in self._scheduler.drop_waiting():
            self._keeping.forget(self._entries.pop(sequence))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Advance every scheduled request once; return what is finished."""
        weights = self._new_weights()
        if self._passes.runs_ahead:
            self._land()
        self._launch(weights)
        if not self._passes.runs_ahead:
            self._land()
        finished, self._finished = self._finished, []
        return finished

    def _new_weights(self) -> DrafterWeights | None:
        """Those that the drafter is to take, if there are some."""
        weights = None if self._newest is None else self._newest()
        if weights is not None and self._ahead is not None:
            self._ahead.drop()  # they were drafted with the old ones
        return weights

    def _launch(self, weights: DrafterWeights | None) -> None:
        if weights is not None:
            self.speculator.adopt(weights)
            # What running requests have of the old ones serves to their end, not that of others.
            self._scheduler.prefixes.clear()
        began = self._clock()
        items = self._plan()
        assert items or not self._entries, "requests are left and none of them can move"
        if items:
            packed, blocks = pack_items(items), choice_blocks(items, self.end_token_ids)
            self._flight = Flight(items, packed, self._verify(items, packed, blocks), began)
            self._draft_ahead(items, packed, blocks)

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        items, packed = flight.items, flight.packed
        if self._late_drafter is not None:
            learn_drafts(self._late_drafter, flight)
            self.speculator.note_drafts(self._late_drafter.take_seconds())
        kept = self._commit(items, flight.begun.land())
        self._keeping.keep(items, packed, kept)
        self._dismiss(items)
        if not self._entries:
            self._keeping.flush()
        self.num_steps += 1
        self._observe(items, packed, flight.begun.seconds, self._clock() - flight.began)

    def _observe(self, items: list[Item], packed: Packed, target_s: float, whole_s: float) -> None:
        """Tell speculation what the step took."""
        decoded = sum(1 + len(item.drafts) for item in items if item.is_single)
        num_tokens = len(packed.token_ids)
        load = Load(num_tokens, len(packed.rows), packed.num_keys, len(items))
        is_decoding = 2 * decoded >= num_tokens
        drafting = [item for item in items if item.drafts]
        accepted = sum(item.num_accepted for item in drafting)
        self.speculator.observe(load, accepted, target_s, whole_s, is_decoding=is_decoding)
        self.speculator.pace.note_step(len(drafting), accepted)

    def _plan(self) -> list[Item]:
        """Who takes part in the step, and with which drafts."""
        decoding = self._scheduler.plan_decoding(self.speculator.most)
        chosen = self._speculate(decoding)
        items = [self._item(each, chosen.get(each.sequence, NOTHING)) for each in decoding]
        taken = sum(1 + len(item.drafts) for item in items)
        return items + [self._item(each, NOTHING) for each in self._scheduler.plan_prefill(taken)]

    def _speculate(self, decoding: list[Scheduled]) -> dict[ScheduledSequence, Chosen]:
        """What those verify that decode and have room for a draft."""
        able = [each for each in decoding if each.width > 0]
        candidates = [self._entries[each.sequence].candidate(each.width) for each in able]
        load = load_without_drafts(decoding, self._scheduler.prefill_ahead(len(decoding)))
        chosen = self.speculator.choose(candidates, load)
        return {each.sequence: what for each, what in zip(able, chosen, strict=True)}

    def _item(self, scheduled: Scheduled, chosen: Chosen) -> Item:
        entry = self._entries[scheduled.sequence]
        if entry.admitted is None:
            entry.admitted = self._clock()
        self._keeping.recall(entry)
        sequence, drafts = scheduled.sequence, chosen.token_ids
        is_complete = sequence.computed + scheduled.num_known == sequence.known
        num_choices = len(drafts) + 1 if is_complete else 0
        return Item(entry, scheduled, chosen, drafts, num_choices, scheduled.num_shareable)

    def _verify(self, items: list[Item], packed: Packed, blocks: list[ChoiceBlock]) -> Pass:
        """One target forward; the target's choice behind every anchor and draft."""
        table = self._table.rows([item.scheduled.sequence for item in items])
        sources = ALL_KNOWN if self._late_drafter is None else sources_of(items, packed)
        return self._passes.begin(packed, table, blocks, sources)

    def _draft_ahead(self, items: list[Item], packed: Packed, blocks: list[ChoiceBlock]) -> None:
        """Draft for the next step, for those who were drafted for in this one."""
        if self._ahead is None:
            return
        drafting = self.speculator.drafting
        # Requests that decode come first, and all of them choose.
        chosen = [
            (segment, item)
            for segment, (item, block) in enumerate(zip(items, blocks, strict=False))
            if item.scheduled.sequence in drafting and item.may_go_on and not is_left(block)
        ]
        last = chosen[-1][0] if chosen else 0
        self._ahead.begin(chosen, int(packed.start[last] + packed.length[last]))

    def _commit(self, items: list[Item], emissions: list[Emission]) -> list[int]:
        """Extend the texts. Returns for each item how many of its tokens are of use later."""
        coming = iter(emissions)
        return [self._advance(item, next(coming) if item.num_choices else None) for item in items]

    def _advance(self, item: Item, emission: Emission | None) -> int:
        entry, sequence = item.entry, item.scheduled.sequence
        num_known = item.scheduled.num_known
        if not item.is_verification:
            self.num_prefilled += num_known
        if emission is None:
            sequence.computed += num_known
            return num_known
        if not emission.is_sound:
            message = "the model's logits are not finite (NaN or infinity)"
            self._finish(entry, "error", RowError("bad_logits", message))
            return 0
        emission = entry.watched(emission)
        item.num_accepted = emission.accepted
        self._count(item)
        self._extend(entry, emission)
        sequence.computed += num_known + emission.accepted
        if emission.reason is not None:
            self._finish(entry, emission.reason)
            return item.num_shareable
        return num_known + emission.accepted

    def _count(self, item: Item) -> None:
        counts, chosen, num_verified = item.entry.counts, item.chosen, len(item.drafts)
        if item.drafts and not chosen.is_lookup:
            counts.mark(self.drafter_version)
        if item.is_verification:
            counts.record(
                chosen.num_drafted, num_verified, item.num_accepted, is_lookup=chosen.is_lookup
            )

    def _extend(self, entry: Entry, emission: Emission) -> None:
        emitted = emission.tokens
        entry.tokens += emitted
        self.speculator.extend(entry.prospect, emitted)
        is_over = emission.reason is not None
        self.speculator.settle(entry.prospect, entry.tokens, is_over=is_over)
        entry.sequence.known += len(emitted)
        self.num_generated += len(emitted)
        if entry.history is not None:
            entry.history.extend(emitted)
        if entry.first_token is None:
            entry.first_token = self._clock()

    def _finish(self, entry: Entry, reason: FinishReason, error: RowError | None = None) -> None:
        entry.reason = reason
        if error is None:
            self.speculator.end(entry.prospect)
        self._finished.append(entry.completion(reason, error, self._clock()))

    def _dismiss(self, items: list[Item]) -> None:
        """Give up the pages of requests that ended."""
        for entry in (item.entry for item in items if item.entry.reason is not None):
            self._keeping.forget(entry)
            self._scheduler.remove(entry.sequence)
            del self._entries[entry.sequence]
