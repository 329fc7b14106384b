"""The texts of a training: what the store lacks is decoded, what it has is handed out."""

from __future__ import annotations

import gc
from collections.abc import Callable

from adaflash_batch import model_files
from adaflash_batch.adapt.trajectory_store import StoredTrajectory, Taps, TrajectoryStore
from adaflash_batch.durable import locked
from adaflash_batch.engine.assembly import DecoderPlan
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.errors import ConfigError
from adaflash_batch.report.live import duration
from adaflash_batch.text import TextCodec
from adaflash_batch.training.claims import StoreSettings, claim_store
from adaflash_batch.training.decoding import DecodingCounts, TrajectoryDecoder, sampled_sampling
from adaflash_batch.training.parts import TargetParts, drafter_config, load_target
from adaflash_batch.training.sources import Sources
from adaflash_batch.training.ticker import Ticker


class Texts:
    """Trajectories of a plan, held-out ones and those to train on. Loads the target; then `begin`.

    Args:
        sources: prompts, target and plan, whose store is held by this process.
        settings: of the store.
        ticker: takes lines about the decoding.
        notify: takes lines for people.

    Attributes:
        parts: the frozen parts of the target.
        device: where it ran.
        counts: what this process decoded.
        held_out: trajectories to evaluate on; all of them once it has begun.

    Raises:
        AdaflashError: the target cannot be loaded.
    """

    def __init__(
        self,
        sources: Sources,
        settings: StoreSettings,
        ticker: Ticker,
        notify: Callable[[str], None],
    ) -> None:
        self._plan, self._files, self._model = sources.plan, sources.files, sources.model
        self._settings, self._ticker, self._notify = settings, ticker, notify
        self._stored_facts = sources.stored_facts()
        self._taps = Taps(settings.layers, sources.layers)
        self.counts = DecodingCounts()
        decoder, codec = self._load()
        self.parts = TargetParts.of(decoder.target, codec, decoder.end_token_ids)
        self.device = decoder.target.device
        self._idle: tuple[Decoder, TextCodec] | None = (decoder, codec)
        self._train = self._store("train", self._plan.disk_bytes)
        self.held_out: list[StoredTrajectory] = []

    def begin(self) -> None:
        """Claim the store and decode the held-out texts, unless they are there.

        Raises AdaflashError as `decode` does.
        """
        self._check_whole()
        claim_store(self._plan.store, self._stored_facts, self._settings)
        # They are never dropped for the others' sake. Both bounds together are --disk.
        held_out = self._store("held-out", self._plan.disk_bytes)
        self._decoder().fill_held_out(held_out, self._plan.max_held_out)
        self._train = self._store("train", self._plan.disk_bytes - held_out.num_bytes)
        self.held_out = held_out.entries()
        if not self.held_out:
            self._notify("no prompt is held out: nothing will be evaluated")

    @property
    def tokens(self) -> int:
        """Generated tokens decoded so far to train on, by whomever."""
        return self._train.progress[1]

    @property
    def count(self) -> int:
        """How many there are to train on."""
        return len(self._train.entries())

    def decode(self, tokens: int) -> float:
        """Bring the store to so many generated tokens, and let go of the model.

        Returns:
            the seconds that it took.

        Raises:
            AdaflashError: nothing can be decoded, or there is no room.
        """
        before = self.counts.seconds
        if self.tokens < tokens:
            self._decoder().fill(self._train, tokens)
            if self.counts.refused:
                self._notify(
                    f"{self.counts.refused} prompts left out, the first since: "
                    f"{self.counts.first_refusal}"
                )
        self._idle = None
        gc.collect()  # model and hooks refer to each other, and would stay beside the optimiser
        return self.counts.seconds - before

    def entries(self, tokens: int) -> list[StoredTrajectory]:
        """What a round trains on: the same in a store that others have filled further."""
        entries = self._train.entries(tokens)
        if not entries:
            raise ConfigError("no text has two tokens, there is nothing to learn from")
        return entries

    def _store(self, name: str, most_bytes: int) -> TrajectoryStore:
        folder, may_drop = self._plan.store / name, self._plan.may_drop
        return TrajectoryStore(folder, most_bytes, self._notify, taps=self._taps, may_drop=may_drop)

    def _check_whole(self) -> None:
        """What another training dropped from its own folder cannot be shared any more."""
        if self._train.has_dropped and not self._plan.may_drop:
            raise ConfigError(
                f"{self._plan.store} has dropped its oldest texts to stay within --disk, "
                "what follows from it would not follow from its settings",
                "decode into another folder",
            )

    def _load(self) -> tuple[Decoder, TextCodec]:
        plan = DecoderPlan(
            folder=self._model,
            name=self._plan.model,
            dtype=self._plan.dtype,
            concurrency=self._settings.concurrency,
            kv_bytes=self._plan.kv_bytes,
            threads=self._plan.threads,
            share_prefixes=False,  # their states would want memory of their own
        )
        return load_target(plan, self._files, self._notify)

    def _decoder(self) -> TrajectoryDecoder:
        plan = self._plan
        decoder, codec = self._idle = self._idle or self._load()
        return TrajectoryDecoder(
            files=self._files,
            decoder=decoder,
            codec=codec,
            layers=self._settings.layers,
            max_new_tokens=plan.max_new_tokens,
            sampled_share=plan.sampled_share,
            sampled=sampled_sampling(model_files.generation_defaults(self._model)),
            seed=plan.seed,
            concurrency=self._settings.concurrency,
            report=self._report,
            counts=self.counts,
        )

    def _report(self, stored: int, counts: DecodingCounts) -> None:
        def line() -> str:
            wanted, done = self._plan.tokens, stored + counts.tokens - counts.tokens_stored
            rate = counts.tokens / counts.seconds if counts.seconds else 0.0
            left = duration(max(wanted - done, 0) / max(rate, 1.0))
            return f"decoding: {done}/{wanted} tokens · {rate:.0f} tok/s · ETA {left}"

        self._ticker.say(line)


def decode_texts(sources: Sources, notify: Callable[[str], None]) -> dict[str, object]:
    """Fill the store of a plan for trainings that follow, or what is left of it.

    Returns:
        `trajectories` (its folder), and of all that it holds `tokens`, `texts`, `held_out_texts`
        and `target_layers`; `seconds` that this run decoded.

    Raises:
        AdaflashError: as a training with the same plan would; what was decoded stays.
    """
    store, tokens = sources.plan.store, sources.plan.tokens
    with locked(store):
        settings = sources.store_settings(notify)
        texts = Texts(sources, settings, Ticker(notify), notify)
        drafter_config(sources.plan, texts.parts)  # what no drafter can read is not worth decoding
        texts.begin()
        texts.decode(tokens)
        return {
            "trajectories": str(store),
            "tokens": texts.tokens,
            "texts": texts.count,
            "held_out_texts": len(texts.held_out),
            "target_layers": list(settings.layers),
            "seconds": round(texts.counts.seconds, 3),
        }
