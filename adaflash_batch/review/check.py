"""run_check(): what a job will do to its rows, and what it will take, before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from adaflash_batch import models
from adaflash_batch.errors import InputError
from adaflash_batch.job_facts import (
    JobInputs,
    job_sampling,
    load_codec,
    read_inputs,
    text_facts,
)
from adaflash_batch.request import RowError, Sampling
from adaflash_batch.review.check_report import CheckReport, IdReport
from adaflash_batch.review.disk_need import DiskNeed, disk_need
from adaflash_batch.review.findings import Finding, Findings, Flag
from adaflash_batch.review.kv_need import KvNeed, kv_need
from adaflash_batch.review.lengths import Work
from adaflash_batch.review.model_facts import ModelFacts, read_drafter_facts, read_model_facts
from adaflash_batch.review.previous import Previous, look_at_output
from adaflash_batch.review.time_need import TimeNeed, find_costs, time_need
from adaflash_batch.review.verdicts import ChunkSource, Judge, Verdict
from adaflash_batch.sampling_defaults import check_token_ids
from adaflash_batch.shards.hashes import Hashes
from adaflash_batch.shards.identity import bad_ids
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.spec import JobSpec
from adaflash_batch.text import TextCodec


class Audience(Protocol):
    """Who hears of a check while it goes on."""

    def note(self, text: str) -> None:
        """Something happened."""

    def begin(self, num_rows: int) -> None:
        """So many rows will be read."""

    def advance(self, num_rows: int) -> None:
        """So many more were."""


def run_check(spec: JobSpec, *, audience: Audience, flag: Flag) -> CheckReport:
    """Read all rows of a job as `run_job` would and say what will become of them.

    Weights are not loaded, and nothing is written where the output goes.

    Args:
        spec: the job.
        audience: hears of progress.
        flag: told of every row with an error, and of rows that keep the job from beginning.

    Raises:
        AdaflashError: nothing at all can be said, as `run_job` would put it.
    """
    inputs = read_inputs(spec, check_id_column=False)
    look = _Look(spec, inputs, _find_model(spec, inputs, audience), flag)
    audience.begin(look.num_rows)
    for num_rows in look.rows():
        audience.advance(num_rows)
    return look.report()


@dataclass(frozen=True, slots=True)
class _Model:
    """What a job knows before it decodes."""

    facts: ModelFacts
    sampling: Sampling
    codec: TextCodec
    kv: KvNeed
    previous: Previous


def _find_model(spec: JobSpec, inputs: JobInputs, audience: Audience) -> _Model:
    folder = models.locate(spec.model.name, revision=spec.model.revision, notify=audience.note)
    facts = read_model_facts(spec, folder)
    sampling = job_sampling(spec, folder)
    check_token_ids(sampling, facts.vocab_size)
    codec = load_codec(spec, folder, facts.context)
    codec.check_content(inputs.content.kind)
    previous = look_at_output(
        spec.output.directory,
        text_facts(spec, inputs, folder),
        [info.shard for info in inputs.infos],
        is_fresh=spec.run.fresh,
    )
    kv = kv_need(spec, facts, read_drafter_facts(spec, folder))
    return _Model(facts, sampling, codec, kv, previous)


class _Look:
    """One look at all rows."""

    def __init__(self, spec: JobSpec, inputs: JobInputs, model: _Model, flag: Flag) -> None:
        self._spec, self._infos, self._content = spec, inputs.infos, inputs.content
        self._model, self._codec, self._previous = model, model.codec, model.previous
        self._flag = flag
        self._judge = Judge(model.codec, model.facts.vocab_size, model.kv)
        self._source = ChunkSource(spec, inputs.content, model.sampling)
        self._errors = Findings("error_row", flag)
        self._special, self._truncated = Finding(), Finding()
        self._truncated_tokens = self._num_repeated = 0
        self._work, self._left = Work(), Work()
        self._sample: str | None = None
        self.num_rows = sum(info.num_rows for info in self._infos)

    def rows(self) -> Iterator[int]:
        """Look at all rows; yields how many, chunk by chunk."""
        with Hashes() as hashes:
            for info in self._infos:
                for chunk in self._source.chunks(info.shard, info.num_rows):
                    hashes.add(_hashes(chunk))
                    self._take(chunk)
                    yield chunk.num_rows
            self._num_repeated = hashes.num_repeats()

    def _take(self, chunk: Chunk) -> None:
        is_done = (chunk.shard.index, chunk.index) in self._previous.done
        for verdict in self._judge.verdicts(chunk):
            prompt, outcome = verdict.prompt, verdict.outcome
            if self._codec.spells_special_tokens(prompt):
                self._special.add(chunk.shard, prompt.row)
            if isinstance(outcome, RowError):
                self._errors.add(chunk.shard, prompt.row, outcome.kind, outcome.message)
                continue
            self._serve(chunk.shard, verdict, is_done=is_done)

    def _serve(self, shard: Shard, verdict: Verdict, *, is_done: bool) -> None:
        prompt, encoded = verdict.prompt, verdict.outcome
        assert not isinstance(encoded, RowError)
        num_tokens, sampling = len(encoded.token_ids), prompt.sampling
        if encoded.truncated_tokens:
            self._truncated.add(shard, prompt.row, f"{encoded.truncated_tokens} tokens are cut")
            self._truncated_tokens += encoded.truncated_tokens
        for work in (self._work,) if is_done else (self._work, self._left):
            work.add(num_tokens, sampling.max_new_tokens, sampling.n)
        if self._sample is None:
            self._sample = self._codec.rendered(prompt)

    def report(self) -> CheckReport:
        """What came of it."""
        shards = [info.shard for info in self._infos]
        return CheckReport(
            num_files=len(shards),
            num_rows=self.num_rows,
            content=self._content,
            errors=self._errors,
            error_limit=self._error_limit(),
            ids=self._look_at_ids(shards),
            damage=self._source.damage,
            num_unread=self._source.num_unread,
            num_repeated_prompts=self._num_repeated,
            special=self._special,
            special_policy=self._spec.prompt.special_tokens,
            truncated=self._truncated,
            truncated_tokens=self._truncated_tokens,
            work=self._work,
            left=self._left,
            uses_template=self._codec.uses_chat_template,
            sample=self._sample,
            model=self._model.facts,
            kv=self._model.kv,
            time=self._time(),
            disk=self._disk(shards),
            previous=self._previous,
        )

    def _time(self) -> TimeNeed:
        spec, costs = self._spec, models.cache_root() / "step-costs"
        return time_need(
            spec,
            self._left,
            self._model.kv,
            cost=find_costs(costs, self._model.facts, spec.engine.threads),
            mean_completion_tokens=self._previous.mean_completion_tokens,
        )

    def _disk(self, shards: list[Shard]) -> DiskNeed:
        rows_left = self.num_rows - self._previous.totals.num_rows
        return disk_need(shards, self.num_rows, rows_left, self._left, self._previous)

    def _error_limit(self) -> int | None:
        limit = self._spec.run.error_limit
        return None if limit is None else limit.rows(self.num_rows)

    def _look_at_ids(self, shards: list[Shard]) -> IdReport | None:
        column = self._spec.input.id_column
        if column is None:
            return None
        found = Findings("job_refused", self._flag)
        try:
            for bad in bad_ids(shards, column):
                kind = "null_id" if bad.first is None else "duplicate_id"
                found.add(bad.shard, bad.row, kind, f"column {column!r} {bad.message}")
        except InputError as error:  # the rows that cannot be read are known already
            return IdReport(column, found, error.message)
        return IdReport(column, found)


def _hashes(chunk: Chunk) -> Any:
    """Of the prompts that there are; the same ones have the same."""
    own = [hash(prompt.content) for prompt in chunk.prompts if prompt.content is not None]
    return np.array(own, dtype=np.int64).view(np.uint64)
