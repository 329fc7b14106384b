"""Outputs made without a model: the job's own writer, with completions from thin air."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from adaflash_batch.job_facts import read_inputs
from adaflash_batch.request import Completion, Prompt, RowKey, Sampling, Timing
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.shards.job_folder import JobFolder
from adaflash_batch.shards.locations import LOCAL
from adaflash_batch.shards.output import Output
from adaflash_batch.shards.portion import whole_job
from adaflash_batch.shards.reader import read_chunks
from adaflash_batch.shards.recovery import committed
from adaflash_batch.shards.schema import OutputRow
from adaflash_batch.shards.writer import prepare_output
from adaflash_batch.spec import JobSpec
from adaflash_batch.stats import SpeculationCounts


def fabricate(
    folder: Path,
    tables: Mapping[str, Any],
    keys: Mapping[str, object] | None = None,
    *,
    row_group_size: int | None = None,
    page_rows: int = 1024,
) -> JobOutput:
    """Write input files of these tables and the output of a job on them, every row served."""
    for name, table in tables.items():
        pq.write_table(
            table, folder / name, row_group_size=row_group_size, write_batch_size=page_rows
        )
    given = {
        "input.paths": [str(folder / name) for name in tables],
        "output.directory": str(folder / "out"),
    }
    spec = JobSpec.from_sources(flags=given | dict(keys or {}))
    inputs = read_inputs(spec)
    _, path = prepare_output(spec.output.directory, [info.shard for info in inputs.infos])
    facts = {
        "inputs": {info.shard.name: info.digest for info in inputs.infos},
        "output.chunk_rows": spec.output.chunk_rows,
    }
    mark = JobFolder(LOCAL, path).claim(facts, spec.to_json(), inputs.infos)
    output = Output(
        LOCAL,
        path,
        prefix=spec.output.prefix,
        infos=inputs.infos,
        fingerprint=mark,
        done=committed(path, mark, inputs.infos, spec.output.chunk_rows),
        portion=whole_job(inputs.infos, spec.output.chunk_rows),
    )
    sampling = spec.sampling.over(Sampling())
    for info in inputs.infos:
        for chunk in read_chunks(
            info.shard,
            inputs.content,
            spec.output.chunk_rows,
            columns=spec.input.columns,
            sampling=sampling,
        ):
            rows = (_output_rows(prompt) for prompt in chunk.prompts)
            output.commit(chunk, {key: row for each in rows for key, row in each.items()})
    return JobOutput.open(str(folder / "out"))


def _output_rows(prompt: Prompt) -> dict[RowKey, OutputRow]:
    keys = [RowKey(prompt.shard, prompt.row, sample) for sample in range(prompt.sampling.n)]
    if prompt.error is not None:
        return {keys[0]: OutputRow(None, prompt.error)}
    return {key: OutputRow(f"text {key.row}", _completion(key)) for key in keys}


def _completion(key: RowKey) -> Completion:
    counts = SpeculationCounts()
    for accepted in range(key.row % 3 + 1):
        counts.record(4, 3, accepted)
    counts.mark(0)
    token_ids = [*range(key.row % 5 + 1)]
    return Completion(key, token_ids, "stop", 7, counts=counts, timing=Timing(0.1, 0.2, 0.3))
