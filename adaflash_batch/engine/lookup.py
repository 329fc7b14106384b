"""Drafts without a drafter: what followed the last tokens where they stood before.

They are looked for in the request's own text, prompt included, and in the job's finished texts.
Nothing here runs a model or reads a clock; a request's lookup takes some microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from adaflash_batch.engine.lookup_acceptance import LookupAcceptance, Proposal
from adaflash_batch.engine.suffix_index import Match, SuffixIndex, as_text, find_earlier

_MOST_SUPPORT = 3


class RequestLookup:
    """The text of a request so far. A request that is preempted keeps it."""

    __slots__ = ("num_prompt", "text")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.text = as_text(prompt)
        self.num_prompt = len(prompt)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add what was committed."""
        self.text += as_text(token_ids)


class Lookup:
    """The lookup of a job: its finished texts, and what is known of how good proposals are.

    The same calls in the same order give the same proposals. A job that goes on after it was
    ended begins with no finished texts: only speed depends on them.

    Args:
        max_tokens: of finished texts that are kept; the oldest leave first.
        shortest: matches of fewer tokens are not looked at, 1 to 4.
        longest: beyond so many tokens all matches are equally long, at least 4.

    Attributes:
        acceptance: predicts how far proposals are right. `propose` chooses by it, so whoever
            knows what came of a proposal tells it.
    """

    def __init__(self, *, max_tokens: int, shortest: int = 1, longest: int = 16) -> None:
        self.acceptance = LookupAcceptance()
        self._shortest, self._longest = shortest, longest
        self._index = SuffixIndex(max_tokens=max_tokens, shortest=shortest, longest=longest)

    @property
    def num_tokens(self) -> int:
        """Of finished texts that are kept."""
        return self._index.num_tokens

    def begin(self, prompt: Sequence[int]) -> RequestLookup:
        """The state of a request that has nothing but its prompt."""
        return RequestLookup(prompt)

    def finish(self, request: RequestLookup) -> None:
        """From now on propose from this text too: its completion, and what led into it."""
        lead = min(request.num_prompt, self._longest)
        self._index.add(request.text[request.num_prompt - lead :], lead)

    def propose(self, request: RequestLookup, num_drafts: int) -> Proposal | None:
        """Up to `num_drafts` tokens that may come next, None where nothing is found.

        Of the two sources the one is taken that more is expected of, the own text where they
        are equal.
        """
        found = self.candidates(request, num_drafts)
        if len(found) < 2:
            return found[0] if found else None
        return max(found, key=self.acceptance.expected)

    def candidates(self, request: RequestLookup, num_drafts: int) -> list[Proposal]:
        """What is found in the own text, then what is found in the job's."""
        if num_drafts < 1:
            return []
        own = find_earlier(request.text, self._shortest, self._longest)
        job = self._index.find(request.text)
        found = []
        if own is not None:
            following = repeated(own.text[own.end : own.end + num_drafts], num_drafts)
            found.append(Proposal(_ids(following), own.length, "own", _support(own, job)))
        if job is not None:
            following = job.text[job.end : job.end + num_drafts]
            found.append(Proposal(_ids(following), job.length, "job", job.votes))
        return found


def repeated(text: str, length: int) -> str:
    """The text over and over, up to a length: a match that runs into the end is a period."""
    return (text * -(-length // len(text)))[:length]


def _support(own: Match, job: Match | None) -> int:
    """A token that the job's texts go on with too is right more often."""
    if job is None or own.text[own.end] != job.text[job.end]:
        return 0
    return min(job.votes + 1, _MOST_SUPPORT)


def _ids(text: str) -> list[int]:
    return list(map(ord, text))
