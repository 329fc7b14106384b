"""Rows of an output decoded again, one at a time and without speculation. This loads the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from adaflash_batch import model_files, models
from adaflash_batch.engine.assembly import DecoderPlan, build_decoder
from adaflash_batch.errors import AdaflashError, ConfigError, first_line
from adaflash_batch.job_facts import job_sampling, load_codec
from adaflash_batch.request import Request, RowError, RowKey, Sampling
from adaflash_batch.review.audit_report import Audit, Redone
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.parts import (
    READ_ERRORS,
    Part,
    objections,
    read_parts,
)
from adaflash_batch.review.plain_decoding import PlainDecoder
from adaflash_batch.review.retrace import Attempt, Retracer, StoredRow
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.parquet import open_parquet, read_batches
from adaflash_batch.shards.prompts import build_prompts
from adaflash_batch.text import Encoded

_SHOWN = 30


def audit(
    job: JobOutput,
    count: int,
    seed: int,
    *,
    model: str | None = None,
    notify: Callable[[int, int], None] = lambda _done, _all: None,
    note: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Decode rows again that carry a text, with the model and settings of the job.

    Args:
        job: its output.
        count: how many rows; all there are if they are fewer.
        seed: chooses them.
        model: folder or hub id, if the model is not where the job had it.
        notify: told how many of how many are done.
        note: takes lines for people.

    Raises:
        ConfigError: the model is not there, or not the one that the job ran with.
        AdaflashError: a part cannot be read.
    """
    chosen = _choose(job, count, seed)
    report = Audit(sum(len(indices) for _, indices in chosen), seed)
    if not chosen:
        return report
    redo = _Redo(job, _find_model(job, model, note), note)
    done = 0
    for part, indices in chosen:
        for row in _stored_rows(job, redo.sampling, part, indices):
            redo.compare(row, report)
            done += 1
            notify(done, report.num_rows)
    return report


def _choose(job: JobOutput, count: int, seed: int) -> list[tuple[Part, list[int]]]:
    """Parts, and which of their rows with a text: as many as are wanted, each equally likely."""
    sound = [p for p in read_parts(job, job.part_files()) if not objections(job, p)]
    sizes = [_num_texts(part) for part in sound]
    ends = np.cumsum(sizes) if sizes else np.zeros(0, dtype=np.int64)
    total = int(ends[-1]) if sizes else 0
    places = sorted(random.Random(seed).sample(range(total), min(count, total)))
    chosen: dict[int, list[int]] = {}
    for place in places:
        index = int(np.searchsorted(ends, place, side="right"))
        chosen.setdefault(index, []).append(place - int(ends[index]) + sizes[index])
    return [(sound[index], indices) for index, indices in chosen.items()]


def _num_texts(part: Part) -> int:
    assert part.footer is not None
    return part.footer.totals.num_output_rows - part.footer.totals.num_errors


def _find_model(job: JobOutput, model: str | None, note: Callable[[str], None]) -> Path:
    spec = job.spec.model
    name, revision = (spec.name, spec.revision) if model is None else (model, None)
    folder = models.locate(name, revision=revision, notify=note)
    known, here = job.text_facts.get("model"), model_files.model_identity(folder)
    if known != here:
        names = sorted(known.keys() | here.keys()) if isinstance(known, dict) else ["everything"]
        other = [name for name in names if not known or known.get(name) != here.get(name)]
        raise ConfigError(
            f"{folder} is not the model that the job ran with: {', '.join(other)} differ",
            "name that one with --model",
        )
    return folder


def _stored_rows(
    job: JobOutput, sampling: Sampling, part: Part, indices: Sequence[int]
) -> Iterator[StoredRow]:
    """Some of a part's rows that carry a text, by their numbers among these."""
    wanted, begin, texts = set(indices), 0, 0
    assert part.footer is not None
    input_row = part.footer.first_row - 1
    try:
        with open_parquet(job.filesystem, part.file.path) as file:
            for batch in read_batches(file):
                samples = batch.column(f"{job.prefix}sample").to_pylist()
                completions = batch.column(f"{job.prefix}completion")
                for index, sample in enumerate(samples):
                    input_row += sample == 0
                    if not completions[index].is_valid:
                        continue
                    if texts in wanted:
                        row = batch.slice(index, 1)
                        yield _stored(job, sampling, part, row, begin + index, input_row)
                    texts += 1
                begin += batch.num_rows
    except READ_ERRORS as error:
        raise AdaflashError(
            f"{part.file.name} cannot be read: {first_line(error)}", "verify says what is wrong"
        ) from error


