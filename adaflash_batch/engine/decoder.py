"""The decoder: many requests at once, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from adaflash_batch.engine.accept import emitted_tokens
from adaflash_batch.engine.capture import Capture
from adaflash_batch.engine.drafting import DraftBatch, Drafter
from adaflash_batch.engine.gate import SpeculationGate
from adaflash_batch.engine.in_flight import Entry, Item, piece_of
from adaflash_batch.engine.packing import Packed, PageTable, pack, ranges
from adaflash_batch.engine.pages import PagePool
from adaflash_batch.engine.sampling import ChoiceBlock, TokenHistory, choose
from adaflash_batch.engine.scheduler import Scheduled, Scheduler
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import DrafterWeights, Trajectory
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import PackedStep
from adaflash_batch.request import Completion, FinishReason, Request, RowError, Timing
from adaflash_batch.stats import SpeculationCounts


class Decoder:
    """Continuous batching with speculation.

    Args:
        target: the model whose choices make the text.
        drafter: proposes tokens; None decodes plainly.
        width: drafts verified a step; None takes all that the drafter proposes.
        gate: skips drafting while it does not pay; None always drafts.
        max_running: most requests in a step.
        token_budget: most tokens in a step.
        kv_tokens: tokens that KV memory holds, over all requests (rounded down to pages).
        context: longest prompt and completion together; None takes the model's.
        end_token_ids: the model's own end-of-sequence tokens.
        clock: seconds, for the timings.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Callable[[int], Drafter] | None = None,
        width: int | None = None,
        gate: SpeculationGate | None = None,
        max_running: int = 64,
        token_budget: int = 1024,
        kv_tokens: int,
        context: int | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool = PagePool(kv_tokens // PAGE)
        self._target = target
        self._kv = target.new_kv(pool.num_pages)
        self._drafter = None if drafter is None else drafter(pool.num_pages)
        block = 0 if self._drafter is None else self._drafter.block_size
        self._width = 0 if block == 0 else block - 1
        if width is not None:
            self._width = min(width, self._width)
        if self._drafter is not None:
            target.tap(self._drafter.tapped_layers)
        self._scheduler = Scheduler(
            pool, max_running=max_running, token_budget=token_budget, reserve=block
        )
        self.context = context if context is not None else target.context
        longest = min(self.context + block, pool.num_pages * PAGE)
        self._table = PageTable(max_running, longest)
        self.end_token_ids = end_token_ids
        self._clock = clock
        self.gate = None if self._drafter is None else gate
        self._entries: dict[ScheduledSequence, Entry] = {}
        self._finished: list[Completion] = []
        self._capture: Capture | None = None
        self._newest: Callable[[], DrafterWeights | None] | None = None
        self.num_steps = 0
        self.num_generated = 0
        self.num_prefilled = 0

    @property
    def target(self) -> Target:
        """The model."""
        return self._target

    def capture(
        self,
        layer_ids: tuple[int, ...],
        emit: Callable[[Trajectory], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """From now on hand the states of finished requests to `emit`; see `Capture`."""
        assert not self._entries, "requests are on their way already"
        self._capture = Capture(self._target, layer_ids, emit, wanted)

    def follow(self, newest: Callable[[], DrafterWeights | None]) -> None:
        """From now on draft with the weights that `newest` gives, where it gives some.

        It is asked before every step: between drafting and verifying weights never change.
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

    def add(self, request: Request) -> None:
        """Queue a request; one that can never run comes back from the next step with an error."""
        prompt, sampling = request.token_ids, request.sampling
        assert prompt, "a prompt has at least one token"
        limit = len(prompt) + sampling.max_new_tokens
        sequence = ScheduledSequence(known=len(prompt), limit=limit)
        entry = Entry(request, sequence, list(prompt), added=self._clock())
        if sampling.reshapes_logits:
            entry.history = TokenHistory(prompt=frozenset(prompt))
        error = self._misfit(limit, sequence)
        if error is not None:
            self._finished.append(self._completion(entry, "error", error))
            return
        self._entries[sequence] = entry
        self._scheduler.add(sequence)
        if self._capture is not None and self._capture.wanted():
            entry.recording = self._capture.begin(len(prompt), limit)

    def _misfit(self, limit: int, sequence: ScheduledSequence) -> RowError | None:
        if limit > self.context:
            message = f"prompt and max_new_tokens are {limit} tokens, the context is "
            return RowError("prompt_too_long", f"{message}{self.context}")
        pool = self._scheduler.pool
        if self._scheduler.pages_for(sequence) > pool.num_pages:
            message = f"prompt and max_new_tokens are {limit} tokens, KV memory holds "
            return RowError("kv_memory_too_small", f"{message}{pool.num_pages * PAGE}")
        return None

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Advance every scheduled request once; return what is finished."""
        self._adopt()
        began, plan = self._clock(), self._scheduler.plan(self._open_width())
        assert plan or not self._entries, "requests are left and none of them can move"
        if plan:
            items = self._draft(plan)
            packed = self._pack(items)
            choices, sound = self._verify(items, packed)
            survivors = self._commit(items, choices, sound)
            self._absorb(items, packed, survivors)
            self._record(items, packed)
            self.num_steps += 1
            self._observe(items, self._clock() - began)
        finished, self._finished = self._finished, []
        return finished

    def _open_width(self) -> int:
        """Drafts of the next step."""
        if self.gate is None or self.gate.opens(len(self._scheduler.running)):
            return self._width
        return 0

    def _observe(self, items: list[Item], seconds: float) -> None:
        """Tell the gate what the step took; not where most of it was prefill."""
        if self.gate is None:
            return
        sizes = [item.scheduled.num_known + len(item.drafts) for item in items]
        decoded = sum(s for s, item in zip(sizes, items, strict=True) if item.is_single)
        if 2 * decoded >= sum(sizes):
            drafted = any(item.drafts for item in items)
            self.gate.observe(seconds * decoded / sum(sizes), drafted=drafted)

    def _adopt(self) -> None:
        """Take new weights for the drafter, if there are some."""
        weights = None if self._newest is None else self._newest()
        if weights is not None and self._drafter is not None:
            self._drafter.adopt(weights)
            if self.gate is not None:
                self.gate.expect_change()

    def _draft(self, plan: list[Scheduled]) -> list[Item]:
        """Ask the drafter for those that verify drafts in this step."""
        wanting = [item for item in plan if item.width > 0]
        drafts: dict[ScheduledSequence, list[int]] = {}
        if wanting and self._drafter is not None:
            sequences = [item.sequence for item in wanting]
            batch = DraftBatch(
                keys=[self._entries[sequence].request.key for sequence in sequences],
                anchors=[self._entries[sequence].tokens[-1] for sequence in sequences],
                positions=np.array([sequence.computed for sequence in sequences], dtype=np.int32),
                table=self._table.rows(sequences),
            )
            proposed = [draft.token_ids for draft in self._drafter.draft(batch)]
            drafts = dict(zip(sequences, proposed, strict=True))
            for sequence in sequences:
                self._mark_version(self._entries[sequence].counts)
        return [self._item(scheduled, drafts.get(scheduled.sequence, [])) for scheduled in plan]

    def _item(self, scheduled: Scheduled, drafts: list[int]) -> Item:
        entry = self._entries[scheduled.sequence]
        if entry.admitted is None:
            entry.admitted = self._clock()
        sequence, kept = scheduled.sequence, drafts[: scheduled.width]
        is_complete = sequence.computed + scheduled.num_known == sequence.known
        return Item(entry, scheduled, kept, len(drafts), len(kept) + 1 if is_complete else 0)

    def _mark_version(self, counts: SpeculationCounts) -> None:
        assert self._drafter is not None
        if counts.drafter_first is None:
            counts.drafter_first = self._drafter.version
        counts.drafter_last = self._drafter.version

    def _pack(self, items: list[Item]) -> Packed:
        pieces, contexts = [], []
        for item in items:
            begin = item.scheduled.sequence.computed
            known = item.entry.tokens[begin : begin + item.scheduled.num_known]
            pieces.append(known + item.drafts)
            contexts.append(begin)
        return pack(pieces, contexts, [item.num_choices for item in items])

    def _verify(self, items: list[Item], packed: Packed) -> tuple[list[int], list[bool]]:
        """One target forward; the target's choice behind every anchor and draft."""
        sequences = [item.scheduled.sequence for item in items]
        step = PackedStep(packed.start, packed.length, packed.context, self._table.rows(sequences))
        logits = self._target.forward(
            torch.from_numpy(packed.token_ids),
            torch.from_numpy(packed.positions),
            step,
            self._kv,
            torch.from_numpy(packed.rows),
        )
        return choose(logits, [self._block(item) for item in items if item.num_choices])

    def _block(self, item: Item) -> ChoiceBlock:
        entry = item.entry
        request = entry.request
        return ChoiceBlock(
            sampling=request.sampling,
            history=entry.history,
            drafts=item.drafts,
            key=(request.identity, request.key.sample),
            position=len(entry.tokens),
            end_ids=self._ends(entry),
        )

    def _ends(self, entry: Entry) -> frozenset[int]:
        sampling = entry.request.sampling
        own = frozenset() if sampling.ignore_eos else self.end_token_ids
        return own.union(sampling.stop_token_ids) if sampling.stop_token_ids else own

    def _commit(self, items: list[Item], choices: list[int], sound: list[bool]) -> list[int]:
        """Extend the texts. Returns for each item how many of its tokens stay in KV memory."""
        kept, row = [], 0
        for item in items:
            count = item.num_choices
            kept.append(self._advance(item, choices[row : row + count], sound[row : row + count]))
            row += count
        return kept

    def _advance(self, item: Item, choices: list[int], sound: list[bool]) -> int:
        entry, sequence = item.entry, item.scheduled.sequence
        num_known = item.scheduled.num_known
        if not item.is_verification:
            self.num_prefilled += num_known
        if not choices:
            sequence.computed += num_known
            return num_known
        emitted = emitted_tokens(item.drafts, choices)
        num_kept = len(emitted) - 1
        if not all(sound[: len(emitted)]):
            message = "the model's logits are not finite (NaN or infinity)"
            self._finish(entry, "error", RowError("bad_logits", message))
            return 0
        emitted, reason = self._until_end(entry, emitted)
        accepted = min(num_kept, len(emitted))  # nothing past the end counts
        if item.is_verification:
            entry.counts.record(item.num_drafted, len(item.drafts), accepted)
            if self.gate is not None and item.drafts:
                self.gate.count(1, accepted)
        self._extend(entry, emitted)
        sequence.computed += num_known + accepted
        if reason is not None:
            self._finish(entry, reason)
            return 0
        return num_known + accepted

    def _until_end(self, entry: Entry, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """Cut behind the token that ends the text, if one does."""
        ends, watch = self._ends(entry), entry.request.stop_watch
        room = entry.request.sampling.max_new_tokens - entry.num_generated
        for count, token in enumerate(emitted[:room], 1):
            if token in ends or (watch is not None and watch.feed(token)):
                return emitted[:count], "stop"
        return emitted[:room], "length" if len(emitted) >= room else None

    def _extend(self, entry: Entry, emitted: list[int]) -> None:
        entry.tokens += emitted
        entry.sequence.known += len(emitted)
        self.num_generated += len(emitted)
        if entry.history is not None:
            entry.history.extend(emitted)
        if entry.first_token is None:
            entry.first_token = self._clock()

    def _finish(self, entry: Entry, reason: FinishReason, error: RowError | None = None) -> None:
        entry.reason = reason
        self._scheduler.remove(entry.sequence)
        del self._entries[entry.sequence]
        self._finished.append(self._completion(entry, reason, error))

    def _completion(self, entry: Entry, reason: FinishReason, error: RowError | None) -> Completion:
        now = self._clock()
        admitted = entry.admitted if entry.admitted is not None else now
        first = entry.first_token if entry.first_token is not None else now
        return Completion(
            key=entry.request.key,
            token_ids=[] if error else entry.tokens[entry.num_prompt :],
            finish_reason=reason,
            prompt_tokens=entry.num_prompt,
            truncated_tokens=entry.request.truncated_tokens,
            counts=entry.counts,
            timing=Timing(admitted - entry.added, first - admitted, now - first),
            error=error,
        )

    def _absorb(self, items: list[Item], packed: Packed, kept: Sequence[int]) -> None:
        """Give the drafter what the target saw of the tokens that stay."""
        if self._drafter is None:
            return
        staying = [index for index, count in enumerate(kept) if count > 0]
        if not staying:
            return
        length = np.array([kept[index] for index in staying], dtype=np.int32)
        rows = torch.from_numpy(ranges(packed.start[staying], length))
        start = (np.cumsum(length) - length).astype(np.int32)
        table = self._table.rows([items[index].scheduled.sequence for index in staying])
        step = PackedStep(start, length, packed.context[staying], table)
        features = self._target.tapped(self._drafter.tapped_layers, rows)
        self._drafter.absorb(step, torch.from_numpy(packed.positions)[rows], features)

    def _record(self, items: list[Item], packed: Packed) -> None:
        """Keep what the target saw, of the texts that end in this step too."""
        if self._capture is None:
            return
        choice_rows = accumulate((item.num_choices for item in items[:-1]), initial=0)
        columns = (items, packed.start.tolist(), packed.context.tolist(), choice_rows)
        pieces = [
            piece_of(recording, item, *place)
            for item, *place in zip(*columns, strict=True)
            if (recording := item.entry.recording) is not None
        ]
        self._capture.record(pieces)
        for item in items:
            entry = item.entry
            if entry.recording is not None and entry.reason in ("stop", "length"):
                self._capture.finish(entry.recording, entry.request, entry.tokens)
