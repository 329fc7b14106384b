"""Learning in the decoder's own thread, between its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.adapt.control import LearningControl, Verdict
from adaflash_batch.adapt.publishing import TrainerCounters
from adaflash_batch.adapt.trainer import OnlineTrainer
from adaflash_batch.stats import SpeculationCounts


class InlineLearning:
    """Runs a trainer by the rules of a control, a piece at a time; see Placement.

    Args:
        trainer: whose pieces are done.
        control: decides about every piece, and is charged what it took.
        notify: takes lines for people: what rounds came to, when learning stops and goes on.
        clock: seconds.

    Attributes:
        seconds: that pieces took.
    """

    def __init__(
        self,
        trainer: OnlineTrainer,
        control: LearningControl,
        *,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = 0.0
        self._trainer, self._control = trainer, control
        self._notify, self._clock = notify, clock
        self._has_stopped = self._has_refused = False
        self._began = replace(trainer.counters)

    @property
    def counters(self) -> TrainerCounters:
        """The trainer's, from here on."""
        now, began = asdict(self._trainer.counters), asdict(self._began)
        return TrainerCounters(**{name: now[name] - began[name] for name in now})

    @property
    def num_dropped(self) -> int:
        """See Placement."""
        return self._trainer.num_dropped

    @property
    def wants_texts(self) -> bool:
        """See Placement: not while learning has stopped and acceptance has not fallen."""
        return self._control.is_learning or self._control.has_fallen

    def observe(self, counts: SpeculationCounts) -> None:
        """Take in what speculation did for a finished request."""
        self._control.observe(counts)

    def between_steps(self, ahead: Outlook) -> None:
        """Learn as long as the control lets it; call it after every step."""
        while self.advance(ahead):
            pass

    def advance(self, ahead: Outlook) -> bool:
        """Take what has come and do the next piece if the control lets it; whether it did."""
        self._trainer.collect()
        self._tell_refused()
        if not self._trainer.is_ready:
            return False
        done = self._trainer.round_done
        verdict = self._control.decide(self._clock(), ahead, round_done=done)
        self._tell(verdict)
        if verdict.kind != "learn":
            return False
        self._do_piece()
        return True

    def close(self) -> None:
        """See Placement."""
        self._trainer.close()

    def _do_piece(self) -> None:
        began = self._clock()
        report = self._trainer.advance()
        taken = self._clock() - began
        self.seconds += taken
        self._control.charge(taken)
        if report is not None:
            self._control.end_round(report.gain, report.gained)
            self._notify(report.describe())

    def _tell_refused(self) -> None:
        if not self._has_refused and self._trainer.counters.refused > self._began.refused:
            self._has_refused = True
            self._notify(
                "a text with states that are not finite (NaN or infinity) is not learnt from"
            )

    def _tell(self, verdict: Verdict) -> None:
        has_stopped = verdict.kind == "stop"
        if has_stopped != self._has_stopped:
            self._notify(verdict.reason)
        self._has_stopped = has_stopped
