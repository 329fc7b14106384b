"""What a step emits, decided in one launch, equals what the host decides row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.engine.sampling import ChoiceBlock, decide
from adaflash_batch.kernels import accept as words
from adaflash_batch.kernels.accept import (
    Choosing,
    Rows,
    Rules,
    accept_beside,
    accept_reference,
    rules_of,
)
from adaflash_batch.request import Sampling

triton_accept = pytest.importorskip("adaflash_batch.kernels.triton_accept")
BLOCK = 128

GREEDY = Sampling()
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9, seed=2**64 - 3),
    Sampling(temperature=1.5, top_k=4, seed=-5),
    Sampling(temperature=0.7, min_p=0.2),
    Sampling(temperature=1.2, top_k=9, top_p=0.7, min_p=0.05),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies take several, the last of them not full."""
    monkeypatch.setattr(triton_accept, "_BLOCK", BLOCK)


@dataclasses.dataclass
class Case:
    logits: torch.Tensor
    rows: Rows
    rules: Rules
    requests: list[Choosing]

    def by_engine(self) -> list[list[int]]:
        """Rows of `Emitted.numbers`, from the engine's own functions."""
        found = []
        firsts, counts = self.rows.first.tolist(), self.rows.count.tolist()
        for request, first, count in zip(self.requests, firsts, counts, strict=True):
            numbers = [0, 0, 0, -1] + [-1] * self.rows.most
            if count:
                self._decide(numbers, request, first, count)
            found.append(numbers)
        return found

    def _decide(self, numbers: list[int], request: Choosing, first: int, count: int) -> None:
        drafts = self.rows.drafts[first : first + count - 1].tolist()
        block = ChoiceBlock(request.sampling, None, drafts, request.key, request.position)
        ends = frozenset(request.ends)
        block = dataclasses.replace(block, end_ids=ends, room=request.room)
        (found,) = decide(self.logits[first : first + count], [block])
        if not found.is_sound:
            numbers[2] = words.UNSOUND
            return
        reasons = {"stop": words.STOP, "length": words.LENGTH, None: words.GOES_ON}
        count, reason = len(found.tokens), reasons[found.reason]
        numbers[:4] = [count, found.accepted, reason, found.tokens[-1]]
        numbers[words.NUM_COUNTS : words.NUM_COUNTS + count] = found.tokens


