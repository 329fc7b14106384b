"""Rows as a job would take them: read, encoded and admitted by the same code, decoded by none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adaflash_batch import admission
from adaflash_batch.errors import InputError
from adaflash_batch.request import Prompt, RowError, Sampling
from adaflash_batch.review.damage import Damage, find_damage
from adaflash_batch.review.kv_need import KvNeed
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.reader import Chunk, read_chunks
from adaflash_batch.spec import JobSpec
from adaflash_batch.text import Encoded, TextCodec

_ENCODED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """What will become of a row.

    Attributes:
        outcome: its tokens, or the error that it will carry.
    """

    prompt: Prompt
    outcome: Encoded | RowError


class Judge:
    """Says of prompts what a job would say before it decodes them.

    Args:
        codec: the job's.
        vocab_size: of the model.
        kv: the KV memory that a request has to fit.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, kv: KvNeed) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._kv = kv

    def verdicts(self, chunk: Chunk) -> Iterator[Verdict]:
        """Of all rows of a chunk, in order."""
        for begin in range(0, len(chunk.prompts), _ENCODED_AT_ONCE):
            prompts = chunk.prompts[begin : begin + _ENCODED_AT_ONCE]
            for prompt, encoded in zip(prompts, self._codec.encode_many(prompts), strict=True):
                yield Verdict(prompt, self._admit(prompt, encoded))

    def _admit(self, prompt: Prompt, encoded: Encoded | RowError) -> Encoded | RowError:
        if isinstance(encoded, RowError):
            return encoded
        error = admission.refusal(prompt, encoded, self._vocab_size)
        limit = len(encoded.token_ids) + prompt.sampling.max_new_tokens
        return error or self._kv.refusal(limit) or encoded


class ChunkSource:
    """The chunks of input files; what cannot be read is noted and passed over.

    Attributes:
        damage: found so far.
        num_unread: rows that were passed over.
    """

    def __init__(self, spec: JobSpec, content: ContentColumn, sampling: Sampling) -> None:
        self._spec = spec
        self._content = content
        self._sampling = sampling
        self.damage: list[Damage] = []
        self.num_unread = 0

    def chunks(self, shard: Shard, num_rows: int) -> Iterator[Chunk]:
        """Those of a file that can be read, in order."""
        read: set[int] = set()
        seen = 0
        try:
            for chunk in self._read(shard, read):
                read.add(chunk.index)
                seen += chunk.num_rows
                yield chunk
            return
        except InputError as error:
            found = find_damage(shard, error)
        self.damage += found
        try:
            for chunk in self._read(shard, read | self._damaged(found)):
                seen += chunk.num_rows
                yield chunk
        except InputError as error:
            rest = (seen, num_rows)
            self.damage.append(Damage(shard.path, *rest, None, error.message, rest))
        finally:
            self.num_unread += num_rows - seen

    def _damaged(self, found: list[Damage]) -> set[int]:
        """Chunks that damaged row groups have a part in."""
        size = self._spec.output.chunk_rows
        ranges = [each.row_group for each in found]
        return {
            index
            for first, end in ranges
            for index in range(first // size, (max(end, first + 1) - 1) // size + 1)
        }

    def _read(self, shard: Shard, passed_over: set[int]) -> Iterator[Chunk]:
        return read_chunks(
            shard,
            self._content,
            self._spec.output.chunk_rows,
            columns=self._spec.input.columns,
            sampling=self._sampling,
            id_column=self._spec.input.id_column,
            skip=lambda chunk: chunk in passed_over,
        )
