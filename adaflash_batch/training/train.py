"""train_drafter(): decode trajectories, train, evaluate, publish. The wiring, as job.py is."""

from __future__ import annotations

import copy
import fcntl
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from adaflash_batch import models
from adaflash_batch.adapt.losses import Head, LossKind, Objective
from adaflash_batch.adapt.new_drafter import frequent_tokens
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.pretrain import Evaluator, Pretraining, Rounds, TrainingProgress
from adaflash_batch.adapt.training_state import Cursor, load_state
from adaflash_batch.adapt.trajectory_store import StoredTrajectory, TrajectoryStore
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.vocabulary import VOCABULARY
from adaflash_batch.engine.assembly import DecoderPlan, build_decoder
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.errors import ConfigError
from adaflash_batch.report.live import FIRST_LINE_S, LINE_EVERY_S, duration
from adaflash_batch.text import TextCodec
from adaflash_batch.training.card import card, results
from adaflash_batch.training.decoding import (
    DecodingCounts,
    TrajectoryDecoder,
    sampled_sampling,
)
from adaflash_batch.training.parts import TargetParts, new_net, tapped_layers
from adaflash_batch.training.plan import TrainingPlan
from adaflash_batch.training.prompts import PromptFiles

Notify = Callable[[str], None]


def train_drafter(plan: TrainingPlan, *, command: str, notify: Notify) -> dict[str, object]:
    """Train what the plan says, or what is left of it; returns the summary.

    Args:
        plan: see TrainingPlan.
        command: as the user typed it, for the model card.
        notify: takes lines for people.

    Raises:
        AdaflashError: it cannot begin or go on; what was done stays for the next run.
    """
    files = PromptFiles.open(
        plan.prompts,
        plan.prompt_column,
        plan.messages_column,
        held_out=plan.held_out,
        seed=plan.seed,
    )
    model = models.locate(plan.model, notify=notify)
    sources = {"model": models.model_identity(model), "prompts": files.digests()}
    facts = plan.facts() | sources
    if plan.out.exists():
        return _already(plan, facts, notify)
    with _locked(plan.work), _locked(plan.store):
        _claim(plan.work / "training.json", facts)
        _claim(plan.store / "facts.json", plan.stored_facts() | sources)
        return _Training(plan, files, model, facts, command, notify).run()


