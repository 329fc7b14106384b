"""train_drafter(): decode trajectories, train, evaluate, publish. The wiring, as job.py is."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from adaflash_batch import model_files
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.new_drafter import frequent_tokens
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.optimiser import OptimiserKind
from adaflash_batch.adapt.parameters import AdaptedParameters
from adaflash_batch.adapt.pretrain import Evaluator, Pretraining, Rounds, TrainingProgress
from adaflash_batch.adapt.training_state import Cursor, load_state
from adaflash_batch.adapt.trajectory_store import StoredTrajectory
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.vocabulary import VOCABULARY, load_vocabulary
from adaflash_batch.durable import locked, write_whole
from adaflash_batch.errors import ConfigError
from adaflash_batch.kernels.opd_loss import LossKind
from adaflash_batch.training.card import card, results
from adaflash_batch.training.claims import StoreSettings, claim, is_made_from
from adaflash_batch.training.parts import new_net
from adaflash_batch.training.plan import TrainingPlan
from adaflash_batch.training.sources import Sources
from adaflash_batch.training.texts import Texts, decode_texts
from adaflash_batch.training.ticker import Ticker

Notify = Callable[[str], None]


def train_drafter(plan: TrainingPlan, *, command: str, notify: Notify) -> dict[str, object]:
    """Train what the plan says, or what is left of it; returns the summary. Or only decode.

    Args:
        plan: see TrainingPlan.
        command: as the user typed it, for the model card.
        notify: takes lines for people.

    Raises:
        AdaflashError: it cannot begin or go on; what was done stays for the next run.
    """
    sources = Sources.of(plan, notify)
    if plan.decode_only:
        return decode_texts(sources, notify)
    if plan.out.exists():
        return _already(plan, sources.facts(sources.store_settings(notify)), notify)
    with locked(plan.work), locked(plan.store):
        settings = sources.store_settings(notify)
        claim(plan.work / "training.json", sources.facts(settings))
        return _Training(sources, settings, command, notify).run()


class _Training:
    """One process's part of a training."""

    def __init__(
        self,
        sources: Sources,
        settings: StoreSettings,
        command: str,
        notify: Notify,
    ) -> None:
        self._plan, self._command, self._notify = sources.plan, command, notify
        self._facts, self._origin = sources.facts(settings), sources.origin
        self._ticker = Ticker(notify)
        self._digest = model_files.tokenizer_digest(sources.model)
        self._texts = Texts(sources, settings, self._ticker, notify)
        self._parts = self._texts.parts
        self._net = new_net(sources.plan, self._parts, sources.model, notify)
        self._texts.begin()

    def run(self) -> dict[str, object]:
        """Rounds of decoding and training, then the checkpoint."""
        plan, restored = self._plan, load_state(self._plan.work)
        cursor = Cursor() if restored is None else restored[1]
        pretraining: Pretraining | None = None
        while cursor.round < plan.rounds:
            tokens = plan.tokens * (cursor.round + 1) // plan.rounds
            cursor.decoding_s += self._texts.decode(tokens)
            if pretraining is None:
                pretraining = self._pretraining(cursor)
                if restored is not None:
                    pretraining.trainer.restore(restored[0])
                    self._notify(f"going on after {cursor.total_steps} updates")
            pretraining.run_round(self._texts.entries(tokens), self._report_training)
        if pretraining is None:
            pretraining = self._pretraining(cursor)
            assert restored is not None
            pretraining.trainer.restore(restored[0])
        return self._publish(pretraining)

    def _pretraining(self, cursor: Cursor) -> Pretraining:
        plan = self._plan
        head, compute = self._head(), getattr(torch, plan.compute)
        trainer = DrafterTrainer(
            self._net.to(self._texts.device),
            embedding=self._parts.embedding,
            head=head,
            objective=Objective(cast(LossKind, plan.objective)),
            gamma=plan.gamma,
            anchors=plan.anchors,
            optimiser=cast(OptimiserKind, plan.optimiser),
            parameters=cast(AdaptedParameters, plan.parameters),
            weight_decay=plan.weight_decay,
            compute=compute,
        )
        held_out = self._texts.held_out
        return Pretraining(
            trainer=trainer,
            rounds=_rounds(plan),
            evaluator=self._evaluator(held_out, head, compute) if held_out else None,
            folder=plan.work,
            cursor=cursor,
            save_every=plan.save_every,
            evaluate_every=plan.evaluate_every,
        )

    def _evaluator(
        self, held_out: list[StoredTrajectory], head: Head, dtype: torch.dtype
    ) -> Evaluator:
        weight = head.weight.to(dtype)
        return Evaluator(
            held_out,
            self._parts.embedding.to(dtype),
            lambda hidden: torch.nn.functional.linear(hidden, weight),
            head.token_ids,
        )

    def _head(self) -> Head:
        tokens = self._vocabulary()
        if tokens is None:
            return Head(self._parts.head)
        return Head.restricted(self._parts.head, tokens.to(self._parts.head.device))

    def _vocabulary(self) -> Tensor | None:
        """The draft vocabulary, kept for all rounds; None for all tokens.

        That of the drafter that it begins from, else that of the first round's texts.
        """
        plan, path = self._plan, self._plan.work / VOCABULARY
        if not plan.draft_vocabulary:
            return None
        if not path.exists():
            tokens = self._inherited_vocabulary()
            if tokens is None:
                tokens = self._frequent_tokens()
            write_whole(path, to_bytes({"token_ids": tokens}))
        loaded: Tensor = load_file(path)["token_ids"]
        return loaded

    def _inherited_vocabulary(self) -> Tensor | None:
        folder = self._plan.begin_from
        return None if folder is None else load_vocabulary(folder, self._net.config)

    def _frequent_tokens(self) -> Tensor:
        plan, parts = self._plan, self._parts
        entries = self._texts.entries(plan.tokens // plan.rounds)
        texts = (entry.read_tokens() for entry in entries)
        return frequent_tokens(texts, len(parts.head), plan.draft_vocabulary, parts.end_ids)

    def _publish(self, pretraining: Pretraining) -> dict[str, object]:
        plan, cursor = self._plan, pretraining.cursor
        saved = copy.deepcopy(pretraining.trainer.net).to("cpu", torch.bfloat16)
        self._notify("evaluating on the held-out prompts")
        began = time.monotonic()
        domains = {}
        if pretraining.evaluator is not None:
            evaluator = pretraining.evaluator
            evaluated = copy.deepcopy(saved).to(self._texts.device, evaluator.embedding.dtype)
            domains = evaluator.by_domain(evaluated)
        cursor.training_s += time.monotonic() - began
        summary: dict[str, object] = {
            "out": str(plan.out),
            "tokens": self._texts.tokens,
            "updates": cursor.total_steps,
            "dropped_updates": cursor.num_dropped,
            "decoding_hours": round(cursor.decoding_s / 3600, 3),
            "training_hours": round(cursor.training_s / 3600, 3),
            "began_from": self._origin,
            "parameters": sum(p.numel() for p in saved.parameters()),
            "held_out": results(domains),
        }
        own: dict[str, object] = {"tokenizer_sha256": self._digest, "target": plan.model}
        own |= {"facts": dict(self._facts), "summary": summary}
        extra = {"README.md": card(plan, saved.config, summary, self._command).encode()}
        if plan.draft_vocabulary:
            extra[VOCABULARY] = (plan.work / VOCABULARY).read_bytes()
        checkpoint.save(saved, plan.out, {"adaflash": own}, extra)
        self._notify(f"the drafter is in {plan.out}; {plan.work} is no longer needed")
        return summary

    def _report_training(self, progress: TrainingProgress) -> None:
        again = "" if self._plan.rounds == 1 else f" of round {progress.round + 1}"

        def line() -> str:
            tau = "" if progress.tau is None else f" · held-out τ {progress.tau:.2f}"
            return (
                f"training: update {progress.step}/{progress.num_steps}{again} · "
                f"loss {progress.loss:.3f} · right {100 * progress.hit_rate:.0f}%{tau} · "
                f"ETA {self._ticker.left(progress)}"
            )

        self._ticker.say(line)
        if progress.domains:
            each = ", ".join(f"{name} {tau:.2f}" for name, tau in progress.domains.items())
            self._notify(f"held-out τ after update {progress.step}{again}: {each}")


def _rounds(plan: TrainingPlan) -> Rounds:
    return Rounds(
        seed=plan.seed,
        rounds=plan.rounds,
        batch=plan.batch,
        steps=plan.steps,
        epochs=plan.epochs,
        rate=plan.learning_rate,
        warm_up=plan.warm_up,
    )


def _already(plan: TrainingPlan, facts: Mapping[str, object], notify: Notify) -> dict[str, object]:
    """The summary of a finished training of the same plan. Raises ConfigError for another."""
    try:
        own: dict[str, Any] = json.loads((plan.out / checkpoint.CONFIG).read_text("utf-8"))
        made_from, summary = own["adaflash"]["facts"], own["adaflash"]["summary"]
    except (OSError, ValueError, KeyError, TypeError):
        made_from, summary = None, {}
    if not is_made_from(made_from, facts):
        raise ConfigError(
            f"{plan.out} exists already and is not what this command makes",
            "give another --out, or remove it",
        )
    notify(f"nothing to do: {plan.out} is finished")
    return dict(summary)
