"""Learning while the job runs: rounds of updates, of which only what proves better is published.

A round is a number of updates; then its weights and those that are served are scored on the same
held-back texts. The better ones are served from there on (TIDE, arXiv 2602.05145). Ones that are a
little worse are only trained on: a round's gain is smaller than what chance does to a score. Where
they are worse than that, or something was not finite, weights and optimiser go back to those that
are served. Work is done in pieces, an update or the scoring of a text, so that whoever runs it can
stop between any two. Chance follows from the seed and the number of the update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from adaflash_batch.adapt.optimise import Trainer, Update
from adaflash_batch.adapt.publishing import Publisher, TrainerCounters, TrainerState
from adaflash_batch.adapt.randomness import seed_of
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.round_report import RoundReport
from adaflash_batch.adapt.scoring import Comparison, Scorer
from adaflash_batch.exchange import Trajectory, TrajectoryMailbox

_AVERAGE = "average."


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The shape of a round.

    Attributes:
        updates: how many.
        batch: trajectories an update.
        rate: learning rate of all updates.
        least_new: trajectories to train on that must have come since the round before.
        least_held_back: held-back ones that must be there to score.
        averaging: of the weights over updates, an exponential mean: after each update it keeps this
            share of itself. The mean is what is scored and published; 0 publishes the weights.
        tolerance: how much worse than what is served, as a share of τ, weights may be to be
            trained on.
        pull: after each update the weights go this share, times the learning rate, of the way back
            to those that are served; 0 is off.
        seed: decides what is drawn.
    """

    updates: int = 48
    batch: int = 8
    rate: float = 3e-4
    least_new: int = 64
    least_held_back: int = 4
    averaging: float = 0.0
    tolerance: float = 0.03
    pull: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class _Sums:
    """Of the updates of a round."""

    updates: int = 0
    loss: float = 0.0
    positions: int = 0
    clipped: float = 0.0

    def add(self, update: Update) -> None:
        self.updates += 1
        self.loss += update.loss
        self.positions += update.positions
        self.clipped += update.clip_rate * update.positions


@dataclass(slots=True)
class _Round:
    """The one under way: its work, and how far it is."""

    work: Generator[None, None, RoundReport]
    num_pieces: int
    pieces_done: int = 0
    seconds: float = 0.0
    sums: _Sums = field(default_factory=_Sums)


