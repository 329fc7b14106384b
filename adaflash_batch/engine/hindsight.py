"""What became of guesses: the text that was committed behind an anchor tells it, later on.

A guess stands for the tokens behind an anchor. Guesses are made by rule and accepted where they
equal the target's own choice, so the text that follows reveals what verifying all of it would have
accepted, whatever part was verified. Only the text's end hides something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from adaflash_batch.engine.acceptance import RequestRecord
from adaflash_batch.engine.lookup import RequestLookup
from adaflash_batch.engine.lookup_acceptance import Proposal
from adaflash_batch.engine.widths import adaflash_width

Source = Literal["block", "lookup"]


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow an anchor.

    Attributes:
        source: the drafter's block, or a lookup.
        token_ids: at least one.
        survival: for each how likely it and all before it are right, never rising.
        stated: the same as the drafter's own head said it; None where it said nothing.
        length: see Draft.
        proposal: that a lookup made.
        place: see Draft; the tokens are known before any text is compared with them.
    """

    source: Source
    token_ids: list[int]
    survival: list[float]
    stated: list[float] | None = None
    length: float | None = None
    proposal: Proposal | None = None
    place: int | None = None

    def expected(self, width: int) -> float:
        """Of its first so many tokens, those that are right in the mean."""
        return sum(self.survival[:width])

    def adaflash_width(self, most: int) -> int:
        """What the scalar head would verify of it; `most` without such a head."""
        if self.length is None:
            return most
        return min(adaflash_width(self.length, len(self.token_ids)), most)


@dataclass(slots=True)
class _Pending:
    """A guess whose end is not known yet: `matched` of its tokens, from `begin` on, were right."""

    guess: Guess
    begin: int
    matched: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a full verification of a guess would have accepted.

    Attributes:
        accepted: tokens, from the first on.
        known: how many the text tells of; where `accepted` is less, the next one was wrong.
    """

    guess: Guess
    accepted: int
    known: int


@dataclass(slots=True, eq=False)
class Prospect:
    """What speculation knows of a request.

    Attributes:
        lookup: its place in the lookup; None where nothing is looked up.
        record: what was accepted of late.
    """

    lookup: RequestLookup | None = None
    record: RequestRecord = field(default_factory=RequestRecord)
    _pending: list[_Pending] = field(default_factory=list)

    def expect(self, guess: Guess, begin: int) -> None:
        """Remember a guess, of the tokens from index `begin` of the request's on."""
        self._pending.append(_Pending(guess, begin))

    def outcomes(self, tokens: Sequence[int], *, is_over: bool) -> Iterator[Outcome]:
        """Those of the guesses that are settled by now; with the text's end all are."""
        still = []
        for pending in self._pending:
            guess, begin = pending.guess.token_ids, pending.begin
            known = min(len(tokens) - begin, len(guess))
            matched = pending.matched
            while matched < known and guess[matched] == tokens[begin + matched]:
                matched += 1
            pending.matched = matched
            if matched == known < len(guess) and not is_over:
                still.append(pending)
            else:
                yield Outcome(pending.guess, matched, known)
        self._pending = still
