"""All that a trainer is built from, as plain values: it can be sent to another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaflash_batch.adapt.control import LearningControl, Rules
from adaflash_batch.adapt.inline import InlineLearning
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer, Trainer
from adaflash_batch.adapt.optimiser import OptimiserKind
from adaflash_batch.adapt.parameters import AdaptedParameters
from adaflash_batch.adapt.placement import Place
from adaflash_batch.adapt.publishing import TrainerState
from adaflash_batch.adapt.ranks import RankedTrainer, RankPlan, check_ranks
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.scoring import Scorer
from adaflash_batch.adapt.store_publisher import StorePublisher
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.versions import TrainingState, VersionStore
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import DrafterWeights, TrajectoryMailbox

# Of the memory for trajectories: what waits, the newest, those held back; the rest is replayed.
_WAITING, _RECENT, _HELD_BACK = 0.125, 0.25, 0.0625


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """How a job learns.

    Attributes:
        job: who learns, in words.
        longest: most tokens of a completion.
        rules: when it learns.
        round: the shape of a round.
        objective, gamma, anchors, optimiser, parameters, rank: see DrafterTrainer.
        replay_share: of an update's trajectories, from the whole job.
        memory_bytes: for trajectories.
        place: where the trainer runs.
        threads: CPU threads of one in a thread or process of its own; None takes half of the
            decoder's.
        ranks: processes that share its updates by DeepSpeed (ranks.py), each on a device of its
            own where the decoder's is a GPU; 1 does without.
        zero_stage: see RankPlan.
    """

    job: str
    longest: int
    rules: Rules = field(default_factory=Rules)
    round: RoundPlan = field(default_factory=RoundPlan)
    objective: Objective = field(default_factory=Objective)
    gamma: float = 4.0
    anchors: int = 16
    optimiser: OptimiserKind = "muon"
    parameters: AdaptedParameters = "all"
    rank: int = 8
    replay_share: float = 0.5
    memory_bytes: int = 2 * 2**30
    place: Place = "auto"
    threads: int | None = None
    ranks: int = 1
    zero_stage: int = 1

    def __post_init__(self) -> None:
        if self.ranks == 1:
            return
        check_ranks(self.optimiser)
        if self.parameters != "all":
            raise ConfigError(
                f"several trainer ranks move all parameters, not {self.parameters!r}",
                "give --adapt-parameters all or --adapt-ranks 1",
            )

    @property
    def waiting_bytes(self) -> int:
        """For trajectories that the trainer has not taken yet."""
        return int(self.memory_bytes * _WAITING)

    def pool(self) -> ReplayPool:
        """An empty one."""
        whole = self.memory_bytes
        return ReplayPool(
            seed=self.round.seed,
            recent_bytes=int(whole * _RECENT),
            replay_bytes=int(whole * (1.0 - _WAITING - _RECENT - _HELD_BACK)),
            held_back_bytes=int(whole * _HELD_BACK),
            replay_share=self.replay_share,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TrainerRecipe:
    """What a job's trainer is built from. It can be pickled; `to` the CPU first.

    Attributes:
        folder: of the checkpoint that drafts when the job begins.
        version: its number among the versions, None where it is none of them.
        facts: of the target.
        dtype: of decoding.
        compute: of forward and backward.
        embedding: the target's, [vocabulary, H], in the dtype of decoding.
        head: its lm_head, cut down to the drafter's vocabulary where it has one; likewise.
        plan: how the job learns.
        device: where it is trained.
    """

    folder: Path
    version: int | None
    facts: TargetFacts
    dtype: torch.dtype
    compute: torch.dtype
    embedding: Tensor
    head: Head
    plan: LearningPlan
    device: torch.device

    def to(self, device: torch.device) -> TrainerRecipe:
        """The same with its tensors there; where it is trained stays as it is."""
        head = self.head
        moved = Head(
            head.weight.to(device),
            None if head.row_of_token is None else head.row_of_token.to(device),
            None if head.token_ids is None else head.token_ids.to(device),
        )
        return dataclasses.replace(self, embedding=self.embedding.to(device), head=moved)

    def build(
        self,
        inbox: TrajectoryMailbox,
        store: VersionStore,
        hand_over: Callable[[DrafterWeights], None],
        notify: Callable[[str], None],
    ) -> InlineLearning:
        """The trainer under its control, where an earlier job left it if one did.

        Args:
            inbox: where trajectories come from.
            store: that its versions go to.
            hand_over: takes every version when it is on disk.
            notify: takes lines for people.

        Raises:
            ConfigError: the checkpoint or what the trainer left is damaged.
        """
        control = LearningControl(self.plan.rules)
        publisher = StorePublisher(
            self.folder,
            self.version,
            self.facts,
            self.dtype,
            self.plan.job,
            store,
            control,
            hand_over,
        )
        trainer = self._trainer(inbox, publisher)
        state = self._state(store, notify)
        if state is not None and self.version is not None:
            counters = state.facts["counters"]
            trainer.restore(TrainerState(state.tensors, counters), self.version)
            control.restore(state.facts["control"])
            publisher.begin_from(counters)
        return InlineLearning(trainer, control, notify=notify)

    def _state(self, store: VersionStore, notify: Callable[[str], None]) -> TrainingState | None:
        """What a trainer left with the version."""
        try:
            return None if self.version is None else store.training_state(self.version)
        except ConfigError as error:
            notify(f"the optimiser begins anew: {error}")
            return None

    def _trainer(self, inbox: TrajectoryMailbox, publisher: StorePublisher) -> OnlineTrainer:
        plan, device = self.plan, self.device
        scorer = Scorer(publisher.net.to(device), embedding=self.embedding, head=self.head)
        version, pool = self.version or 0, plan.pool()
        return OnlineTrainer(
            self._core(), inbox, pool, scorer, publisher, plan.round, version=version
        )

    def _core(self) -> Trainer:
        plan, net = self.plan, checkpoint.load(self.folder, self.facts, dtype=torch.float32)
        common: dict[str, Any] = {
            "embedding": self.embedding,
            "head": self.head,
            "objective": plan.objective,
            "gamma": plan.gamma,
            "anchors": plan.anchors,
            "weight_decay": 0.0,
            "compute": self.compute,
            "optimiser": plan.optimiser,
        }
        if plan.ranks > 1:
            ranks = RankPlan(self._devices(), stage=plan.zero_stage, threads=plan.threads)
            return RankedTrainer(net, **common, plan=ranks)
        moved: dict[str, Any] = {"parameters": plan.parameters, "rank": plan.rank}
        return DrafterTrainer(net.to(self.device), **common, **moved)

    def _devices(self) -> list[torch.device]:
        """One for each rank."""
        kind, count = self.device.type, self.plan.ranks
        if kind == "cpu":
            return [self.device] * count
        return [torch.device(kind, index) for index in range(count)]