def make_case(
    requests: list[Choosing],
    counts: list[int],
    vocabulary: int = 300,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    padding: int = 2,
) -> Case:
    """Drafts of which about every second is what the target chooses."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.tensor(counts, dtype=torch.int32)
    first = (count.cumsum(0) - count).int()
    request = torch.repeat_interleave(torch.arange(len(counts)), count.long()).int()
    request = torch.cat((request, torch.full((padding,), -1, dtype=torch.int32)))
    logits = (torch.randn(len(request), vocabulary, generator=generator) * 3).to(dtype)
    logits[len(request) - padding :] = torch.nan
    rules, most = rules_of(requests), max([*counts, 1])
    wrong = torch.full((len(request),), -1)
    plain = [each._replace(room=most + 1, ends=()) for each in requests]
    drafts = wrong.clone()
    for shift in range(most):  # the choice behind a right draft, row by row
        known = Rows(first, count, request, drafts, most)
        emitted = accept_reference(logits, known, rules_of(plain))
        at = first + shift
        for r in range(len(counts)):
            if shift < counts[r] and shift < int(emitted.count[r]):
                drafts[at[r]] = int(emitted.tokens[r, shift])
    is_wrong = torch.rand(len(request), generator=generator) < 0.3
    return Case(
        logits, Rows(first, count, request, drafts.where(~is_wrong, 5), most), rules, requests
    )


def check(case: Case) -> list[list[int]]:
    before = case.logits.clone()
    expected = case.by_engine()
    assert accept_reference(case.logits, case.rows, case.rules).numbers.tolist() == expected
    assert triton_accept.accept(case.logits, case.rows, case.rules).numbers.tolist() == expected
    assert torch.equal(before.nan_to_num(nan=7.0), case.logits.nan_to_num(nan=7.0))
    return expected


def request_of(sampling: Sampling, row: int = 0, room: int = 99, ends: Any = ()) -> Choosing:
    return Choosing(sampling, (2**64 - 1 - 977 * row, row % 3), 10 + row, room, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_ways_to_choose_side_by_side(dtype: torch.dtype) -> None:
    requests = [request_of(sampling, row) for row, sampling in enumerate(SAMPLINGS)]
    expected = check(make_case(requests, [3, 1, 0, 2, 1, 1], dtype=dtype, seed=3))
    assert {numbers[0] for numbers in expected} > {0, 1}


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 5), st.booleans()), min_size=1, max_size=6
    ),
    st.sampled_from([1, 2, 128, 129, 1000]),
    st.integers(0, 99),
)
def test_any_layout_of_greedy_requests(
    shapes: list[tuple[int, int, bool]], vocabulary: int, seed: int
) -> None:
    """Widths from 0 on, requests that choose nothing, ends and room that cut the text short."""
    requests = [
        request_of(GREEDY, row, room, tuple(range(0, vocabulary, 3))[:6] if has_ends else ())
        for row, (_, room, has_ends) in enumerate(shapes)
    ]
    case = make_case(requests, [count for count, _, _ in shapes], vocabulary, seed=seed)
    check(case)


@settings(max_examples=6)
@given(
    top_k=st.integers(0, 30),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    temperature=st.floats(0.05, 4.0),
    seed=st.integers(0, 99),
)
def test_filters_keep_what_the_host_keeps(
    top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    check(make_case([request_of(sampling, seed)], [1], 200, torch.bfloat16, seed, padding=0))


def test_ties_at_the_border_are_kept() -> None:
    """Also of both zeros; and -inf is never drawn, whatever the draw."""
    row = [1.0, 3.0, 1.0, 3.0, 1.0, 0.0, -0.0, -torch.inf, -2.0]
    grid = torch.linspace(1e-12, 1 - 1e-12, 6, dtype=torch.float64)
    rows = Rows(
        *(torch.arange(6).int(), torch.ones(6).int(), torch.arange(6).int()),
        torch.zeros(6).long(),
        1,
    )
    for top_k, kept in (
        (3, {0, 1, 2, 3, 4}),
        (2, {1, 3}),
        (6, {0, 1, 2, 3, 4, 5, 6}),
        (8, {*range(7), 8}),
    ):
        rules = rules_of([request_of(Sampling(temperature=4.0, top_k=top_k))] * 6)
        logits = torch.tensor(row, dtype=torch.bfloat16).expand(6, -1)
        drawn = triton_accept.accept(logits, rows, rules, grid)
        assert drawn.last.tolist() == accept_reference(logits, rows, rules, grid).last.tolist()
        assert set(drawn.last.tolist()) <= kept
        assert {min(kept), max(kept)} <= set(drawn.last.tolist())


def test_unsound_rows_matter_only_where_their_choice_does() -> None:
    requests = [
        request_of(sampling, row) for row, sampling in enumerate([GREEDY, SAMPLINGS[1]] * 3)
    ]
    case = make_case(requests, [2] * 6)
    case.rows.drafts[[0, 2, 4, 6, 8, 10]] = -1  # the second rows do not matter
    case.logits[1] = torch.nan
    case.logits[4, 200] = torch.nan
    case.logits[6, 7] = torch.inf
    case.logits[10] = -torch.inf
    reasons = [numbers[2] for numbers in check(case)]
    assert reasons == [0, 0, words.UNSOUND, words.UNSOUND, 0, words.UNSOUND]


def test_every_number_of_parts_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([request_of(GREEDY, row) for row in range(3)], [2, 1, 3], 2000)
    case.logits[:, 1500:] = case.logits[:, :500]  # of equal logits the first is taken
    for enough in (1, 16, 1000):
        monkeypatch.setattr(triton_accept, "_ENOUGH", enough)
        check(case)


def test_each_form_runs_beside_its_kind_of_attention() -> None:
    case = make_case([request_of(SAMPLINGS[2])], [2])
    assert accept_beside("triton") is triton_accept.accept
    found = accept_beside("torch")(case.logits, case.rows, case.rules)
    assert found.numbers.tolist() == case.by_engine()
    assert found.last.tolist() == [found.tokens[0, int(found.count[0]) - 1]]
    assert found.accepted.tolist() == [int(found.count[0]) - 1]
    assert found.reason.tolist() == [words.GOES_ON]
