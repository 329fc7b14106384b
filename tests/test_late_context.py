"""A drafter absorbs what it needs, once, in order, and only while its pages are the request's."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import ScriptedDrafter
from torch import Tensor

from adaflash_batch.engine.late_context import LateContext
from adaflash_batch.engine.packing import PageTable
from adaflash_batch.engine.scheduler import Sequence
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import PackedStep

WIDTH = 64


class Absorbed(NamedTuple):
    page: int
    position: int
    value: float


class Absorbing(ScriptedDrafter):
    """Notes the first page, position and features of all that it takes in."""

    def __init__(self) -> None:
        super().__init__(lambda key, position: [])
        self.seen: list[Absorbed] = []
        self.num_calls = 0

    def absorb(self, step: PackedStep, positions: Tensor, features: Tensor) -> None:
        super().absorb(step, positions, features)
        self.num_calls += 1
        rows = zip(
            step.start.tolist(), step.length.tolist(), step.table[:, 0].tolist(), strict=True
        )
        for start, length, page in rows:
            for row in range(start, start + length):
                self.seen.append(Absorbed(page, int(positions[row]), float(features[row, 0])))


def running(slot: int) -> Sequence:
    return Sequence(known=50, limit=200, pages=[10 * slot + at for at in range(6)], slot=slot)


def value_of(sequence: Sequence, position: int) -> float:
    return 1000.0 * sequence.pages[0] + position


class Step:
    """Feeds texts that grow."""

    def __init__(self, late: LateContext) -> None:
        self._late, self.ends = late, dict[Sequence, int]()

    def __call__(self, counts: dict[Sequence, int]) -> None:
        begins = [self.ends.get(each, 0) for each in counts]
        pairs = list(zip(counts.items(), begins, strict=True))
        rows = [value_of(each, begin + i) for (each, count), begin in pairs for i in range(count)]
        features = torch.tensor(rows).unsqueeze(1).repeat(1, WIDTH)
        self._late.add(list(counts), begins, list(counts.values()), features)
        for (each, count), begin in pairs:
            self.ends[each] = begin + count


def test_only_those_that_are_drafted_for_are_absorbed() -> None:
    drafter, (first, second) = Absorbing(), (running(0), running(1))
    late = LateContext(drafter, PageTable(2, 6 * PAGE))
    step = Step(late)
    for _ in range(5):
        step({first: 2, second: 1})
    late.hand_over([second])
    assert [each.position for each in drafter.seen] == [0, 1, 2, 3, 4]
    assert {each.page for each in drafter.seen} == {10}
    step({first: 1, second: 3})
    late.forget(first)  # it ends, and nothing was ever drafted for it
    late.hand_over([first, second])
    late.hand_over()
    assert [each.position for each in drafter.seen] == list(range(8))
    assert drafter.num_calls == 2, "it is called where nothing waits"


@pytest.mark.parametrize("num_steps", [3, 4])
def test_what_waits_is_bounded(num_steps: int) -> None:
    """By what holds it, parts of requests that are gone included."""
    drafter, (first, second) = Absorbing(), (running(0), running(1))
    step = Step(late := LateContext(drafter, PageTable(2, 6 * PAGE), most_bytes=3 * 4 * 4 * WIDTH))
    for _ in range(num_steps):
        step({first: 3, second: 1})
        late.forget(second)
    assert len(drafter.seen) == (0 if num_steps == 3 else 12)


@given(st.integers(0, 2**32))
def test_every_token_is_absorbed_once_and_before_its_request_is_drafted_for(seed: int) -> None:
    dice, drafter = random.Random(seed), Absorbing()
    late = LateContext(drafter, PageTable(4, 6 * PAGE), most_bytes=dice.choice([40 * WIDTH, 10**9]))
    step, requests = Step(late), [running(slot) for slot in range(4)]
    for _ in range(12):
        several = dice.sample(requests, dice.randint(1, 4))
        step({each: dice.randint(1, 4) for each in several})
        if dice.random() < 0.4:
            wanted = dice.sample(requests, dice.randint(1, 4))
            late.hand_over(wanted)
            absorbed = {page: sum(e.page == page for e in drafter.seen) for page in (0, 10, 20, 30)}
            for each in wanted:
                assert absorbed[each.pages[0]] == step.ends.get(each, 0)
    late.hand_over()
    expected = [
        Absorbed(each.pages[0], position, value_of(each, position))
        for each in requests
        for position in range(step.ends.get(each, 0))
    ]
    assert sorted(drafter.seen) == expected
    for page in (0, 10, 20, 30):
        positions = [each.position for each in drafter.seen if each.page == page]
        assert positions == sorted(positions)
