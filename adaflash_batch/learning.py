"""Learning in a job: a trainer beside its decoder, and versions on disk of what proves better."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp

import torch
from torch import Tensor

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.adapt.control import LearningControl, Rules
from adaflash_batch.adapt.inline import InlineLearning
from adaflash_batch.adapt.losses import Head, Objective
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.optimiser import OptimiserKind
from adaflash_batch.adapt.parameters import AdaptedParameters
from adaflash_batch.adapt.publishing import TrainerCounters, TrainerState
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.scoring import Comparison, Scorer
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.versions import Learnt, TrainingState, VersionStore
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.assembly import Assembly, Origin
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.packed_linear import can_pack
from adaflash_batch.engine.tables import embedding_table, head_weight
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import AdaflashError, ConfigError
from adaflash_batch.exchange import DrafterWeights, Trajectory, TrajectoryMailbox, WeightsMailbox
from adaflash_batch.request import Completion, Sampling
from adaflash_batch.spec import JobSpec

# Of the memory for trajectories: what waits, the newest, those held back; the rest is replayed.
_WAITING, _RECENT, _HELD_BACK = 0.125, 0.25, 0.0625
# Tokens that the pace of decoding looks back on.
_SPAN = 2000.0


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


def learning_plan(spec: JobSpec, sampling: Sampling) -> LearningPlan:
    """What a job's description says of learning."""
    adapt = spec.adapt
    return LearningPlan(
        job=spec.output.directory,
        longest=sampling.max_new_tokens,
        rules=Rules(share=adapt.share, only_if_it_pays=adapt.when == "pays"),
        round=RoundPlan(
            updates=adapt.updates,
            batch=adapt.batch,
            rate=adapt.rate,
            least_new=adapt.fresh,
            averaging=adapt.averaging,
            pull=adapt.pull,
            seed=sampling.seed,
        ),
        objective=Objective(adapt.objective, ce_weight=adapt.ce_weight, clip=adapt.clip),
        gamma=adapt.gamma,
        anchors=adapt.anchors,
        optimiser=adapt.optimiser,
        parameters=adapt.parameters,
        rank=adapt.rank,
        replay_share=adapt.replay_share,
        memory_bytes=adapt.memory_bytes,
    )


class JobLearning:
    """What the loop of a job calls: after every step, and when a chunk is committed.

    Args:
        assembly: a decoder with a drafter, before its first request.
        store: of the drafter's versions.
        plan: how it learns.
        notify: takes lines for people.
    """

    def __init__(
        self,
        assembly: Assembly,
        store: VersionStore,
        plan: LearningPlan,
        notify: Callable[[str], None],
    ) -> None:
        assert assembly.origin is not None
        self._decoder, self._store, self._notify = assembly.decoder, store, notify
        self._pace = _Pace(self._decoder, plan.longest)
        self._inbox = TrajectoryMailbox(int(plan.memory_bytes * _WAITING))
        outbox, control = WeightsMailbox(), LearningControl(plan.rules)
        self._publisher = _StorePublisher(assembly, store, outbox, control, plan.job)
        self._trainer = _trainer(assembly, plan, self._inbox, self._publisher)
        self._inline = InlineLearning(self._trainer, control, notify=notify)
        self._restore(assembly.origin, control)
        layers = self._publisher.net.config.target_layer_ids
        self._decoder.capture(layers, self._take)
        self._decoder.follow(outbox.take)
        self._began = replace(self._trainer.counters)
        self._has_failed = self._has_refused = False

    def _restore(self, origin: Origin, control: LearningControl) -> None:
        """Go on from what a trainer left with this version, if one did."""
        if origin.version is None:
            return
        try:
            state = self._store.training_state(origin.version)
        except ConfigError as error:
            self._notify(f"the optimiser begins anew: {error}")
            return
        if state is not None:
            counters = state.facts["counters"]
            self._trainer.restore(TrainerState(state.tensors, counters), origin.version)
            control.restore(state.facts["control"])
            self._publisher.updates = counters["updates"]

    def _take(self, trajectory: Trajectory) -> None:
        self._publisher.rows += 1
        self._publisher.tokens += len(trajectory.token_ids) - trajectory.prompt_length
        self._inbox.put(trajectory)

    def after_step(self, completions: Sequence[Completion], seconds: float, left: int) -> None:
        """Learn, if it is time to.

        Args:
            completions: that the step finished.
            seconds: that it took.
            left: requests of the job that are not finished.
        """
        self._pace.note(completions, seconds)
        for completion in completions:
            self._inline.observe(completion.counts)
        if self._has_failed:
            return
        try:
            self._inline.between_steps(self._pace.outlook(left))
        except (AdaflashError, OSError) as error:
            # Texts do not depend on learning, so a full disk must not end the job here.
            self._has_failed = True
            self._notify(f"learning has ended, no version can be kept any more: {error}")
        self._tell_refused()

    def _tell_refused(self) -> None:
        if not self._has_refused and self.counters.refused:
            self._has_refused = True
            self._notify(
                "a text with states that are not finite (NaN or infinity) is not learnt from"
            )

    def keep(self, version: int | None) -> None:
        """A part was committed with this version: it stays on disk until another one was."""
        self._store.pinned = frozenset() if version is None else frozenset({version})

    @property
    def seconds(self) -> float:
        """Spent on learning."""
        return self._inline.seconds

    @property
    def counters(self) -> TrainerCounters:
        """What came of it in this run."""
        now, began = asdict(self._trainer.counters), asdict(self._began)
        return TrainerCounters(**{name: now[name] - began[name] for name in now})


