"""Learning in a job: a trainer beside its decoder, and versions on disk of what proves better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp

import torch

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.adapt.control import Aim, Rules
from adaflash_batch.adapt.inline import InlineLearning
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.placement import Place, Placement, place_for
from adaflash_batch.adapt.process import ProcessLearning
from adaflash_batch.adapt.publishing import TrainerCounters
from adaflash_batch.adapt.recipe import LearningPlan, TrainerRecipe
from adaflash_batch.adapt.streams import when_made
from adaflash_batch.adapt.thread import ThreadLearning
from adaflash_batch.adapt.trainer import RoundPlan
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.versions import VersionStore
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.assembly import Assembly, Origin
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.packed_linear import can_pack
from adaflash_batch.engine.tables import embedding_table, head_weight
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import AdaflashError
from adaflash_batch.exchange import TrajectoryMailbox, WeightsMailbox
from adaflash_batch.request import Completion, Sampling
from adaflash_batch.spec import JobSpec

# Tokens that the pace of decoding looks back on, and the fewest that tell it.
_SPAN, _ENOUGH = 2000.0, 200.0

_AIMS: dict[str, Aim] = {"pays": "fastest", "even": "even", "always": "most"}


def learning_plan(spec: JobSpec, sampling: Sampling) -> LearningPlan:
    """What a job's description says of learning."""
    adapt = spec.adapt
    return LearningPlan(
        job=spec.output.directory,
        longest=sampling.max_new_tokens,
        rules=Rules(share=adapt.share, aim=_AIMS[adapt.when]),
        round=RoundPlan(
            updates=adapt.updates,
            batch=adapt.batch,
            rate=adapt.rate,
            averaging=adapt.averaging,
            pull=adapt.pull,
            least_new=adapt.fresh,
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
        place=adapt.place,
        threads=adapt.threads,
        ranks=adapt.ranks,
        zero_stage=adapt.zero_stage,
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
        self._decoder, self._store, self._notify = assembly.decoder, store, notify
        self._assembly, self._plan = assembly, plan
        self._pace = _Pace(self._decoder, plan.longest)
        # A process has a mailbox of its own, too.
        waiting = plan.waiting_bytes // (2 if plan.place == "process" else 1)
        self._inbox, self._outbox = TrajectoryMailbox(waiting), WeightsMailbox()
        self._placement: Placement | None = None
        self._is_short = False
        layers = self._decoder.drafter_layers
        self._decoder.capture(layers, self._inbox.put, lambda: self.wants_texts, keeps_all=False)
        self._decoder.follow(self._outbox.take)
        self._has_ended = False

    def after_step(self, completions: Sequence[Completion], seconds: float, left: int) -> None:
        """Learn, if it is time to.

        Args:
            completions: that the step finished.
            seconds: that it took.
            left: requests of the job that are not finished.
        """
        self._pace.note(completions, seconds)
        if self._has_ended:
            return
        try:
            self._learn(completions, self._pace.outlook(left))
        except (AdaflashError, OSError) as error:
            # Texts do not depend on learning, so a full disk must not end the job here.
            self._notify(f"learning has ended, the drafter stays as it is: {error}")
            self.close()

    @property
    def wants_texts(self) -> bool:
        """Whether what is decoded from now on would be learnt from."""
        if self._placement is None:
            return not (self._has_ended or self._is_short)
        return not self._has_ended and self._placement.wants_texts

    def _learn(self, completions: Sequence[Completion], ahead: Outlook) -> None:
        if self._placement is None:
            if not self._is_worth_beginning(ahead):
                return
            # Only here: it takes memory for the weights several times over.
            self._placement = self._place()
        for completion in completions:
            self._placement.observe(completion.counts)
        self._placement.between_steps(ahead)

    def _is_worth_beginning(self, ahead: Outlook) -> bool:
        rules = self._plan.rules
        if rules.aim == "most":
            return True
        is_long = rules.risk * ahead.seconds >= rules.least_risked
        self._is_short = self._pace.is_known and not is_long
        return self._pace.is_known and is_long

    def _place(self) -> Placement:
        recipe = _recipe(self._assembly, self._plan)
        place = place_for(self._plan.place, recipe.device.type)
        return place_trainer(place, recipe, self._store, self._inbox, self._outbox, self._notify)

    def close(self) -> None:
        """End learning; no thread or process of it is left. May be repeated."""
        if self._placement is not None:
            self._placement.close()
            if not self._has_ended and self._placement.num_dropped:
                self._notify(
                    f"{self._placement.num_dropped} finished texts were not learnt from: "
                    "the trainer did not take them in time"
                )
        self._has_ended = True

    def keep(self, version: int | None) -> None:
        """A part was committed with this version: it stays on disk until another one was."""
        self._store.pinned = frozenset() if version is None else frozenset({version})

    @property
    def seconds(self) -> float:
        """Spent on learning."""
        return 0.0 if self._placement is None else self._placement.seconds

    @property
    def counters(self) -> TrainerCounters:
        """What came of it."""
        return TrainerCounters() if self._placement is None else self._placement.counters


def _recipe(assembly: Assembly, plan: LearningPlan) -> TrainerRecipe:
    target, origin = assembly.decoder.target, assembly.origin
    assert origin is not None
    return TrainerRecipe(
        folder=origin.folder,
        version=origin.version,
        facts=assembly.facts,
        dtype=target.dtype,
        compute=_compute(target),
        embedding=embedding_table(target),
        head=_head(target, origin),
        plan=plan,
        device=target.device,
    )


def place_trainer(
    place: Place,
    recipe: TrainerRecipe,
    store: VersionStore,
    inbox: TrajectoryMailbox,
    outbox: WeightsMailbox,
    notify: Callable[[str], None],
) -> Placement:
    """Set a trainer to work.

    Args:
        place: where; not `auto`.
        recipe: what it is built from.
        store: that its versions go to.
        inbox: where trajectories come from.
        outbox: takes the weights of every version.
        notify: takes lines for people, in the thread of the caller.
    """

    def build(tell: Callable[[str], None]) -> InlineLearning:
        return recipe.build(inbox, store, when_made(outbox.put, recipe.device), tell)

    if place == "inline":
        return build(notify)
    threads = recipe.plan.threads or max(torch.get_num_threads() // 2, 1)
    if place == "thread":
        return ThreadLearning(build, notify=notify, threads=threads, device=recipe.device)
    return ProcessLearning(recipe, store, inbox, outbox, notify=notify, threads=threads)


def _head(target: Target, origin: Origin) -> Head:
    token_ids = load_vocabulary(origin.folder, checkpoint.inspect(origin.folder).config)
    if token_ids is None:
        return Head(head_weight(target))
    token_ids = token_ids.to(target.device)
    return Head.of_rows(head_weight(target, token_ids), token_ids, target.vocab_size)


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
        self._seconds = self._whole = self._tokens = 0.0
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
        self._whole = self._whole * keep + seconds
        self._tokens = self._tokens * keep + generated
        self._finished += len(completions)
        self._finished_tokens += sum(len(each.token_ids) for each in completions)

    @property
    def is_known(self) -> bool:
        """Whether enough was decoded to tell."""
        return self._tokens >= _ENOUGH

    def outlook(self, left: int) -> Outlook:
        """What is ahead with so many requests left."""
        mean = self._finished_tokens / self._finished if self._finished else self._longest
        begun = self._decoder.num_generated - self._finished_tokens
        tau, price = self._decoder.speculator.outlook()
        return Outlook(
            tokens=max(left * mean - begun, 0.0),
            seconds_per_token=self._seconds / max(self._tokens, 1.0),
            tau=tau,
            step_price=price,
            share=self._seconds / self._whole if self._whole > 0.0 else 1.0,
        )
