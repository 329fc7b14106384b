"""No page lost, none owned twice, everyone finishes, the budget holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.engine.pages import OutOfPages, PagePool
from adaflash_batch.engine.scheduler import Scheduled, Scheduler, Sequence
from adaflash_batch.kernels.page_size import PAGE


@given(st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 6)), max_size=60))
def test_pages_are_never_lost_nor_owned_twice(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(16)
    held: list[list[int]] = []
    for action, number in actions:
        if action == "t" and number <= pool.num_free:
            held.append(pool.take(number))
        elif action == "t":
            free = pool.num_free
            with pytest.raises(OutOfPages):
                pool.take(number)
            assert pool.num_free == free
        elif held and action == "s":
            pages = held[number % len(held)]
            pool.share(pages)
            held.append(list(pages))
        elif held:
            pool.release(held.pop(number % len(held)))
        owners = [page for pages in held for page in pages]
        for page in range(pool.num_pages):
            assert pool.owners(page) == owners.count(page)
        assert pool.num_free == pool.num_pages - len(set(owners))


def test_a_page_released_twice_is_a_bug_that_shows() -> None:
    pool = PagePool(2)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def plan_of(scheduler: Scheduler, width: int) -> list[Scheduled]:
    """A whole step, in which all drafts that there is room for are verified."""
    planned = scheduler.plan_decoding(width)
    taken = sum(item.num_known + item.width for item in planned)
    return planned + scheduler.plan_prefill(taken)


def check_invariants(scheduler: Scheduler, plan: list[Scheduled], budget: int, most: int) -> None:
    running, pool = scheduler.running, scheduler.pool
    held = [page for sequence in running for page in sequence.pages]
    assert len(held) == len(set(held)), "a page with two owners"
    assert pool.num_free + len(held) == pool.num_pages, "a page was lost"
    slots = [sequence.slot for sequence in running]
    assert len(set(slots)) == len(slots) <= most
    assert all(0 <= slot < most for slot in slots)
    assert all(not s.pages and s.slot < 0 and s.computed == 0 for s in scheduler.waiting)
    assert sum(item.num_known + item.width for item in plan) <= budget
    planned = [item.sequence for item in plan]
    assert len(set(map(id, planned))) == len(planned)
    for sequence, num_known, width in plan:
        assert sequence.slot >= 0
        assert num_known >= 1
        assert sequence.computed + num_known <= sequence.known
        assert width == 0 or (num_known == 1 and sequence.is_decoding)
        assert len(sequence.pages) * PAGE >= sequence.computed + num_known + width


def advance(plan: list[Scheduled], accept: st.DataObject) -> list[Sequence]:
    """What a decoder does to sequences; returns the finished."""
    finished = []
    for sequence, num_known, width in plan:
        reaches_end = sequence.computed + num_known == sequence.known
        sequence.computed += num_known
        if not reaches_end:
            continue
        accepted = accept.draw(st.integers(0, width))
        sequence.known += accepted + 1
        sequence.computed += accepted
        assert sequence.known <= sequence.limit
        if sequence.known == sequence.limit:
            finished.append(sequence)
    return finished


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=12),
    num_pages=st.integers(8, 24),
    most=st.integers(1, 6),
    budget=st.integers(2, 80),
    width=st.integers(0, 5),
    data=st.data(),
)
def test_everyone_finishes_within_the_budget(
    lengths: list[tuple[int, int]],
    num_pages: int,
    most: int,
    budget: int,
    width: int,
    data: st.DataObject,
) -> None:
    scheduler = Scheduler(
        PagePool(num_pages), max_running=most, token_budget=budget, reserve=width + 1
    )
    sequences = [Sequence(known=prompt, limit=prompt + new) for prompt, new in lengths]
    for sequence in sequences:
        scheduler.add(sequence)
    left = len(sequences)
    for _ in range(40_000):
        plan = plan_of(scheduler, width)
        check_invariants(scheduler, plan, budget, most)
        assert plan, "a step in which nobody moves"
        for sequence in advance(plan, data):
            scheduler.remove(sequence)
            left -= 1
        if left == 0:
            break
    assert left == 0
    assert scheduler.pool.num_free == num_pages
    assert not scheduler.running
    assert not scheduler.waiting


def test_the_longest_waiting_goes_first_and_the_latest_is_preempted() -> None:
    scheduler = Scheduler(PagePool(4), max_running=4, token_budget=256)
    first, second, third = (Sequence(known=PAGE, limit=3 * PAGE) for _ in range(3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    plan = plan_of(scheduler, 0)
    assert [item.sequence for item in plan] == [first, second, third]
    for sequence, num_known, _ in plan:  # each writes a page's last token and needs another page
        sequence.computed += num_known
        sequence.known += 1
    plan = plan_of(scheduler, 0)
    assert [item.sequence for item in plan] == [first, second]
    assert list(scheduler.waiting) == [third]
    assert scheduler.num_preemptions == 1


def test_a_full_batch_leaves_room_for_prefill() -> None:
    scheduler = Scheduler(PagePool(64), max_running=9, token_budget=16)
    decoding = [Sequence(known=2, limit=100) for _ in range(8)]
    for sequence in decoding:
        scheduler.add(sequence)
    for sequence, num_known, _ in plan_of(scheduler, 0):
        sequence.computed += num_known
        sequence.known += 1
    late = Sequence(known=50, limit=60)
    scheduler.add(late)
    plan = plan_of(scheduler, 7)
    assert late in [item.sequence for item in plan]
    assert sum(item.num_known + item.width for item in plan) <= 16
