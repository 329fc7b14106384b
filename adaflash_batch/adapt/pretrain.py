"""Trains a drafter on stored trajectories; what a step does follows from the seed and its number.

So nothing random need be kept: a killed training goes on from its last saved step to the very
weights that it would have had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash_batch.adapt.evaluate import Acceptance, evaluate
from adaflash_batch.adapt.optimise import DrafterTrainer, learning_rate
from adaflash_batch.adapt.randomness import seed_of
from adaflash_batch.adapt.training_state import Cursor, save_state
from adaflash_batch.adapt.trajectory_store import StoredTrajectory
from adaflash_batch.drafter.model import DFlash, Head

# What is looked at while training goes on; the end looks at everything.
_FEW_TRAJECTORIES = 48
_FEW_ANCHORS = 16


@dataclass(frozen=True, slots=True)
class Rounds:
    """The shape of a training.

    Attributes:
        seed: decides order and anchors.
        rounds: how often decoding and training take turns.
        batch: trajectories an update.
        steps: updates over all rounds, None for `epochs` passes in each.
        rate, warm_up: see `learning_rate`.
    """

    seed: int
    rounds: int
    batch: int
    steps: int | None
    epochs: float
    rate: float
    warm_up: float

    def steps_in(self, number: int, num_trajectories: int) -> int:
        """Updates of a round."""
        if self.steps is not None:
            return self.steps * (number + 1) // self.rounds - self.steps * number // self.rounds
        return max(1, math.ceil(self.epochs * num_trajectories / self.batch))

    def generator(self, *purpose: object) -> torch.Generator:
        """Randomness for one purpose of this training."""
        return torch.Generator().manual_seed(seed_of(self.seed, *purpose))

    def rate_at(self, number: int, step: int, num_steps: int) -> float:
        """The learning rate of a step of a round, both 0-based."""
        progress = (number + (step + 1) / num_steps) / self.rounds
        return learning_rate(self.rate, self.warm_up, progress)

    def batches(self, number: int, num_trajectories: int, first_step: int) -> Iterator[list[int]]:
        """The trajectories of each step from `first_step` on: whole shuffles, one after another."""
        shuffle, order = -1, torch.empty(0)
        place = first_step * self.batch
        while True:
            chosen = []
            for at in range(place, place + self.batch):
                if at // num_trajectories != shuffle:
                    shuffle = at // num_trajectories
                    draw = self.generator("order", number, shuffle)
                    order = torch.randperm(num_trajectories, generator=draw)
                chosen.append(int(order[at % num_trajectories]))
            yield chosen
            place += self.batch


class TrainingProgress(NamedTuple):
    """What a listener hears after each update.

    tau: of the last look at the held-out prompts, None before it.
    domains: τ by domain where this update was followed by a look, else empty.
    """

    step: int
    num_steps: int
    round: int
    loss: float
    hit_rate: float
    tau: float | None
    domains: Mapping[str, float]
    elapsed_s: float


@dataclass(slots=True)
class Evaluator:
    """Looks at held-out trajectories.

    Attributes:
        held_out: in the order of decoding.
        embedding: the target's.
        head, token_ids: as real decoding has them, see `DFlash.propose`.
    """

    held_out: Sequence[StoredTrajectory]
    embedding: Tensor
    head: Head
    token_ids: Tensor | None = None

    def glance(self, net: DFlash) -> dict[str, Acceptance]:
        """Some anchors of some held-out texts, by domain."""
        step = max(1, len(self.held_out) // _FEW_TRAJECTORIES)
        return self._by_domain(net, self.held_out[::step], _FEW_ANCHORS)

    def by_domain(self, net: DFlash) -> dict[str, Acceptance]:
        """Everything about every held-out text."""
        return self._by_domain(net, self.held_out, None)

    def _by_domain(
        self, net: DFlash, entries: Sequence[StoredTrajectory], most: int | None
    ) -> dict[str, Acceptance]:
        domains: dict[str, Acceptance] = {}
        for entry in entries:
            result = self._evaluate(net, entry, most)
            domains.setdefault(entry.domain, Acceptance()).add(result)
        return dict(sorted(domains.items()))

    def _evaluate(self, net: DFlash, entry: StoredTrajectory, most: int | None) -> Acceptance:
        trajectory = entry.read(with_teacher=False)
        return evaluate(
            net,
            trajectory,
            self.embedding,
            self.head,
            token_ids=self.token_ids,
            most_anchors=most,
        )


@dataclass(slots=True)
class Pretraining:
    """Runs rounds of updates and keeps their state on disk.

    Attributes:
        trainer: the drafter and its optimiser.
        rounds: the shape of the training.
        evaluator: None where no prompt is held out.
        folder: where the state is kept.
        cursor: how far it is.
        save_every: seconds between states.
        evaluate_every: updates between evaluations, 0 for none.
    """

    trainer: DrafterTrainer
    rounds: Rounds
    evaluator: Evaluator | None
    folder: Path
    cursor: Cursor
    save_every: float
    evaluate_every: int
    _losses: list[float] = field(default_factory=list)
    _tau: float | None = None
    _saved: float = 0.0

    def run_round(
        self, entries: Sequence[StoredTrajectory], report: Callable[[TrainingProgress], None]
    ) -> None:
        """Finish the cursor's round on these trajectories, and save."""
        cursor, number = self.cursor, self.cursor.round
        num_steps = self.rounds.steps_in(number, len(entries))
        batches = self.rounds.batches(number, len(entries), cursor.step)
        began, before = time.monotonic(), cursor.training_s
        self._saved = began
        while cursor.step < num_steps:
            chosen = [entries[index] for index in next(batches)]
            progress = self._step(number, num_steps, chosen)
            cursor.training_s = before + time.monotonic() - began
            report(progress._replace(elapsed_s=cursor.training_s))
            if time.monotonic() - self._saved >= self.save_every:
                self.save()
        cursor.round, cursor.step = number + 1, 0
        self.save()

    def _step(
        self, number: int, num_steps: int, chosen: Sequence[StoredTrajectory]
    ) -> TrainingProgress:
        cursor, teaches = self.cursor, self.trainer.needs_teacher
        trajectories = [entry.read(with_teacher=teaches) for entry in chosen]
        anchors = self.rounds.generator("anchors", number, cursor.step)
        rate = self.rounds.rate_at(number, cursor.step, num_steps)
        update = self.trainer.update(trajectories, anchors, rate)
        cursor.step += 1
        cursor.total_steps += 1
        cursor.num_dropped += update.is_dropped
        if not update.is_dropped:
            self._losses.append(update.loss)
        domains: dict[str, float] = {}
        if self.evaluate_every and cursor.total_steps % self.evaluate_every == 0:
            domains = self._look()
        return TrainingProgress(
            step=cursor.step,
            num_steps=num_steps,
            round=number,
            loss=update.loss,
            hit_rate=update.hit_rate,
            tau=self._tau,
            domains=domains,
            elapsed_s=0.0,
        )

    def _look(self) -> dict[str, float]:
        """τ of the held-out prompts by domain, where it is known."""
        if self.evaluator is None:
            return {}
        domains = self.evaluator.glance(self.trainer.working)
        self._tau = Acceptance.of(domains.values()).emitted_per_anchor
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self._losses.clear()
        if self._tau is not None:
            self.cursor.history.append((self.cursor.total_steps, loss, self._tau))
        found = {name: each.emitted_per_anchor for name, each in domains.items()}
        return {name: tau for name, tau in found.items() if tau is not None}

    def save(self) -> None:
        """Write the state."""
        save_state(self.folder, self.trainer.state(), self.cursor)
        self._saved = time.monotonic()
