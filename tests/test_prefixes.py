"""Pages of prompts that begin alike: computed once, never written while shared, never lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.engine.pages import OutOfPages, PagePool
from adaflash_batch.engine.prefixes import PrefixCache, page_keys
from adaflash_batch.engine.scheduler import Scheduled, Scheduler, Sequence
from adaflash_batch.kernels.page_size import PAGE

Draw = Callable[[int], int]
"""A number from 0 to this."""

TOKENS = st.lists(st.integers(0, 1), max_size=3 * PAGE)


@given(TOKENS, TOKENS)
def test_names_are_equal_where_all_tokens_up_to_the_end_are(one: list[int], two: list[int]) -> None:
    pairs = zip(page_keys(one), page_keys(two), strict=False)
    for number, (a, b) in enumerate(pairs, 1):
        assert (a == b) == (one[: number * PAGE] == two[: number * PAGE])
    assert len(page_keys(one)) == len(one) // PAGE
    assert len({*page_keys(one)}) == len(page_keys(one))


def test_a_page_is_found_behind_the_same_pages_alone() -> None:
    same, other = [7] * PAGE, [8] * PAGE
    assert page_keys(same + other)[1] != page_keys(other + other)[1]
    assert page_keys([1, 23, *same])[0] != page_keys([12, 3, *same])[0]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("tpfrc"), st.integers(0, 7)), max_size=60))
def test_kept_pages_are_given_up_for_room_and_never_lost(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    held: list[list[int]] = []
    for action, number in actions:
        if action == "t" and number <= cache.num_available:
            held.append(cache.take(number))
            assert all(pool.owners(page) == 1 for page in held[-1])
        elif action == "t":
            before = cache.num_available
            with pytest.raises(OutOfPages):
                cache.take(number)
            assert cache.num_available == before
        elif action == "f":
            found = cache.find([bytes([number])])
            cache.share(found)
            held.append(found)
        elif held and action == "p":
            pages = held[number % len(held)]
            cache.put([bytes([page]) for page in pages], pages)
        elif held and action == "r":
            cache.release(held.pop(number % len(held)))
        elif action == "c":
            cache.clear()
            assert cache.num_kept == 0
        owners = Counter(page for pages in held for page in pages)
        kept = [cache.find([bytes([page])]) == [page] for page in range(8)]
        assert sum(kept) == cache.num_kept
        assert [pool.owners(page) for page in range(8)] == [owners[p] + kept[p] for p in range(8)]
        assert cache.num_available == 8 - len(owners)


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool)
    for name in ("ab", "cd"):
        pages, keys = cache.take(2), [letter.encode() for letter in name]
        cache.put(keys, pages)
        cache.release(pages)
    found = cache.find([b"a", b"b"])
    cache.share(found)
    cache.release(found)
    gone = []
    for _ in range(4):
        cache.take(1)
        gone += [x for x in "abcd" if x not in gone and not cache.find([x.encode()])]
    assert gone == ["d", "c", "b", "a"]


def first(most: int) -> int:
    """Nothing is left to chance."""
    return 0


@dataclass(slots=True)
class Story:
    """A request, and how often it computed each page of its prompt."""

    sequence: Sequence
    tokens: list[int]
    prompt: int
    computed: Counter[int] = field(default_factory=Counter)


class Machine:
    """A decoder without a model: what it writes to memory are the tokens themselves."""

    def __init__(self, scheduler: Scheduler, num_pages: int, reserve: int) -> None:
        self.scheduler, self.reserve = scheduler, reserve
        self.memory = [[-1] * PAGE for _ in range(num_pages)]
        self.stories: dict[Sequence, Story] = {}
        self.num_computed = 0

    def add(self, prompt: list[int], new: int, *, shares: bool) -> None:
        keys = page_keys(prompt) if shares else ()
        sequence = Sequence(known=len(prompt), limit=len(prompt) + new, keys=keys)
        self.stories[sequence] = Story(sequence, list(prompt), len(prompt))
        self.scheduler.add(sequence)

    def step(self, width: int, draw: Draw = first) -> list[Scheduled]:
        planned = self.scheduler.plan_decoding(width)
        taken = sum(item.num_known + item.width for item in planned)
        planned += self.scheduler.plan_prefill(taken)
        for item in planned:
            self._check_reads(item)
            self._write(item, draw)
        ended = []
        for item in planned:
            begin, count = item.sequence.computed, item.num_shareable
            whole = slice(begin // PAGE, (begin + count) // PAGE)
            self._commit(item, draw)
            self.scheduler.prefixes.put(item.sequence.keys[whole], item.sequence.pages[whole])
            if item.sequence.known == item.sequence.limit:
                ended.append(item.sequence)
        for sequence in ended:
            self.scheduler.remove(sequence)
        return planned

    def _check_reads(self, item: Scheduled) -> None:
        sequence = item.sequence
        story = self.stories[sequence]
        found = [self.memory[page][place] for page in sequence.pages for place in range(PAGE)]
        assert found[: sequence.computed] == story.tokens[: sequence.computed]

    def _write(self, item: Scheduled, draw: Draw) -> None:
        """Known tokens, drafts (the right ones, here) and the drafter's block behind the anchor."""
        sequence = item.sequence
        story, begin = self.stories[sequence], sequence.computed
        end = begin + item.num_known
        self.num_computed += item.num_known
        if end == sequence.known:
            story.tokens += [draw(2) for _ in range(item.width + 1)]
            end += max(item.width, self.reserve if sequence.is_decoding else 0)
        for position in range(begin, end):
            page = sequence.pages[position // PAGE]
            assert self.scheduler.pool.owners(page) == 1, "a shared page is written to"
            is_text = position < len(story.tokens)
            self.memory[page][position % PAGE] = story.tokens[position] if is_text else -1
        for page in range(begin // PAGE, -(-end // PAGE)):
            story.computed[page] += page * PAGE >= begin

    def _commit(self, item: Scheduled, draw: Draw) -> None:
        sequence = item.sequence
        is_whole = sequence.computed + item.num_known == sequence.known
        sequence.computed += item.num_known
        if is_whole:
            accepted = draw(item.width)
            sequence.known += accepted + 1
            sequence.computed += accepted
            del self.stories[sequence].tokens[sequence.known :]

    def check(self) -> None:
        """No page lost, every owner known."""
        pool, prefixes = self.scheduler.pool, self.scheduler.prefixes
        owners = Counter(page for each in self.scheduler.running for page in each.pages)
        named = Counter[int]()
        for story in self.stories.values():
            for end in range(1, len(story.sequence.keys) + 1):
                named.update(prefixes.find(story.sequence.keys[:end])[end - 1 :])
        extra = [pool.owners(page) - owners[page] for page in range(pool.num_pages)]
        assert set(extra) <= {0, 1}
        assert sum(extra) == prefixes.num_kept
        assert all(extra[page] == 1 for page in named)
        assert prefixes.num_available == pool.num_pages - len(owners)
        assert all(not each.pages and each.computed == 0 for each in self.scheduler.waiting)
        for queue in (self.scheduler.running, list(self.scheduler.waiting)):
            assert queue == sorted(queue, key=lambda sequence: sequence.arrival)


TEMPLATES = [[0] * 5 * PAGE, [0] * 70 + [1] * 3 * PAGE, [0, 1] * 2 * PAGE]
ROWS = st.lists(
    st.tuples(
        *(st.integers(0, 2), st.integers(0, 140)),
        *(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(
    rows=ROWS,
    num_pages=st.integers(8, 24),
    most=st.integers(1, 6),
    budget=st.integers(2, 80),
    width=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_everyone_reads_its_own_tokens_and_finishes(
    rows: list[tuple[int, int, list[int], int]],
    num_pages: int,
    most: int,
    budget: int,
    width: int,
    seed: int,
) -> None:
    pool, reserve = PagePool(num_pages), width + 1
    scheduler = Scheduler(pool, max_running=most, token_budget=budget, reserve=reserve)
    machine = Machine(scheduler, num_pages, reserve)

    dice = random.Random(seed)

    def draw(most: int) -> int:
        return dice.randint(0, most)

    later = list(rows)
    for _ in range(40_000):
        while later and draw(1):
            template, cut, tail, new = later.pop()
            shares = draw(4) > 0
            machine.add(TEMPLATES[template][:cut] + tail, new, shares=shares)
        has_work = bool(scheduler.running or scheduler.waiting)
        planned = machine.step(width, draw)
        assert bool(planned) == has_work, "a step in which nobody moves"
        assert sum(item.num_known + item.width for item in planned) <= budget
        machine.check()
        if not later and not (scheduler.running or scheduler.waiting):
            break
    assert all(s.known == s.limit for s in machine.stories)
    assert len(machine.stories) == len(rows)
    scheduler.prefixes.clear()
    assert pool.num_free == num_pages


@settings(max_examples=80, deadline=None)
@given(
    rows=ROWS,
    most=st.integers(1, 12),
    budget=st.integers(2, 200),
)
def test_with_room_every_page_is_computed_once(
    rows: list[tuple[int, int, list[int], int]], most: int, budget: int
) -> None:
    """However the requests come; only a prompt's last token is computed again, with its page."""
    scheduler = Scheduler(PagePool(200), max_running=most, token_budget=budget, reserve=1)
    machine = Machine(scheduler, 200, 1)
    for template, cut, tail, new in rows:
        machine.add(TEMPLATES[template][:cut] + tail, new, shares=True)
    while scheduler.running or scheduler.waiting:
        machine.step(0)
    times = Counter[bytes]()
    for sequence, story in machine.stories.items():
        for number, key in enumerate(sequence.keys[: (story.prompt - 1) // PAGE]):
            times[key] += story.computed[number]
    assert scheduler.num_preemptions == 0
    assert set(times.values()) <= {0, 1}
    prompts = sum(story.prompt for story in machine.stories.values())
    decoded = sum(len(story.tokens) - story.prompt - 1 for story in machine.stories.values())
    assert machine.num_computed + scheduler.num_shared == prompts + decoded


def machine_of(num_slots: int, num_pages: int = 64, budget: int = 512) -> Machine:
    scheduler = Scheduler(PagePool(num_pages), max_running=num_slots, token_budget=budget)
    return Machine(scheduler, num_pages, 0)


def planned_rows(machine: Machine) -> list[int]:
    """Which of the requests move in a step, by their numbers."""
    numbers = {sequence: number for number, sequence in enumerate(machine.stories)}
    return [numbers[item.sequence] for item in machine.step(0)]


def test_whoever_waits_for_a_page_keeps_its_place() -> None:
    alike, other = [3] * 70, [4] * 50
    machine = machine_of(num_slots=3)
    for prompt in (alike, [*alike, 5], other, [*other, 5]):
        machine.add(prompt, 9, shares=True)
    # Three places: one computes, one waits for it, and only the third is left for others.
    assert planned_rows(machine) == [0, 2]
    assert planned_rows(machine) == [0, 2, 1]
    assert [s.arrival for s in machine.scheduler.running] == [0, 1, 2]
    machine = machine_of(num_slots=2)
    for prompt in (alike, [*alike, 5], other):
        machine.add(prompt, 9, shares=True)
    assert planned_rows(machine) == [0]
    assert planned_rows(machine) == [0, 1]
    assert machine.scheduler.num_shared == 2 * PAGE


def test_what_is_kept_preempts_nobody_and_keeps_nobody_out() -> None:
    machine = machine_of(num_slots=2, num_pages=4)
    for token in range(5):
        machine.add([token] * 3 * PAGE, 4, shares=True)
        while machine.scheduler.running or machine.scheduler.waiting:
            machine.step(0)
    assert machine.scheduler.prefixes.num_kept == 3
    machine.add([9] * (4 * PAGE - 10), 10, shares=True)
    assert planned_rows(machine) == [5]
    assert machine.scheduler.num_preemptions == 0


def test_a_preempted_request_finds_its_pages_again() -> None:
    machine = machine_of(num_slots=2, num_pages=6)
    machine.add([1] * PAGE, 2 * PAGE, shares=True)
    machine.add([2] * (2 * PAGE + 5), 2 * PAGE, shares=True)
    scheduler, (_, second) = machine.scheduler, machine.stories
    while scheduler.running or scheduler.waiting:
        machine.step(0)
        machine.check()
    assert second.num_preemptions == scheduler.num_preemptions == 1
    # Only what lies behind the whole pages of its prompt is computed anew.
    assert [machine.stories[second].computed[page] for page in range(4)] == [1, 1, 2, 2]
    assert scheduler.num_shared == 0, "no other request's"
