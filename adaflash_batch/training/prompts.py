"""Prompts to train and evaluate drafters on: rows of all files in turn, some of them held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from adaflash_batch.request import Prompt, Sampling
from adaflash_batch.shards.columns import ContentColumn, detect_content
from adaflash_batch.shards.inputs import resolve_inputs
from adaflash_batch.shards.parquet import ShardInfo, inspect_shard
from adaflash_batch.shards.reader import Chunk, read_chunks

_ROWS_AT_ONCE = 256
_HELD_OUT = ("heldout", "held_out", "held-out", "validation", "test")


class Row(NamedTuple):
    """A prompt, what kind it is, and whether training must not see it."""

    prompt: Prompt
    domain: str
    is_held_out: bool


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """The files and what is read from them.

    Attributes:
        infos: one a file.
        content: the column of prompts.
        held_out: share of the rows held out, in files that have no column `split`.
        seed: decides which.
    """

    infos: list[ShardInfo]
    content: ContentColumn
    held_out: float
    seed: int

    @staticmethod
    def open(
        paths: Sequence[str],
        prompt_column: str | None,
        messages_column: str | None,
        *,
        held_out: float = 0.0,
        seed: int = 0,
    ) -> PromptFiles:
        """Find files and column. Raises AdaflashError as a job does."""
        infos = [inspect_shard(shard) for shard in resolve_inputs(paths)]
        content = detect_content(
            [info.schema for info in infos],
            prompt_column,
            messages_column,
            names=[info.shard.path for info in infos],
            exclude={"domain", "split"},
        )
        return PromptFiles(infos, content, held_out, seed)

    def digests(self) -> dict[str, str]:
        """By name of file."""
        return {info.shard.name: info.digest for info in self.infos}

    @property
    def num_rows(self) -> int:
        """In all files."""
        return sum(info.num_rows for info in self.infos)

    def rows(self) -> Iterator[Row]:
        """Every row once, a row of each file in turn: any stretch has something of every file."""
        streams = [self._rows_of(info) for info in self.infos]
        while streams:
            for stream in list(streams):
                row = next(stream, None)
                if row is None:
                    streams.remove(stream)
                else:
                    yield row

    def _rows_of(self, info: ShardInfo) -> Iterator[Row]:
        chunks = read_chunks(
            info.shard, self.content, _ROWS_AT_ONCE, columns={}, sampling=Sampling()
        )
        fallback = PurePosixPath(info.shard.name).stem
        for chunk in chunks:
            domains, splits = _strings(chunk, "domain"), _strings(chunk, "split")
            for index, prompt in enumerate(chunk.prompts):
                domain = fallback if domains is None else str(domains[index] or fallback)
                held_out = (
                    self._draws(prompt) if splits is None else str(splits[index]) in _HELD_OUT
                )
                yield Row(prompt, domain, held_out)

    def _draws(self, prompt: Prompt) -> bool:
        return share_of(prompt.identity, self.seed, "held-out") < self.held_out


def share_of(identity: int, *purpose: object) -> float:
    """A number in [0, 1) that belongs to a row and a purpose."""
    name = repr((identity, *purpose)).encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _strings(chunk: Chunk, name: str) -> list[Any] | None:
    table = chunk.table
    return table.column(name).to_pylist() if name in table.column_names else None
