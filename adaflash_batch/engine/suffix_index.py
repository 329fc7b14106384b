"""Where the last tokens of a text stood before: in the text itself, and in finished texts.

Token ids are kept as characters: a search through a running text is then one of str's, and takes
about 2 µs in 2,000 tokens and 30 µs in 128,000 (one EPYC core, 2026-11), without an index of its
own. An index would take some 30 times the memory of the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# The last tokens by which finished texts are found, at the most; longer matches are found by their
# end. With 8 a request emits 0.2% more tokens a step and the index has three times as many entries.
_KEYED = 4
# A vote goes up to 3; it lies below the place, which is a text's number above 32 bits of offset.
_VOTE_BITS = 2
_MOST_VOTES = (1 << _VOTE_BITS) - 1
_NUMBER_SHIFT = 32 + _VOTE_BITS
_OFFSET_MASK = (1 << 32) - 1


class Match(NamedTuple):
    """Where the last tokens of a text stood before.

    Attributes:
        length: how many of them.
        text: in which text.
        end: what followed them begins here.
        votes: how much oftener than not this token followed of late, 0 to 3.
    """

    length: int
    text: str
    end: int
    votes: int


def as_text(token_ids: Iterable[int]) -> str:
    """Token ids, each below 1,114,112, as characters."""
    return "".join(map(chr, token_ids))


def common_suffix(text: str, end: int, other: str, most: int) -> int:
    """How many tokens before `end` are the last ones of `other` too, `most` at the most."""
    most, last, length = min(most, end, len(other)), len(other) - 1, 0
    while length < most and text[end - 1 - length] == other[last - length]:
        length += 1
    return length


def find_earlier(text: str, shortest: int, longest: int) -> Match | None:
    """The longest suffix of `text` that stands in it earlier, the latest such place.

    The two may overlap. Beyond `longest` tokens all are equally long.
    """
    found, length, before = None, shortest, len(text) - 1
    while length <= min(longest, before):
        start = text.rfind(text[-length:], 0, before)
        if start < 0:
            break
        end = start + length
        length = common_suffix(text, end, text, longest)
        found = Match(length, text, end, 0)
        length, before = length + 1, end - 1  # a longer one ends before this one
    return found


class SuffixIndex:
    """Finished texts, by every run of up to 4 tokens in them that something follows.

    Of what followed the same tokens the majority of late is kept (Boyer and Moore's vote, up to 3):
    a place is voted for by each later one with the same next token, against by each other, and
    replaced when no vote is left; those who vote for it move it to where they stand. With it a
    request emits 0.7% more tokens a step than with the latest place, and votes foretell acceptance.

    The oldest texts leave first. A token takes 105 to 175 bytes of memory, 280 while the dict is
    resized. Keys are hashes of 64 bits: two that collide cost a wrong draft.

    Attributes:
        num_tokens: in the texts that are kept, never above `max_tokens`.
    """

    def __init__(self, *, max_tokens: int, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= _KEYED <= longest
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._shortest, self._longest = shortest, longest
        self._places: dict[int, int] = {}
        self._texts: dict[int, str] = {}  # numbered one after the other
        self._next = 0

    @property
    def num_places(self) -> int:
        """Runs of 1 to 4 tokens that are kept with what followed them."""
        return len(self._places)

    def add(self, text: str, first: int) -> None:
        """Take in a text; tokens before offset `first` are never proposed, only led on from.

        Of a text that is longer than the whole index its end is kept.
        """
        surplus = max(len(text) - self._max_tokens, 0)
        text, first = text[surplus:], max(first - surplus, 0)
        while self._texts and self.num_tokens + len(text) > self._max_tokens:
            self._drop_oldest()
        number, self._next = self._next, self._next + 1
        self._texts[number] = text
        self.num_tokens += len(text)
        for end in range(max(first, self._shortest), len(text)):
            self._vote(text, end, number << _NUMBER_SHIFT | end << _VOTE_BITS)

    def find(self, text: str) -> Match | None:
        """The longest suffix of `text` that finished texts go on from, by its last 4 tokens."""
        for length in range(min(_KEYED, len(text)), self._shortest - 1, -1):
            suffix = text[-length:]
            value = self._places.get(hash(suffix))
            if value is None:
                continue
            found = self._texts[value >> _NUMBER_SHIFT]
            end = value >> _VOTE_BITS & _OFFSET_MASK
            if length == _KEYED:
                length = common_suffix(found, end, text, self._longest)
            return Match(length, found, end, value & _MOST_VOTES)
        return None

    def _vote(self, text: str, end: int, here: int) -> None:
        """Let a place vote in every length. Every finished token comes by here: it is kept flat."""
        places, texts, following = self._places, self._texts, text[end]
        for start in range(max(end - _KEYED, 0), end - self._shortest + 1):
            key = hash(text[start:end])
            value = places.get(key)
            if value is None:
                places[key] = here
                continue
            votes, other = value & _MOST_VOTES, texts[value >> _NUMBER_SHIFT]
            if other[value >> _VOTE_BITS & _OFFSET_MASK] == following:
                places[key] = here | (votes + 1 if votes < _MOST_VOTES else votes)
            else:
                places[key] = value - 1 if votes else here

    def _drop_oldest(self) -> None:
        number = self._next - len(self._texts)
        text, places = self._texts[number], self._places
        for end in range(self._shortest, len(text)):
            for start in range(max(end - _KEYED, 0), end - self._shortest + 1):
                key = hash(text[start:end])
                if places.get(key, -1) >> _NUMBER_SHIFT == number:
                    del places[key]
        del self._texts[number]
        self.num_tokens -= len(text)
