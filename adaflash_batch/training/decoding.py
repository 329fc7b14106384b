"""Prompts to stored trajectories, by our own decoder: the first half of training a drafter."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from adaflash_batch.adapt.trajectory_store import ChunkWriter, TrajectoryStore
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import Trajectory
from adaflash_batch.request import Completion, Request, RowError, RowKey, Sampling
from adaflash_batch.text import TextCodec
from adaflash_batch.training.prompts import PromptFiles, Row, share_of

_USUAL_TEMPERATURE = 0.8
# Prompts of a chunk, in batches of full concurrency. A chunk is decoded by itself, so that it
# comes out the same when a killed run decodes it anew; the more batches, the less its end costs.
_BATCHES = 4


@dataclass(slots=True)
class DecodingCounts:
    """What this process decoded.

    Attributes:
        tokens: generated.
        tokens_stored: those of finished chunks.
        rows: prompts.
        refused: prompts that could not be decoded, with the first reason.
        seconds: spent.
    """

    tokens: int = 0
    tokens_stored: int = 0
    rows: int = 0
    refused: int = 0
    first_refusal: str | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class TrajectoryDecoder:
    """Decodes chunks of prompts into a store.

    Attributes:
        decoder: with capture switched on here; it must be idle.
        layers: target layers to tap.
        max_new_tokens: of every text.
        sampled_share: share of the prompts that are sampled in the first pass over them.
        sampled: how; later passes over the same prompts always sample.
        counts: of what this process did.
    """

    files: PromptFiles
    decoder: Decoder
    codec: TextCodec
    layers: tuple[int, ...]
    max_new_tokens: int
    sampled_share: float
    sampled: Sampling
    seed: int
    concurrency: int
    report: Callable[[int, DecodingCounts], None]
    counts: DecodingCounts = dataclasses.field(default_factory=DecodingCounts)

    def fill(self, store: TrajectoryStore, tokens: int) -> None:
        """Decode training prompts until the store has seen so many generated tokens.

        Raises ConfigError when a whole pass over the prompts brings nothing.
        """
        size = _BATCHES * self.concurrency
        chunks, seen = store.progress
        num_fruitless = 0
        rows = islice(self._passes(), chunks * size, None)
        while seen < tokens:
            batch = list(islice(rows, size))
            if not batch:
                raise ConfigError(
                    "all prompts are held out", "lower --held-out, or see their column `split`"
                )
            self._decode_chunk(store, batch)
            before, (_, seen) = seen, store.progress
            num_fruitless = num_fruitless + len(batch) if seen == before else 0
            if num_fruitless >= self.files.num_rows:
                reason = self.counts.first_refusal or "the model ends every text at once"
                raise ConfigError(f"no prompt could be decoded: {reason}")

    def fill_held_out(self, store: TrajectoryStore, most: int) -> None:
        """Decode the held-out prompts, greedily, unless they are there."""
        if store.progress[0] > 0:
            return
        rows = [(row, 0) for row in self.files.rows() if row.is_held_out]
        self._decode_chunk(store, rows[:most], greedy=True)

    def _passes(self) -> Iterator[tuple[Row, int]]:
        """Training rows with the number of the pass, for ever; ends if there are none."""
        for number in count():
            is_empty = True
            for row in self.files.rows():
                if not row.is_held_out:
                    is_empty = False
                    yield row, number
            if is_empty:
                return

    def _decode_chunk(
        self, store: TrajectoryStore, rows: Sequence[tuple[Row, int]], *, greedy: bool = False
    ) -> None:
        domains: dict[tuple[int, int], str] = {}
        for row, _ in rows:
            domains[row.prompt.shard, row.prompt.row] = row.domain
        with store.chunk() as writer:
            self.decoder.capture(self.layers, _collector(writer, domains))
            requests = iter(self._requests(rows, greedy))
            before, began = self.decoder.num_generated, time.monotonic()
            known, seconds = self.counts.tokens, self.counts.seconds
            for _ in run(self.decoder, requests, self.concurrency):
                self.counts.tokens = known + self.decoder.num_generated - before
                self.counts.seconds = seconds + time.monotonic() - began
                self.report(store.progress[1], self.counts)
        self.counts.rows += len(rows)
        self.counts.tokens_stored = self.counts.tokens

    def _requests(self, rows: Sequence[tuple[Row, int]], greedy: bool) -> list[Request]:
        prompts = [
            dataclasses.replace(row.prompt, sampling=self._sampling(row, number, greedy))
            for row, number in rows
        ]
        found = []
        encoded = self.codec.encode_many(prompts)
        for prompt, tokens, (_, number) in zip(prompts, encoded, rows, strict=True):
            if isinstance(tokens, RowError):
                self._refuse(tokens)
            elif max(tokens.token_ids) >= self.decoder.vocab_size:
                self._refuse(RowError("unknown_token", "a token is outside the vocabulary"))
            else:
                key = RowKey(prompt.shard, prompt.row, number)
                found.append(Request(key, tokens.token_ids, prompt.sampling, prompt.identity))
        return found

    def _sampling(self, row: Row, number: int, greedy: bool) -> Sampling:
        draw = share_of(row.prompt.identity, self.seed, "sampled")
        if greedy or (number == 0 and draw >= self.sampled_share):
            return Sampling(max_new_tokens=self.max_new_tokens)
        longest = self.max_new_tokens
        return dataclasses.replace(self.sampled, max_new_tokens=longest, seed=self.seed)

    def _refuse(self, error: RowError) -> None:
        self.counts.refused += 1
        self.counts.first_refusal = self.counts.first_refusal or error.message


def run(
    decoder: Decoder, requests: Iterator[Request], concurrency: int
) -> Iterator[list[Completion]]:
    """Decode requests to their end; yields what each step finished."""
    while True:
        room = max(concurrency - decoder.num_waiting, 0)
        for request in islice(requests, room):
            decoder.add(request)
        if not decoder.has_work:
            return
        yield decoder.step()


def sampled_sampling(defaults: Mapping[str, Any]) -> Sampling:
    """How the sampled share is sampled: as the model's authors suggest, else at 0.8."""
    if not defaults.get("temperature"):
        return Sampling(temperature=_USUAL_TEMPERATURE)
    names = ("temperature", "top_p", "top_k")
    return Sampling(**{name: defaults[name] for name in names if name in defaults})


def _collector(
    writer: ChunkWriter, domains: Mapping[tuple[int, int], str]
) -> Callable[[Trajectory], None]:
    def collect(trajectory: Trajectory) -> None:
        # A block needs an anchor that the target wrote and a token behind it.
        if len(trajectory.token_ids) - trajectory.prompt_length >= 2:
            writer.add(trajectory, domains[trajectory.key.shard, trajectory.key.row])

    return collect