class _StorePublisher:
    """Keeps versions on disk, then hands their weights to the decoder.

    Attributes:
        net: of the drafter's shape, in the dtype of decoding; written to.
        rows, tokens: that came since the last version.
        updates: of the trainer when it was made.
    """

    def __init__(
        self,
        assembly: Assembly,
        store: VersionStore,
        outbox: WeightsMailbox,
        control: LearningControl,
        job: str,
    ) -> None:
        assert assembly.origin is not None
        self._origin, self._facts = assembly.origin, assembly.facts
        self._store, self._outbox, self._control, self._job = store, outbox, control, job
        self._version = assembly.origin.version
        dtype = assembly.decoder.target.dtype
        self.net = checkpoint.load(self._origin.folder, self._facts, dtype=dtype)
        self.net.requires_grad_(False)
        self.rows = self.tokens = self.updates = 0

    @torch.no_grad()
    def publish(
        self, weights: Mapping[str, Tensor], state: TrainerState, comparison: Comparison
    ) -> int:
        """See Publisher. A version is whole on disk before anything is drafted with it."""
        if self._version is None:
            folder = self._origin.folder
            self._version = self._store.import_checkpoint(folder, self._facts, self._job)
        for name, parameter in self.net.named_parameters():
            parameter.copy_(weights[name])
        facts = {"counters": dict(state.counters), "control": self._control.state()}
        self._version = self._store.publish(
            self.net,
            self._learnt(state, comparison),
            TrainingState(state.tensors, facts),
            parent=self._version,
        )
        self.rows, self.tokens, self.updates = 0, 0, state.counters["updates"]
        self._outbox.put(DrafterWeights(self._version, weights))
        return self._version

    def _learnt(self, state: TrainerState, comparison: Comparison) -> Learnt:
        return Learnt(
            job=self._job,
            rows=self.rows,
            tokens=self.tokens,
            updates=state.counters["updates"] - self.updates,
            tau_before=comparison.before,
            tau_after=comparison.after,
        )


def _trainer(
    assembly: Assembly, plan: LearningPlan, inbox: TrajectoryMailbox, publisher: _StorePublisher
) -> OnlineTrainer:
    target, origin, net = assembly.decoder.target, assembly.origin, publisher.net
    assert origin is not None
    embedding, head = embedding_table(target), _head(target, origin, net)
    core = DrafterTrainer(
        checkpoint.load(origin.folder, assembly.facts, dtype=torch.float32).to(target.device),
        embedding=embedding,
        head=head,
        objective=plan.objective,
        gamma=plan.gamma,
        anchors=plan.anchors,
        weight_decay=0.0,
        compute=_compute(target),
        optimiser=plan.optimiser,
        parameters=plan.parameters,
        rank=plan.rank,
    )
    scorer = Scorer(net.to(target.device), embedding=embedding, head=head)
    version = origin.version or 0
    return OnlineTrainer(core, inbox, _pool(plan), scorer, publisher, plan.round, version=version)


def _head(target: Target, origin: Origin, net: DFlash) -> Head:
    token_ids = load_vocabulary(origin.folder, net.config)
    if token_ids is None:
        return Head(head_weight(target))
    token_ids = token_ids.to(target.device)
    row_of_token = torch.full((target.vocab_size,), -1, dtype=torch.int64, device=target.device)
    row_of_token[token_ids] = torch.arange(len(token_ids), device=target.device)
    return Head(head_weight(target, token_ids), row_of_token, token_ids)


def _pool(plan: LearningPlan) -> ReplayPool:
    whole = plan.memory_bytes
    return ReplayPool(
        seed=plan.round.seed,
        recent_bytes=int(whole * _RECENT),
        replay_bytes=int(whole * (1.0 - _WAITING - _RECENT - _HELD_BACK)),
        held_back_bytes=int(whole * _HELD_BACK),
        replay_share=plan.replay_share,
    )


def _compute(target: Target) -> torch.dtype:
    """bfloat16 where the machine multiplies it fast; the master weights are float32 anyway."""
    device = target.device
    is_fast = device.type != "cpu" or can_pack(torch.bfloat16, device)
    return torch.bfloat16 if target.dtype == torch.bfloat16 and is_fast else torch.float32


class _Pace:
    """How fast decoding goes, and how much of it is left.

    Args:
        decoder: whose counters tell what a step did.
        longest: tokens that a completion is expected to have before one is finished.
    """

    def __init__(self, decoder: Decoder, longest: int) -> None:
        self._decoder, self._longest = decoder, longest
        self._seconds = self._tokens = 0.0
        self._finished = self._finished_tokens = 0
        self._before = self._counts()

    def _counts(self) -> tuple[int, int, int]:
        decoder = self._decoder
        return decoder.num_generated, decoder.num_prefilled, decoder.target.num_forward_tokens

    def note(self, completions: Sequence[Completion], seconds: float) -> None:
        """Take in a step."""
        now = self._counts()
        generated, prefilled, passed = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        keep = exp(-generated / _SPAN)
        # Drafts shorten what is not prefill.
        share = 1.0 - prefilled / passed if passed else 0.0
        self._seconds = self._seconds * keep + seconds * share
        self._tokens = self._tokens * keep + generated
        self._finished += len(completions)
        self._finished_tokens += sum(len(each.token_ids) for each in completions)

    def outlook(self, left: int) -> Outlook:
        """What is ahead with so many requests left."""
        mean = self._finished_tokens / self._finished if self._finished else self._longest
        begun = self._decoder.num_generated - self._finished_tokens
        gate, pace = self._decoder.gate, self._seconds / max(self._tokens, 1.0)
        return Outlook(
            tokens=max(left * mean - begun, 0.0),
            seconds_per_token=pace,
            tau=1.0 if gate is None else gate.emitted,
            step_price=None if gate is None else gate.price,
        )
