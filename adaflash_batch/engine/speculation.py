"""Which drafts are verified in a step: whom the drafter drafts for, what lookup finds, how wide.

Before drafting only the past says what a block is worth, so that decides for whom the drafter runs;
afterwards its own head may say it of every block. Widths are chosen for the whole batch at once.
Where nothing pays, a block is drafted now and then and not verified: the text that follows tells
what would have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adaflash_batch.engine.acceptance import AcceptanceHistory
from adaflash_batch.engine.ahead import DraftsAhead
from adaflash_batch.engine.correction import Correction
from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.drafting import Draft, DraftBatch, Drafter
from adaflash_batch.engine.hindsight import Guess, Prospect
from adaflash_batch.engine.late_context import LateContext
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.packing import PageTable
from adaflash_batch.engine.policy import NOTHING, Candidate, Chosen, Policy
from adaflash_batch.engine.pricing import Foresight, Ledger, Load, Pace, Seconds, StepPrices
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.engine.sizes import MOST_LOOKED_UP
from adaflash_batch.engine.widths import Widths, choose_widths, who_drafts
from adaflash_batch.exchange import DrafterWeights
from adaflash_batch.stats import Calibration

# Share of the time that may go into blocks that are drafted only to see what they would be worth.
_PROBE_SHARE = 0.005
_MOST_SAVED_S = 0.5
# What drafts must promise over going without them: promises are no certainty, and the choice
# itself takes time.
_MARGIN = 1.03
# Steps with drafts after which one is made without.
_PLAIN_EVERY = 48
# Steps for which drafting is not thought of again once it did not pay.
_LEFT_ALONE = 8
# Of steps of decoding without drafts, one after the other, two in so many are looked at.
_OBSERVED_EVERY = 6
# Tokens that a request's step leaves to absorb, at most, where every step drafts.
_USUAL = 8
# How likely a good drafter's next token is right.
_HOPED = 0.7


class Speculator:
    """Chooses what is verified, and learns from what became of it.

    Args:
        policy: how much is verified.
        drafter: of blocks, if there is one.
        late: what it has still to absorb.
        ahead: what it drafted before it was asked; None where it never does.
        lookup: the other source, if it is wanted.
        cost: what steps take.
        table: the requests' pages.
        clock: seconds.
        times_drafts: whether the clock tells how long drafts take; else `note_drafts` is told.

    Attributes:
        num_plain: steps that verified nothing since that did not pay.
        blocks: what blocks of late were worth.
        calibration: of the survivals that decided, by source.
        drafting: whom the next step is likely to be drafted for, since the last was.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        drafter: Drafter | None,
        late: LateContext | None = None,
        ahead: DraftsAhead | None = None,
        lookup: Lookup | None,
        cost: StepCost,
        table: PageTable,
        clock: Callable[[], float],
        times_drafts: bool = True,
    ) -> None:
        self.num_plain = self._steps_since_plain = 0
        self._left_alone = self._num_left_alone = 0
        self._times_drafts = times_drafts
        self.calibration = {"block": Calibration(), "lookup": Calibration()}
        self._policy, self._lookup = policy, lookup
        self._drafter, self._late, self._ahead = drafter, late, ahead
        self.drafting: frozenset[ScheduledSequence] = frozenset()
        self._cost, self._table, self._clock = cost, table, clock
        self._correction = Correction()
        self._num_drafts = 0 if drafter is None else drafter.block_size - 1
        self.blocks = AcceptanceHistory(self._num_drafts)
        self._prices = StepPrices(cost, Load(1, 1, 1, 1))
        self._foresight = Foresight()
        self._probes_s = 0.0  # seconds that probes may take
        self._token_price = self._draft_s = 0.0
        self._num_alike = 0
        self._ledger = Ledger()
        self.pace = Pace()

    @property
    def most(self) -> int:
        """Drafts that a request may have to verify."""
        longest = max(self._num_drafts, MOST_LOOKED_UP if self._lookup is not None else 0)
        return longest if self._policy.most is None else min(self._policy.most, longest)

    def begin(self, tokens: Sequence[int]) -> Prospect:
        """A request comes."""
        return Prospect(None if self._lookup is None else self._lookup.begin(tokens))

    def adopt(self, weights: DrafterWeights) -> None:
        """The drafter drafts with other weights from now on."""
        assert self._drafter is not None
        self._drafter.adopt(weights)
        self.blocks.expect_change()
        self._correction.expect_change()

    def choose(self, candidates: Sequence[Candidate], load: Load) -> list[Chosen]:
        """What each of them verifies in this step."""
        self._prices, self._draft_s = StepPrices(self._cost, load), 0.0
        self.drafting = frozenset()
        if not candidates:
            return []
        if self._policy.only_if_it_pays and self._ledger.bars():
            self.num_plain += 1
            return [NOTHING] * len(candidates)
        if self._is_plain_due:
            self._steps_since_plain = 0
            return [NOTHING] * len(candidates)
        found = [self._look_up(each) for each in candidates]
        blocks: list[Guess | None] = [None] * len(candidates)
        wanted = self._for_whom(candidates, found)
        for index, block in zip(wanted, self._draft([candidates[i] for i in wanted]), strict=True):
            blocks[index] = block
        for each, *guesses in zip(candidates, blocks, found, strict=True):
            for guess in filter(None, guesses):
                each.prospect.expect(guess, len(each.tokens))
        best = [self._better(block, other) for block, other in zip(blocks, found, strict=True)]
        widths = self._widths(best, candidates, len(wanted))
        self.num_plain += not any(widths)
        self._steps_since_plain = self._steps_since_plain + 1 if any(widths) else 0
        self.drafting = self._likely(candidates, blocks, best, widths)
        pairs = zip(blocks, found, strict=True)
        drafted = [sum(len(guess.token_ids) for guess in pair if guess) for pair in pairs]
        return list(map(Chosen, best, widths, drafted))

    @property
    def _is_plain_due(self) -> bool:
        """Whether a step without drafts is to show again what that takes.

        What is weighed is what drafts add to it, and machines change their pace.
        """
        return self._policy.only_if_it_pays and self._steps_since_plain >= _PLAIN_EVERY

    def _likely(
        self,
        candidates: Sequence[Candidate],
        blocks: Sequence[Guess | None],
        best: Sequence[Guess | None],
        widths: Sequence[int],
    ) -> frozenset[ScheduledSequence]:
        """Whom blocks were drafted for, if one is verified: probes are followed by nothing."""
        pairs = zip(best, widths, strict=True)
        if self._is_plain_due or not any(g and g.source == "block" and width for g, width in pairs):
            return frozenset()
        drafted = zip(candidates, blocks, strict=True)
        return frozenset(each.sequence for each, block in drafted if block)

    def _look_up(self, candidate: Candidate) -> Guess | None:
        if self._lookup is None or candidate.prospect.lookup is None:
            return None
        most = min(self.most, candidate.room)
        proposal = self._lookup.propose(candidate.prospect.lookup, most)
        if proposal is None:
            return None
        survival = self._lookup.acceptance.survival(proposal)
        return Guess("lookup", proposal.token_ids, survival, proposal=proposal)

    def _for_whom(
        self, candidates: Sequence[Candidate], found: Sequence[Guess | None]
    ) -> list[int]:
        """Whom the drafter drafts for."""
        if self._drafter is None:
            return []
        everyone = list(range(len(candidates)))
        if not (self._policy.only_if_it_pays and self._cost.is_known):
            return everyone
        if self._policy.widths == "survival":
            wanted = self._worth_drafting(candidates, found)
        else:
            wanted = everyone if self._pays_for_all(candidates) else []
        return wanted or self._probe(candidates)

    def _worth_drafting(
        self, candidates: Sequence[Candidate], found: Sequence[Guess | None]
    ) -> list[int]:
        if self._left_alone > 0 and self._num_left_alone == len(candidates):
            self._left_alone -= 1
            return []
        by_history = [self._by_history(each)[: each.room] for each in candidates]
        looked_up = [
            [] if guess is None else guess.survival[: each.room]
            for guess, each in zip(found, candidates, strict=True)
        ]
        seconds = self._prices.seconds(0)
        drafting = who_drafts(by_history, looked_up, self._cost.draft, seconds)
        without = drafting.without.speed * _MARGIN
        foreseen = self._foresight.speed(len(candidates), self._prices)
        if foreseen > max(drafting.step.speed, without):
            return list(range(len(candidates)))
        if drafting.requests and drafting.step.speed > without:
            return drafting.requests
        self._left_alone, self._num_left_alone = _LEFT_ALONE, len(candidates)
        return []

    def _pays_for_all(self, candidates: Sequence[Candidate]) -> bool:
        """Whether drafting for all and verifying all of it is faster than plain decoding."""
        kept = [self._by_history(each)[: min(each.room, self.most)] for each in candidates]
        emitted = len(candidates) + sum(map(sum, kept))
        seconds = self._prices.seconds(len(candidates))(np.array(sum(map(len, kept))))
        return bool(emitted / seconds > len(candidates) / self._prices.plain_s)

    def _probe(self, candidates: Sequence[Candidate]) -> list[int]:
        """One of them, if there is time for it: what follows tells what would be accepted."""
        price = self._cost.draft_at(1)
        if self._probes_s < price:
            return []
        self._probes_s -= price
        return [self.num_plain % len(candidates)]

    def _draft(self, candidates: Sequence[Candidate]) -> list[Guess]:
        """A block for each of them, those that were drafted ahead among them."""
        ahead = self._ahead
        made = [None if ahead is None else ahead.take(each.sequence) for each in candidates]
        pairs = list(zip(candidates, made, strict=True))
        others = iter(self._draft_now([each for each, draft in pairs if draft is None]))
        return [self._guess(each, draft or next(others)) for each, draft in pairs]

    def _draft_now(self, candidates: Sequence[Candidate]) -> list[Draft]:
        if not candidates or self._drafter is None:
            return []
        began, sequences = self._clock(), [each.sequence for each in candidates]
        if self._late is not None and self._late.hand_over(sequences) > _USUAL * len(sequences):
            began = self._clock()  # of a time without drafts: no price of drafting in every step
        batch = DraftBatch(
            keys=[each.key for each in candidates],
            anchors=[each.tokens[-1] for each in candidates],
            positions=np.array([each.computed for each in sequences], dtype=np.int32),
            table=self._table.rows(sequences),
        )
        drafts = self._drafter.draft(batch)
        if self._times_drafts:
            self.note_drafts([(len(candidates), self._clock() - began)])
        return drafts

    def note_drafts(self, taken: Sequence[tuple[int, float]]) -> None:
        """Take in what the step's drafts took: (requests, seconds)."""
        for num_requests, seconds in taken:
            self._draft_s += seconds
            self._cost.observe_draft(num_requests, seconds)

    def _guess(self, candidate: Candidate, draft: Draft) -> Guess:
        if draft.survival is None:
            survival = self._by_history(candidate)
        else:
            survival = self._correction.corrected(draft.survival)
            self._foresight.add(survival)
        stated, length = draft.survival, draft.length
        return Guess("block", draft.token_ids, survival, stated, length, place=draft.place)

    def _by_history(self, candidate: Candidate) -> list[float]:
        return self.blocks.survival(candidate.prospect.record)

    def _better(self, block: Guess | None, found: Guess | None) -> Guess | None:
        """The source with the larger expected gain at the present price of a verified token."""
        if block is None or found is None:
            return block or found
        gain = [self._gain(each.survival) for each in (block, found)]
        return found if gain[1] > gain[0] else block

    def _gain(self, survival: Sequence[float]) -> float:
        return sum(max(each - self._token_price, 0.0) for each in survival)

    def _widths(
        self, guesses: Sequence[Guess | None], candidates: Sequence[Candidate], num_blocks: int
    ) -> list[int]:
        rooms = [min(each.room, self.most) for each in candidates]
        sizes = [
            0 if guess is None else min(room, len(guess.token_ids))
            for guess, room in zip(guesses, rooms, strict=True)
        ]
        if not any(sizes):
            return sizes
        chosen = self._widest(guesses, sizes, self._prices.seconds(num_blocks))
        if num_blocks:  # there may be two sources to choose from
            self._token_price = self._prices.of_token(chosen, num_blocks)
        return chosen.widths if self._promises(chosen) else [0] * len(sizes)

    def _widest(
        self, guesses: Sequence[Guess | None], sizes: list[int], seconds: Seconds
    ) -> Widths:
        """By the policy, whether or not it pays."""
        if self._policy.widths == "survival" and self._cost.is_known:
            kept = [g.survival[:size] if g else [] for g, size in zip(guesses, sizes, strict=True)]
            return choose_widths(kept, seconds)
        widths = sizes
        if self._policy.widths == "adaflash":
            pairs = zip(guesses, sizes, strict=True)
            widths = [guess.adaflash_width(size) if guess else size for guess, size in pairs]
        verified = zip(guesses, widths, strict=True)
        emitted = len(sizes) + sum(guess.expected(width) for guess, width in verified if guess)
        plain_s, taken_s = seconds(np.array([0, sum(widths)])).tolist()
        return Widths(widths, emitted, taken_s, plain_s)

    def _promises(self, chosen: Widths) -> bool:
        """Whether it is expected to pay, blocks being drafted already."""
        if not (self._policy.only_if_it_pays and self._cost.is_known):
            return True
        plain = len(chosen.widths) * chosen.seconds
        return chosen.emitted * chosen.plain_seconds >= _MARGIN * plain

    def settle(self, prospect: Prospect, tokens: Sequence[int], *, is_over: bool) -> None:
        """Learn from what was committed: the request's tokens are these by now."""
        for outcome in prospect.outcomes(tokens, is_over=is_over):
            guess, accepted, known = outcome.guess, outcome.accepted, outcome.known
            if guess.proposal is not None and self._lookup is not None:
                self._lookup.acceptance.observe(guess.proposal, accepted, known)
            else:
                self.blocks.observe(prospect.record, accepted, known)
            # Behind a wrong token nothing is accepted, also where the text is not known yet.
            told = len(guess.token_ids) if accepted < known else known
            self.calibration[guess.source].observe_block(guess.survival, accepted, told)
            if guess.stated is not None:
                self._correction.observe(guess.stated[:told], accepted)

    def extend(self, prospect: Prospect, tokens: Sequence[int]) -> None:
        """These were committed behind a request's text."""
        if prospect.lookup is not None:
            prospect.lookup.extend(tokens)

    def end(self, prospect: Prospect) -> None:
        """A request's text is finished: others may be looked up in it."""
        if self._lookup is not None and prospect.lookup is not None:
            self._lookup.finish(prospect.lookup)

    def observe(
        self, load: Load, accepted: int, target_s: float, whole_s: float, *, is_decoding: bool
    ) -> None:
        """Take in what the step that was chosen last took.

        Args:
            load: all that it computed, drafts included.
            accepted: drafts that stay.
            target_s: of the target's pass and the choice of tokens.
            whole_s: of the step.
            is_decoding: whether most of it was decoding; prefill says nothing of drafts.
        """
        if not self.most:
            return
        cost = self._cost
        self._probes_s = min(self._probes_s + _PROBE_SHARE * whole_s, _MOST_SAVED_S)
        has_drafts = load.tokens > self._prices.load.tokens
        self._num_alike = 0 if has_drafts or not is_decoding else self._num_alike + 1
        if self._num_alike % _OBSERVED_EVERY > 1 and cost.is_known:
            return
        cost.observe_target(load.tokens, load.rows, load.keys, target_s)
        cost.observe_rest(load.running, max(whole_s - target_s - self._draft_s, 0.0))
        if is_decoding and has_drafts and cost.is_known:
            plain_s, decoding = self._prices.plain_s, self._prices.load.decoding
            self.pace.note_seconds(whole_s, plain_s)
            self._ledger.note(decoding, decoding + accepted, whole_s, plain_s)

    def outlook(self) -> tuple[float, float | None]:
        """τ, and what a step with drafts takes of one without, None while that is not known.

        Where nothing is drafted at present: what they would be with blocks as wide as those of a
        good drafter would be verified.
        """
        if self.pace.is_fresh or not self._cost.is_known:
            return self.pace.emitted, self.pace.price
        running = max(self._prices.load.decoding, 1)
        hoped = [[_HOPED ** (i + 1) for i in range(self._num_drafts)]] * running
        chosen = choose_widths(hoped, self._prices.seconds(running))
        kept = self.blocks.survival()[: max(chosen.widths)]
        return 1.0 + sum(kept), chosen.seconds / self._prices.plain_s

    def figures(self) -> dict[str, object]:
        """What guesses were worth, by source, and how well that was foreseen."""
        return {
            source: {"ece": found.ece, "reliability": found.curve()}
            for source, found in self.calibration.items()
            if found.ece is not None
        }