class OnlineTrainer:
    """Learns from the trajectories of a running job.

    Args:
        trainer: the drafter's master weights, as they are served now, and their optimiser.
        mailbox: where trajectories come from.
        pool: which of them are trained on.
        scorer: of the decoder's dtype, embedding and head.
        publisher: takes what proves better.
        plan: the shape of a round.
        version: number of the weights that are served now.
        clock: seconds, for the reports.
    """

    def __init__(
        self,
        trainer: Trainer,
        mailbox: TrajectoryMailbox,
        pool: ReplayPool,
        scorer: Scorer,
        publisher: Publisher,
        plan: RoundPlan,
        *,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert plan.least_new > 0, "a round would follow a round without end"
        self.version = version
        self.counters = TrainerCounters()
        self._trainer, self._mailbox, self._pool = trainer, mailbox, pool
        self._scorer, self._publisher, self._plan = scorer, publisher, plan
        self._clock, self._began = clock, 0.0
        self._average: dict[str, Tensor] = {}
        if plan.averaging:
            self._average = _copies(trainer.net.named_parameters())
        self._num_seen = 0
        self._round: _Round | None = None
        self._served = self._first = self._candidate()
        self._at_rest = self._snapshot(self.counters)

    def collect(self) -> None:
        """Take what the mailbox holds; what is not finite would poison every round, and is left."""
        for trajectory in self._mailbox.take_all():
            if _is_finite(trajectory):
                self._pool.add(trajectory)
                self.counters.texts += 1
                self.counters.tokens += len(trajectory.token_ids) - trajectory.prompt_length
            else:
                self.counters.refused += 1

    @property
    def num_dropped(self) -> int:
        """Trajectories that the mailbox had no room for."""
        return self._mailbox.num_dropped

    @property
    def is_ready(self) -> bool:
        """Whether there is something to do: a round under way, or enough for another."""
        return self._round is not None or (
            self._pool.num_added - self._num_seen >= self._plan.least_new
            and len(self._pool.held_back) >= self._plan.least_held_back
        )

    @property
    def round_done(self) -> float:
        """Share of the round under way that is done, about; 0 where none is."""
        done = self._round
        return 0.0 if done is None else min(done.pieces_done / done.num_pieces, 1.0)

    def advance(self) -> RoundReport | None:
        """Do one piece of the round under way, or of the next; the report where it was the last."""
        if self._round is None:
            self._num_seen = self._pool.num_added
            num_pieces = self._plan.updates + len(self._pool.held_back)
            self._round = _Round(self._run(), num_pieces)
        self._began = self._clock()
        try:
            next(self._round.work)
        except StopIteration as end:
            self._round = None
            report: RoundReport = end.value
            return report
        self._round.pieces_done += 1
        self._round.seconds += self._clock() - self._began
        return None

    def run_round(self) -> RoundReport:
        """Do a whole round, or what is left of it."""
        while True:
            report = self.advance()
            if report is not None:
                return report

    def close(self) -> None:
        """End what updates run in. May be repeated."""
        self._trainer.close()

    def _run(self) -> Generator[None, None, RoundReport]:
        for number in range(self._plan.updates):
            fault = self._update()
            if fault is not None:
                self.counters.not_finite += 1
                return self._end(None, f"the {fault} of update {number + 1} was not finite")
            yield
        candidate = self._candidate()
        held_back = self._pool.held_back
        comparison = yield from self._scorer.compare(
            candidate, self._served, held_back, self._first
        )
        if comparison is None or not comparison.is_better:
            self.counters.not_better += 1
            is_far = comparison is not None and comparison.gain < -self._plan.tolerance
            return self._end(comparison, "worse" if is_far else "not better", is_kept=not is_far)
        self._publish(candidate, comparison)
        return self._end(comparison, None)

    def _update(self) -> str | None:
        """One; what was not finite, if something was not."""
        plan, number = self._plan, self.counters.updates
        self.counters.updates += 1
        trajectories = self._pool.batch(number, plan.batch)
        anchors = torch.Generator().manual_seed(seed_of(plan.seed, "anchors", number))
        update = self._trainer.update(trajectories, anchors, plan.rate)
        if not update.positions:
            return None
        if update.is_dropped:
            return "gradient" if math.isfinite(update.loss) else "loss"
        assert self._round is not None
        self._round.sums.add(update)
        self._restrain()
        return None

    def _restrain(self) -> None:
        """The pull and the averaging that follow an update."""
        plan, tensors = self._plan, self._at_rest.tensors
        if plan.pull:
            prefix = "weight."
            began = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            self._trainer.pull(began, min(plan.pull * plan.rate, 1.0))
        if self._average:
            # Only then: several ranks have to send it.
            weights = dict(self._trainer.net.named_parameters())
            for name, average in self._average.items():
                average.lerp_(weights[name].detach(), 1.0 - plan.averaging)

    def _candidate(self) -> dict[str, Tensor]:
        """The weights that would be served, as copies in the dtype of decoding."""
        weights = self._average or dict(self._trainer.net.named_parameters())
        dtype = self._scorer.dtype
        return {name: each.detach().to(dtype, copy=True) for name, each in weights.items()}

    def _publish(self, candidate: dict[str, Tensor], comparison: Comparison) -> None:
        done = self.counters
        counters = replace(done, rounds=done.rounds + 1, published=done.published + 1)
        state = self._snapshot(counters)
        # Where it cannot be published nothing of this is so.
        self.version = self._publisher.publish(candidate, state, comparison)
        self.counters, self._served, self._at_rest = counters, candidate, state
        self._scorer.accept()

    def _end(
        self, comparison: Comparison | None, fault: str | None, *, is_kept: bool = False
    ) -> RoundReport:
        """Say what came of the round; with a fault go back to what is served, unless it is kept."""
        if fault is not None:
            self.counters.rounds += 1
            if not is_kept:
                self._go_back()
        assert self._round is not None
        sums = self._round.sums
        return RoundReport(
            number=self.counters.rounds,
            updates=sums.updates,
            seconds=self._round.seconds + self._clock() - self._began,
            loss=sums.loss / sums.updates if sums.updates else math.nan,
            clip_rate=sums.clipped / sums.positions if sums.positions else 0.0,
            tau_before=None if comparison is None else comparison.before,
            tau_after=None if comparison is None else comparison.after,
            tau_first=None if comparison is None else comparison.first,
            version=self.version,
            fault=fault,
            is_kept=is_kept,
        )

    def _go_back(self) -> None:
        self._load(self._at_rest.tensors)
        self._at_rest = TrainerState(self._at_rest.tensors, asdict(self.counters))

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self._trainer.restore(tensors)
        for name, average in self._average.items():
            average.copy_(tensors.get(_AVERAGE + name, tensors[f"weight.{name}"]))

    def _snapshot(self, counters: TrainerCounters) -> TrainerState:
        averages = {_AVERAGE + name: each for name, each in self._average.items()}
        tensors = _copies((self._trainer.state() | averages).items())
        return TrainerState(tensors, asdict(counters))

    def state(self) -> TrainerState:
        """Where training stood when the last round ended; a round under way is not in it."""
        return self._at_rest

    def restore(self, state: TrainerState, version: int) -> None:
        """Go on from a `state`, whose weights were published as this version."""
        self._round = None
        self.version = version
        self.counters = TrainerCounters(**state.counters)
        self._load(state.tensors)
        self._scorer.forget()
        self._served = self._first = self._candidate()
        self._at_rest = self._snapshot(self.counters)


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors}


def _is_finite(trajectory: Trajectory) -> bool:
    tensors = (trajectory.features, trajectory.last_hidden)
    return all(bool(each.isfinite().all()) for each in tensors if each is not None)
