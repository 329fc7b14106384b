"""Lookup: what stood behind the last tokens before, against searches without any index."""

from __future__ import annotations

from itertools import cycle, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.lookup_acceptance import Proposal
from adaflash_batch.engine.suffix_index import SuffixIndex, as_text

KEYED, LONGEST = 4, 6
# Three tokens, so that much repeats; one of them needs more than two bytes.
TOKENS = st.sampled_from([3, 40_000, 1_000_000])
TEXT = st.lists(TOKENS, min_size=1, max_size=40)
ROWS = st.lists(st.tuples(TEXT, TEXT), max_size=6)


def lookup(max_tokens: int = 10_000, shortest: int = 1, longest: int = LONGEST) -> Lookup:
    return Lookup(max_tokens=max_tokens, shortest=shortest, longest=longest)


def taught(rows: list[tuple[list[int], list[int]]], into: Lookup) -> Lookup:
    for prompt, completion in rows:
        request = into.begin(prompt)
        request.extend(completion)
        into.finish(request)
    return into


def by_source(found: list[Proposal]) -> dict[str, Proposal]:
    return {proposal.source: proposal for proposal in found}


def common(text: list[int], end: int, other: list[int]) -> int:
    """Tokens before `end` that are the other's last ones."""
    length = 0
    while length < min(end, len(other), LONGEST) and text[end - 1 - length] == other[-1 - length]:
        length += 1
    return length


@given(text=TEXT, shortest=st.integers(1, 4), num_drafts=st.integers(1, 8))
def test_own_proposals_follow_the_longest_match_and_the_latest_of_those(
    text: list[int], shortest: int, num_drafts: int
) -> None:
    engine = lookup(shortest=shortest)
    found = by_source(engine.candidates(engine.begin(text), num_drafts)).get("own")
    matches = [(common(text, end, text), end) for end in range(1, len(text))]
    length, end = max(matches, default=(0, 0))
    if length < shortest:
        assert found is None
        return
    expected = list(islice(cycle(text[end:]), num_drafts))
    assert found == Proposal(expected, length, "own", 0)


def elected(
    places: list[tuple[list[int], int]],
) -> tuple[list[int], int, int]:
    """The vote over all places where the same tokens stood, in their order."""
    (text, end), votes = places[0], 0
    for other, other_end in places[1:]:
        if text[end] == other[other_end]:
            text, end, votes = other, other_end, min(votes + 1, 3)
        elif votes:
            votes -= 1
        else:
            text, end = other, other_end
    return text, end, votes


@given(rows=ROWS, text=TEXT, shortest=st.integers(1, 4), num_drafts=st.integers(1, 8))
def test_job_proposals_are_those_of_a_search_through_all_finished_texts(
    rows: list[tuple[list[int], list[int]]], text: list[int], shortest: int, num_drafts: int
) -> None:
    engine = taught(rows, lookup(shortest=shortest))
    found = by_source(engine.candidates(engine.begin(text), num_drafts)).get("job")
    for length in range(min(KEYED, len(text)), shortest - 1, -1):
        places = []
        for prompt, completion in rows:
            led = [*prompt[-LONGEST:], *completion]
            ends = range(len(led) - len(completion), len(led))
            places += [(led, end) for end in ends if led[:end][-length:] == text[-length:]]
        if places:
            source, end, votes = elected(places)
            length = common(source, end, text) if length == KEYED else length
            assert found == Proposal(source[end : end + num_drafts], length, "job", votes)
            return
    assert found is None


@given(period=st.lists(TOKENS, min_size=1, max_size=5), times=st.integers(2, 5))
def test_a_text_that_repeats_itself_is_proposed_to_go_on(period: list[int], times: int) -> None:
    engine = lookup(longest=30)
    found = engine.propose(engine.begin(period * times), 12)
    assert found is not None
    assert found.token_ids == list(islice(cycle(period), 12))
    assert found.source == "own"


def test_nothing_is_proposed_behind_the_end_of_a_finished_text() -> None:
    engine = taught([([1], [2, 3, 4, 5])], lookup())
    ahead = engine.propose(engine.begin([3, 4]), 7)
    assert ahead is not None
    assert ahead.token_ids == [5]
    assert engine.propose(engine.begin([4, 5]), 7) is None


