"""Learning in a thread of its own, beside the decoder's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.adapt.inline import InlineLearning
from adaflash_batch.adapt.publishing import TrainerCounters
from adaflash_batch.adapt.streams import own_stream
from adaflash_batch.stats import SpeculationCounts

# Of finished requests whose counts nobody takes, the last so many are remembered.
_REMEMBERED = 4096
# What may be learnt grows with time, not with steps: it is asked for again after so many seconds.
_PATIENCE_S = 0.1
_CPU = torch.device("cpu")


class News(NamedTuple):
    """What a trainer is told of the decode: counts of finished requests, and what is ahead now."""

    counts: tuple[SpeculationCounts, ...]
    ahead: Outlook


class NewsMailbox:
    """The newest outlook on its way to a trainer, with the counts since the last time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: deque[SpeculationCounts] = deque(maxlen=_REMEMBERED)
        self._ahead: Outlook | None = None
        self._is_fresh = self._is_closed = False

    def observe(self, counts: SpeculationCounts) -> None:
        """Leave the counts of a finished request; they go with the next outlook."""
        with self._changed:
            self._counts.append(counts)

    def put(self, ahead: Outlook) -> None:
        """Leave what is ahead, in place of what was; never waits for who takes it."""
        with self._changed:
            self._ahead, self._is_fresh = ahead, True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing follows."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self, patience: float | None = None) -> News | None:
        """The newest; None once the mailbox is closed.

        Args:
            patience: seconds to wait for an outlook that was not taken yet; then the last one is
                told again. None waits for ever. The first outlook is always waited for.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_fresh or self._is_closed, patience)
            self._changed.wait_for(lambda: self._ahead is not None or self._is_closed)
            if self._is_closed or self._ahead is None:
                return None
            self._is_fresh = False
            counts = tuple(self._counts)
            self._counts.clear()
            return News(counts, self._ahead)


def learn_until_closed(
    learner: InlineLearning, news: NewsMailbox, after_piece: Callable[[], None]
) -> None:
    """Learn by the newest outlook, a piece at a time, until the mailbox is closed."""
    has_learnt = False
    while (told := news.take(0.0 if has_learnt else _PATIENCE_S)) is not None:
        for counts in told.counts:
            learner.observe(counts)
        has_learnt = learner.advance(told.ahead)
        if has_learnt:
            after_piece()


class BesideDecoding:
    """What a trainer beside the decoder's thread hears and says; see Placement.

    Args:
        notify: takes lines for people, in the decoder's thread only.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._news, self._lines = NewsMailbox(), deque[str]()
        self._failure: BaseException | None = None

    @property
    def wants_texts(self) -> bool:
        """See Placement; what the control over there thinks is not asked."""
        return True

    def observe(self, counts: SpeculationCounts) -> None:
        """See Placement."""
        self._news.observe(counts)

    def between_steps(self, ahead: Outlook) -> None:
        """See Placement. Whatever ended the trainer is raised here, once."""
        self._tell()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._news.put(ahead)

    def _tell(self) -> None:
        while self._lines:
            self._notify(self._lines.popleft())


class ThreadLearning(BesideDecoding):
    """Runs a trainer in a thread; see Placement.

    Args:
        build: makes the learner; what it tells goes through the function that it is given.
        notify: takes lines for people, in the decoder's thread only.
        threads: CPU threads of its tensor operations.
        device: where it trains.
    """

    def __init__(
        self,
        build: Callable[[Callable[[str], None]], InlineLearning],
        *,
        notify: Callable[[str], None],
        threads: int,
        device: torch.device = _CPU,
    ) -> None:
        super().__init__(notify)
        self._threads, self._device = threads, device
        self._learner = build(self._lines.append)
        # As a daemon it cannot keep a job alive that ended by an error.
        self._thread = threading.Thread(target=self._run, name="adaflash trainer", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """See Placement."""
        return self._learner.seconds

    @property
    def counters(self) -> TrainerCounters:
        """See Placement."""
        return self._learner.counters

    @property
    def num_dropped(self) -> int:
        """See Placement."""
        return self._learner.num_dropped

    def close(self) -> None:
        """See Placement."""
        self._news.close()
        self._thread.join()
        self._tell()

    def _run(self) -> None:
        # Holds for this thread: OpenMP keeps the number for each.
        torch.set_num_threads(self._threads)
        try:
            with own_stream(self._device):
                learn_until_closed(self._learner, self._news, lambda: None)
        except Exception as error:
            self._failure = error
