"""Learning in a job: a trainer beside its decoder, and versions on disk of what proves better."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.adapt.control import LearningControl, Rules
from adaflash_batch.adapt.inline import InlineLearning
from adaflash_batch.adapt.losses import Head, Objective
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.optimiser import OptimiserKind
from adaflash_batch.adapt.publishing import TrainerState
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.scoring import Comparison, Scorer
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.versions import Learnt, TrainingState, VersionStore
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import (
    DrafterWeights,
    Trajectory,
    TrajectoryMailbox,
    WeightsMailbox,
)
from adaflash_batch.request import Completion

# Of the memory for trajectories: what waits, the newest, those held back; the rest is replayed.
_WAITING, _RECENT, _HELD_BACK = 0.125, 0.25, 0.0625


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """How a job learns.

    Attributes:
        job: who learns, in words.
        rules: when it learns.
        round: the shape of a round.
        objective, gamma, anchors, optimiser: see DrafterTrainer.
        replay_share: of an update's trajectories, from the whole job.
        memory_bytes: for trajectories.
    """

    job: str
    rules: Rules = field(default_factory=Rules)
    round: RoundPlan = field(default_factory=RoundPlan)
    objective: Objective = field(default_factory=Objective)
    gamma: float = 4.0
    anchors: int = 16
    optimiser: OptimiserKind = "adamw"
    replay_share: float = 0.5
    memory_bytes: int = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Origin:
    """The drafter that a job begins with.

    Attributes:
        folder: of its checkpoint.
        version: its number in the store; None while it is not in there.
    """

    folder: Path
    version: int | None


@dataclass(slots=True)
class _Seen:
    """Trajectories that came since the last version."""

    rows: int = 0
    tokens: int = 0


class StorePublisher:
    """Keeps versions on disk, then hands their weights to the decoder.

    Args:
        store: of the versions.
        origin: becomes the first version if the store has none.
        net: of the drafter's shape, in the dtype of decoding; written to.
        facts: of the target.
        outbox: to the decoder.
        control: whose state goes with each version.
    """

    def __init__(
        self,
        store: VersionStore,
        origin: Origin,
        net: DFlash,
        facts: TargetFacts,
        outbox: WeightsMailbox,
        control: LearningControl,
        job: str,
    ) -> None:
        self.seen = _Seen()
        self._store, self._origin, self._net, self._facts = store, origin, net, facts
        self._outbox, self._control, self._job = outbox, control, job
        self._version, self._updates = origin.version, 0

    @torch.no_grad()
    def publish(
        self, weights: Mapping[str, Tensor], state: TrainerState, comparison: Comparison
    ) -> int:
        """See Publisher. The version is whole on disk before anything is drafted with it."""
        if self._version is None:
            self._version = self._store.import_checkpoint(
                self._origin.folder, self._facts, self._job
            )
        for name, parameter in self._net.named_parameters():
            parameter.copy_(weights[name])
        learnt = Learnt(
            job=self._job,
            rows=self.seen.rows,
            tokens=self.seen.tokens,
            updates=state.counters["updates"] - self._updates,
            tau_before=comparison.before,
            tau_after=comparison.after,
        )
        facts = {"counters": dict(state.counters), "control": self._control.state()}
        kept = TrainingState(state.tensors, facts)
        self._version = self._store.publish(self._net, learnt, kept, parent=self._version)
        self.seen, self._updates = _Seen(), state.counters["updates"]
        self._outbox.put(DrafterWeights(self._version, weights))
        return self._version


class JobLearning:
    """What the loop of a job calls.

    Args:
        decoder: with a drafter; before its first request.
        origin: the drafter that it has.
        store: of its versions.
        plan: how it learns.
        facts: of the target.
        notify: takes lines for people.

    Attributes:
        is_on: whether it still learns; False after a version could not be kept.
    """

    def __init__(
        self,
        decoder: Decoder,
        origin: Origin,
        store: VersionStore,
        plan: LearningPlan,
        facts: TargetFacts,
        notify: Callable[[str], None],
    ) -> None:
        self._decoder, self._notify = decoder, notify
        self._control, self._pace = LearningControl(plan.rules), _Pace(decoder)
        waiting = int(plan.memory_bytes * _WAITING)
        self._inbox, outbox = TrajectoryMailbox(waiting), WeightsMailbox()
        net = drafter_net(origin, facts, decoder.target.dtype)
        self._publisher = StorePublisher(
            store, origin, net, facts, outbox, self._control, plan.job
        )
        self._trainer = self._build(origin, plan, facts, net)
        self._placement = InlineLearning(self._trainer, self._control, notify=notify)
        self._restore(store, origin)
        decoder.capture(net.config.target_layer_ids, self._take)
        decoder.follow(outbox.take)
        self.is_on = True

    def _build(
        self, origin: Origin, plan: LearningPlan, facts: TargetFacts, net: DFlash
    ) -> OnlineTrainer:
        target = self._decoder.target
        embedding, head = shared_parts(target, load_vocabulary(origin.folder, net.config))
        core = DrafterTrainer(
            drafter_net(origin, facts, torch.float32),
            embedding=embedding,
            head=head,
            objective=plan.objective,
            gamma=plan.gamma,
            anchors=plan.anchors,
            weight_decay=0.0,
            compute=compute_dtype(target),
            optimiser=plan.optimiser,
        )
        scorer = Scorer(net, embedding=embedding, head=head)
        return OnlineTrainer(
            core, self._inbox, _pool(plan), scorer, self._publisher, plan.round, version=origin.version or 0
        )
