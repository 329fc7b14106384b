"""Input rows to requests: everything that is missing, in order; bad rows are finished at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from adaflash_batch.admission import refusal
from adaflash_batch.request import Prompt, Request, RowError, RowKey, Sampling
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.open_chunks import OpenChunks
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.reader import Chunk, read_chunks
from adaflash_batch.spec import JobSpec
from adaflash_batch.summary import RunFigures
from adaflash_batch.text import Encoded, TextCodec

# Prompts are tokenised in slices this long, so that the first step waits for one slice only.
_ENCODED_AT_ONCE = 64


class RequestStream:
    """The requests of a job, made when they are asked for.

    Args:
        spec: the job.
        infos, content: its input files, and the column of prompts.
        sampling: the job's.
        codec: makes tokens of prompts.
        vocab_size: of the model; a token beyond it makes an error row.
        chunks: told of every chunk that begins and of every row that cannot be served.
        figures: count rows that are finished without a request.
        is_done: whether a chunk (input file, number) is nothing to be done by this run.
    """

    def __init__(
        self,
        spec: JobSpec,
        infos: Sequence[ShardInfo],
        content: ContentColumn,
        *,
        sampling: Sampling,
        codec: TextCodec,
        vocab_size: int,
        chunks: OpenChunks,
        figures: RunFigures,
        is_done: Callable[[int, int], bool],
    ) -> None:
        self._spec, self._infos, self._content = spec, infos, content
        self._sampling, self._codec, self._vocab_size = sampling, codec, vocab_size
        self._chunks, self._figures, self._is_done = chunks, figures, is_done

    def __iter__(self) -> Iterator[Request]:
        for info in self._infos:
            shard = info.shard.index
            chunks = read_chunks(
                info.shard,
                self._content,
                self._spec.output.chunk_rows,
                columns=self._spec.input.columns,
                sampling=self._sampling,
                id_column=self._spec.input.id_column,
                skip=lambda chunk, shard=shard: self._is_done(shard, chunk),  # type: ignore[misc]
            )
            for chunk in chunks:
                yield from self._requests_of_chunk(chunk)

    def _requests_of_chunk(self, chunk: Chunk) -> Iterator[Request]:
        found, num_finished = self._chunks.begin(chunk)
        self._figures.journaled_rows += num_finished
        # A row of which a sample is there was encoded before, so it cannot fail now.
        missing = [prompt for prompt in chunk.prompts if not _is_found(prompt, found)]
        for begin in range(0, len(missing), _ENCODED_AT_ONCE):
            prompts = missing[begin : begin + _ENCODED_AT_ONCE]
            for prompt, encoded in zip(prompts, self._codec.encode_many(prompts), strict=True):
                for request in self._requests_of(prompt, encoded):
                    if request.key not in found:
                        yield request

    def _requests_of(self, prompt: Prompt, encoded: Encoded | RowError) -> Iterator[Request]:
        if isinstance(encoded, Encoded):
            encoded = refusal(prompt, encoded, self._vocab_size) or encoded
        if isinstance(encoded, RowError):
            self._chunks.refuse(prompt, encoded)
            self._figures.num_rows += 1
            self._figures.num_errors += 1
            return
        for sample in range(prompt.sampling.n):
            yield Request(
                key=RowKey(prompt.shard, prompt.row, sample),
                token_ids=encoded.token_ids,
                sampling=prompt.sampling,
                identity=prompt.identity,
                stop_watch=self._codec.watch(prompt.sampling),
                truncated_tokens=encoded.truncated_tokens,
            )


def _is_found(prompt: Prompt, found: Collection[RowKey]) -> bool:
    """Whether all samples of a row are there."""
    keys = (RowKey(prompt.shard, prompt.row, sample) for sample in range(prompt.sampling.n))
    return all(key in found for key in keys)
