"""The mailboxes between decoder and trainer: bounded, never waiting, nothing lost uncounted."""

from __future__ import annotations

import dataclasses
import threading

from hypothesis import given
from hypothesis import strategies as st
from trajectories import of_size, trajectory

from adaflash_batch.exchange import (
    DrafterWeights,
    NewestTrajectories,
    TrajectoryMailbox,
    WeightsMailbox,
)


def test_a_trajectory_knows_its_memory() -> None:
    given_ = trajectory(0, length=20)
    assert given_.last_hidden is not None
    tokens, features, hidden = 20 * 8, 19 * 144 * 4, 15 * 48 * 4
    assert given_.num_bytes == tokens + features + hidden
    assert dataclasses.replace(given_, last_hidden=None).num_bytes == tokens + features


@given(st.lists(st.integers(0, 12)), st.integers(0, 30))
def test_the_newest_that_fit_are_kept(sizes: list[int], max_bytes: int) -> None:
    newest, expected = NewestTrajectories(max_bytes), []
    for row, size in enumerate(sizes):
        before = len(newest)
        num_dropped = newest.add(of_size(row, size))
        assert len(newest) == before + 1 - num_dropped
        if size <= max_bytes:
            expected.append((row, size))
            while sum(size for _, size in expected) > max_bytes:
                expected.pop(0)
        assert [each.key.row for each in newest] == [row for row, _ in expected]
        assert newest.num_bytes == sum(size for _, size in expected) <= max_bytes


@given(st.lists(st.one_of(st.integers(0, 12), st.none())), st.integers(0, 30))
def test_what_is_put_is_taken_once_or_counted_as_dropped(
    events: list[int | None], max_bytes: int
) -> None:
    mailbox, taken, num_put = TrajectoryMailbox(max_bytes), [], 0
    for event in [*events, None]:
        if event is None:
            taken += [each.key.row for each in mailbox.take_all()]
        else:
            mailbox.put(of_size(num_put, event))
            num_put += 1
    assert taken == sorted(set(taken))
    assert len(taken) + mailbox.num_dropped == num_put
    assert mailbox.take_all() == []


def test_threads_lose_nothing() -> None:
    mailbox, taken = TrajectoryMailbox(10**9), []
    is_over = threading.Event()

    def put(first: int) -> None:
        for row in range(first, first + 500):
            mailbox.put(of_size(row, 1))

    def take() -> None:
        while not is_over.is_set():
            taken.extend(mailbox.take_all())

    putting = [threading.Thread(target=put, args=(first,)) for first in (0, 500, 1000)]
    taking = [threading.Thread(target=take) for _ in range(2)]
    for thread in putting + taking:
        thread.start()
    for thread in putting:
        thread.join()
    is_over.set()
    for thread in taking:
        thread.join()
    taken += mailbox.take_all()
    assert sorted(each.key.row for each in taken) == list(range(1500))
    assert mailbox.num_dropped == 0


def test_only_the_newest_weights_are_given_and_only_once() -> None:
    mailbox = WeightsMailbox()
    assert mailbox.take() is None
    weights = [DrafterWeights(version, {}) for version in range(3)]
    mailbox.put(weights[0])
    mailbox.put(weights[1])
    assert mailbox.take() is weights[1]
    assert mailbox.take() is None
    mailbox.put(weights[2])
    assert mailbox.take() is weights[2]