def test_a_prompt_of_another_row_leads_on_but_is_not_proposed() -> None:
    engine = taught([([1, 2, 3], [4, 5])], lookup())
    assert engine.propose(engine.begin([1, 2]), 7) is None
    led = engine.propose(engine.begin([9, 2, 3]), 7)
    assert led == Proposal([4, 5], 2, "job", 0)


def test_a_prompt_is_copied_from() -> None:
    engine = lookup()
    request = engine.begin([5, 6, 7, 8, 9])
    request.extend([6, 7])
    assert engine.propose(request, 2) == Proposal([8, 9], 2, "own", 0)


def test_no_drafts_wanted_none_proposed() -> None:
    engine = lookup()
    assert engine.propose(engine.begin([1, 1, 1]), 0) is None


@given(prompt=TEXT, completion=TEXT, data=st.data())
def test_texts_may_come_in_any_pieces(
    prompt: list[int], completion: list[int], data: DataObject
) -> None:
    engine = lookup()
    whole, pieces = engine.begin(prompt), engine.begin(prompt)
    whole.extend(completion)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(completion)), max_size=5)))
    for begin, end in pairwise([0, *cuts, len(completion)]):
        pieces.extend(completion[begin:end])
    assert pieces.text == whole.text
    assert engine.candidates(pieces, 7) == engine.candidates(whole, 7)
    other = lookup()
    engine.finish(whole)
    other.finish(pieces)
    request = engine.begin(prompt)
    assert engine.candidates(request, 7) == other.candidates(request, 7)


@given(texts=st.lists(TEXT, max_size=30), query=TEXT, max_tokens=st.integers(5, 60))
def test_old_texts_leave_and_are_never_proposed_from(
    texts: list[list[int]], query: list[int], max_tokens: int
) -> None:
    index = SuffixIndex(max_tokens=max_tokens, shortest=1, longest=LONGEST)
    kept: list[str] = []
    for tokens in texts:
        text = as_text(tokens)[-max_tokens:]
        index.add(as_text(tokens), 0)
        kept.append(text)
        while sum(map(len, kept)) > max_tokens:
            kept.pop(0)
        assert index.num_tokens == sum(map(len, kept))
        assert index.num_places <= KEYED * index.num_tokens
        match = index.find(as_text(query))
        if match is not None:
            assert match.text in kept
            behind = match.text[match.end - match.length : match.end]
            assert behind == as_text(query)[-match.length :]
            assert match.end < len(match.text)


def test_a_newest_text_is_always_found_however_many_came_before() -> None:
    engine = lookup(max_tokens=100)
    for row in range(300):
        engine = taught([([1], list(range(10 * row, 10 * row + 10)))], engine)
        found = engine.propose(engine.begin([10 * row + 2, 10 * row + 3]), 3)
        assert found is not None
        assert found.token_ids == list(range(10 * row + 4, 10 * row + 7))
    assert engine.num_tokens <= 100
    assert engine.propose(engine.begin([12, 13]), 3) is None


def test_of_a_text_longer_than_the_index_the_end_is_kept() -> None:
    engine = taught([([1, 2, 3], list(range(10, 30)))], lookup(max_tokens=8))
    assert engine.num_tokens == 8
    assert engine.propose(engine.begin([22]), 3) == Proposal([23, 24, 25], 1, "job", 0)
    assert engine.propose(engine.begin([21]), 3) is None


def test_the_job_backs_what_the_own_text_proposes() -> None:
    own = [1, 2, 3, 9, 1, 2]
    backed = taught([([7], [2, 3])] * 2, lookup())
    against = taught([([7], [2, 8])] * 2, lookup())
    assert by_source(backed.candidates(backed.begin(own), 1))["own"].support == 2
    assert by_source(against.candidates(against.begin(own), 1))["own"].support == 0


@pytest.mark.parametrize("right", ["own", "job"])
def test_the_source_that_proved_right_is_taken(right: str) -> None:
    engine = taught([([7], [2, 8, 8])], lookup())
    request = engine.begin([2, 3, 4, 2])
    for _ in range(100):
        for each in engine.candidates(request, 2):
            engine.acceptance.observe(each, 2 if each.source == right else 0, 2)
    found = engine.propose(request, 2)
    assert found is not None
    assert found.source == right