class _Training:
    """One process's part of a training."""

    def __init__(
        self,
        plan: TrainingPlan,
        files: PromptFiles,
        model: Path,
        facts: Mapping[str, object],
        command: str,
        notify: Notify,
    ) -> None:
        self._plan, self._files, self._model = plan, files, model
        self._facts, self._command, self._notify = facts, command, notify
        self._ticker = _Ticker(notify)
        # The held-out texts are never dropped for the others' sake, and count for the whole.
        self._held_out = TrajectoryStore(plan.store / "held-out", plan.disk_bytes, notify)
        self._digest = models.tokenizer_digest(model)
        self._counts = DecodingCounts()
        decoder, codec = self._load()
        self._parts = TargetParts.of(decoder.target, codec, decoder.end_token_ids)
        self._layers = tapped_layers(plan, decoder.target.num_layers)
        self._device = decoder.target.device
        self._net = new_net(plan, self._parts, model, notify)
        self._decode_held_out(decoder, codec)
        # Both bounds together are --disk.
        left = plan.disk_bytes - self._held_out.num_bytes
        self._store = TrajectoryStore(plan.store / "train", left, notify)
        self._idle: tuple[Decoder, TextCodec] | None = (decoder, codec)

    def run(self) -> dict[str, object]:
        """Rounds of decoding and training, then the checkpoint."""
        plan, restored = self._plan, load_state(self._plan.work)
        cursor = Cursor() if restored is None else restored[1]
        pretraining: Pretraining | None = None
        while cursor.round < plan.rounds:
            tokens = plan.tokens * (cursor.round + 1) // plan.rounds
            self._decode(tokens, cursor)
            if pretraining is None:
                pretraining = self._pretraining(cursor)
                if restored is not None:
                    pretraining.trainer.restore(restored[0])
                    self._notify(f"going on after {cursor.total_steps} updates")
            pretraining.run_round(self._entries(tokens), self._report_training)
        if pretraining is None:
            pretraining = self._pretraining(cursor)
            assert restored is not None
            pretraining.trainer.restore(restored[0])
        return self._publish(pretraining)

    def _load(self) -> tuple[Decoder, TextCodec]:
        plan = self._plan
        self._notify(f"loading {plan.model}")
        decoder = build_decoder(
            DecoderPlan(
                folder=self._model,
                name=plan.model,
                dtype=plan.dtype,
                concurrency=plan.concurrency,
                kv_bytes=plan.kv_bytes,
                threads=plan.threads,
            ),
            notify=self._notify,
        )
        codec = TextCodec.load(self._model, context=decoder.context)
        codec.check_content(self._files.content.kind)
        ends = codec.end_token_ids(models.generation_defaults(self._model))
        decoder.end_token_ids = frozenset(token for token in ends if token < decoder.vocab_size)
        return decoder, codec

    def _trajectory_decoder(self, decoder: Decoder, codec: TextCodec) -> TrajectoryDecoder:
        plan = self._plan
        return TrajectoryDecoder(
            files=self._files,
            decoder=decoder,
            codec=codec,
            layers=self._layers,
            max_new_tokens=plan.max_new_tokens,
            sampled_share=plan.sampled_share,
            sampled=sampled_sampling(models.generation_defaults(self._model)),
            seed=plan.seed,
            concurrency=plan.concurrency,
            report=self._report_decoding,
            counts=self._counts,
        )

    def _decode_held_out(self, decoder: Decoder, codec: TextCodec) -> None:
        self._trajectory_decoder(decoder, codec).fill_held_out(
            self._held_out, self._plan.max_held_out
        )
        if not self._held_out.entries():
            self._notify("no prompt is held out: nothing will be evaluated")

    def _decode(self, tokens: int, cursor: Cursor) -> None:
        """Bring the store to so many generated tokens, and let go of the model."""
        before = self._counts.seconds
        if self._store.progress[1] < tokens:
            decoder, codec = self._idle or self._load()
            self._trajectory_decoder(decoder, codec).fill(self._store, tokens)
            if self._counts.refused:
                self._notify(
                    f"{self._counts.refused} prompts left out, the first since: "
                    f"{self._counts.first_refusal}"
                )
        self._idle = None
        gc.collect()  # model and hooks refer to each other, and would stay beside the optimiser
        cursor.decoding_s += self._counts.seconds - before

    def _entries(self, tokens: int) -> list[StoredTrajectory]:
        """What a round trains on: the same in a store that others have filled further."""
        entries = self._store.entries(tokens) or self._store.entries()
        if not entries:
            raise ConfigError("no text has two tokens, there is nothing to learn from")
        return entries

    def _pretraining(self, cursor: Cursor) -> Pretraining:
        plan = self._plan
        head, compute = self._head(), getattr(torch, plan.compute)
        trainer = DrafterTrainer(
            self._net.to(self._device),
            embedding=self._parts.embedding,
            head=head,
            objective=Objective(cast(LossKind, plan.objective)),
            gamma=plan.gamma,
            anchors=plan.anchors,
            weight_decay=plan.weight_decay,
            compute=compute,
        )
        held_out = self._held_out.entries()
        return Pretraining(
            trainer=trainer,
            rounds=_rounds(plan),
            evaluator=self._evaluator(held_out, compute) if held_out else None,
            folder=plan.work,
            cursor=cursor,
            save_every=plan.save_every,
            evaluate_every=plan.evaluate_every,
        )

    def _evaluator(self, held_out: list[StoredTrajectory], dtype: torch.dtype) -> Evaluator:
        head = self._head()
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
        """The draft vocabulary of the first round's texts, kept for all rounds; None for all."""
        plan, path = self._plan, self._plan.work / VOCABULARY
        if not plan.draft_vocabulary:
            return None
        if not path.exists():
            texts = (entry.read_tokens() for entry in self._entries(plan.tokens // plan.rounds))
            size = len(self._parts.head)
            tokens = frequent_tokens(texts, size, plan.draft_vocabulary, self._parts.end_ids)
            scratch = path.with_suffix(".partial")
            scratch.write_bytes(to_bytes({"token_ids": tokens}))
            scratch.rename(path)
        loaded: Tensor = load_file(path)["token_ids"]
        return loaded

    def _publish(self, pretraining: Pretraining) -> dict[str, object]:
        plan, cursor = self._plan, pretraining.cursor
        saved = copy.deepcopy(pretraining.trainer.net).to("cpu", torch.bfloat16)
        self._notify("evaluating on the held-out prompts")
        began = time.monotonic()
        domains = {}
        if pretraining.evaluator is not None:
            evaluator = pretraining.evaluator
            evaluated = copy.deepcopy(saved).to(self._device, evaluator.embedding.dtype)
            domains = evaluator.by_domain(evaluated)
        cursor.training_s += time.monotonic() - began
        summary: dict[str, object] = {
            "out": str(plan.out),
            "tokens": self._store.progress[1],
            "updates": cursor.total_steps,
            "dropped_updates": cursor.num_dropped,
            "decoding_hours": round(cursor.decoding_s / 3600, 3),
            "training_hours": round(cursor.training_s / 3600, 3),
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

    def _report_decoding(self, stored: int, counts: DecodingCounts) -> None:
        def line() -> str:
            wanted = self._plan.tokens
            rate = counts.tokens / counts.seconds if counts.seconds else 0.0
            left = max(wanted - stored - self._running_tokens(counts), 0) / max(rate, 1.0)
            return (
                f"decoding: {stored + self._running_tokens(counts)}/{wanted} tokens · "
                f"{rate:.0f} tok/s · ETA {duration(left)}"
            )

        self._ticker.say(line)

    def _running_tokens(self, counts: DecodingCounts) -> int:
        return counts.tokens - counts.tokens_stored

    def _report_training(self, progress: TrainingProgress) -> None:
        def line() -> str:
            tau = "" if progress.tau is None else f" · held-out τ {progress.tau:.2f}"
            again = "" if self._plan.rounds == 1 else f" of round {progress.round + 1}"
            return (
                f"training: update {progress.step}/{progress.num_steps}{again} · "
                f"loss {progress.loss:.3f} · right {100 * progress.hit_rate:.0f}%{tau} · "
                f"ETA {self._ticker.left(progress)}"
            )

        self._ticker.say(line)


class _Ticker:
    """Lets a line through every ten seconds."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._next = time.monotonic() + FIRST_LINE_S
        self._first: tuple[int, int, float] | None = None

    def say(self, line: Callable[[], str]) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            self._notify(line())

    def left(self, progress: TrainingProgress) -> str:
        """Time to the end of the round, at the pace since this process began it."""
        first = self._first
        if first is None or first[0] != progress.round:
            first = self._first = (progress.round, progress.step, progress.elapsed_s)
        done = progress.step - first[1]
        if not done:
            return "unknown yet"
        pace = (progress.elapsed_s - first[2]) / done
        return duration(pace * (progress.num_steps - progress.step))


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
    if made_from != _as_json(facts):
        raise ConfigError(
            f"{plan.out} exists already and is not what this command makes",
            "give another --out, or remove it",
        )
    notify(f"nothing to do: {plan.out} is finished")
    return dict(summary)


def _claim(path: Path, facts: Mapping[str, object]) -> None:
    """Write what a folder is made from, or compare. Raises ConfigError naming the differences."""
    wanted = _as_json(facts)
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
        names = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if names:
            raise ConfigError(
                f"{path.parent} was begun with other settings: {', '.join(names)}",
                "use those again, name another folder, or remove it to begin anew",
            )
        return
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(wanted, indent=2) + "\n", "utf-8")
    scratch.rename(path)


def _as_json(facts: Mapping[str, object]) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps(facts)))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder; the system lets go of it when the process dies. ConfigError if it is held."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is at work in {folder}") from None
        yield