def _stored(
    job: JobOutput, sampling: Sampling, part: Part, row: Any, place: int, input_row: int
) -> StoredRow:
    content, spec = job.text_facts["content"], job.spec.input
    prompts = build_prompts(
        job.inputs[part.file.shard].shard(),
        input_row,
        pa.Table.from_batches([row]),
        ContentColumn(content["column"], content["kind"]),
        columns=spec.columns,
        sampling=sampling,
        id_column=spec.id_column,
    )
    names = ("sample", "completion", "finish_reason", "usage")
    sample, text, reason, usage = (row.column(job.prefix + name)[0].as_py() for name in names)
    tokens = usage["completion_tokens"]
    return StoredRow(part.file.name, place, prompts[0], sample, text, reason, tokens)


class _Redo:
    """Model, tokenizer and settings of a job."""

    def __init__(self, job: JobOutput, folder: Path, note: Callable[[str], None]) -> None:
        self._job = job
        spec = job.spec
        self.sampling = job_sampling(spec, folder)
        plan = DecoderPlan(
            folder=folder,
            name=spec.model.name,
            dtype=spec.model.dtype,
            trust_remote_code=spec.model.trust_remote_code,
            device=spec.engine.device,
            deterministic=spec.engine.deterministic,
            concurrency=1,
            token_budget=spec.engine.token_budget,
            context=spec.engine.context,
            threads=spec.engine.threads,
        )
        built = build_decoder(plan, notify=note)
        self._codec = load_codec(spec, folder, built.context)
        defaults = model_files.generation_defaults(folder)
        self._decoder = PlainDecoder(
            built.target,
            end_token_ids=self._codec.end_token_ids(defaults, built.vocab_size),
            token_budget=max(spec.engine.token_budget, 2),
        )

    def compare(self, row: StoredRow, report: Audit) -> None:
        """Decode a row again, and add what came of it to the report."""
        encoded = self._codec.encode(row.prompt)
        if isinstance(encoded, RowError):
            reason = f"its prompt cannot be served now ({encoded.kind}: {encoded.message})"
            report.differences.append(self._redone(row, reason, None))
            return
        retracer = Retracer(self._decoder, self._codec, partial(self._request, row, encoded))
        attempt = retracer.freely()
        if attempt.agrees(row):
            report.matches += 1
            return
        gap, is_tie = retracer.along(row) if attempt.is_sound else (None, False)
        redone = self._redone(row, _difference(row, attempt), gap)
        (report.near_ties if is_tie else report.differences).append(redone)

    def _request(self, row: StoredRow, encoded: Encoded) -> Request:
        prompt = row.prompt
        return Request(
            key=RowKey(prompt.shard, prompt.row, row.sample),
            token_ids=encoded.token_ids,
            sampling=prompt.sampling,
            identity=prompt.identity,
            stop_watch=self._codec.watch(prompt.sampling),
        )

    def _redone(self, row: StoredRow, reason: str, gap: float | None) -> Redone:
        source = self._job.inputs[row.prompt.shard].name
        return Redone(row.file, row.row, source, row.prompt.row, row.sample, reason, gap)


def _difference(row: StoredRow, attempt: Attempt) -> str:
    if not attempt.is_sound:
        return "decoded again, the model's logits are not finite"
    if attempt.text != row.text:
        pairs = enumerate(zip(row.text, attempt.text, strict=False))
        shorter = min(len(row.text), len(attempt.text))
        at = next((place for place, (one, other) in pairs if one != other), shorter)
        stored, now = (repr(text[at : at + _SHOWN]) for text in (row.text, attempt.text))
        return f"from character {at} on the text is {stored}, decoded again {now}"
    if attempt.num_tokens != row.num_tokens:
        return f"it has {row.num_tokens} tokens, decoded again {attempt.num_tokens}"
    return f"finish_reason is {row.finish_reason}, decoded again {attempt.finish_reason}"
