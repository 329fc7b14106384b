"""What a job is before its model is loaded: files, the column of prompts, what it is known by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adaflash_batch import model_files
from adaflash_batch.request import Sampling
from adaflash_batch.sampling_defaults import default_sampling
from adaflash_batch.shards.columns import ContentColumn, check_sampling_columns, detect_content
from adaflash_batch.shards.identity import check_id_type, check_ids
from adaflash_batch.shards.inputs import resolve_inputs
from adaflash_batch.shards.parquet import ShardInfo, inspect_shard
from adaflash_batch.shards.schema import output_schema
from adaflash_batch.spec import JobSpec
from adaflash_batch.text import TextCodec


@dataclass(frozen=True, slots=True)
class JobInputs:
    """The input files of a job and the column that its prompts are in."""

    infos: list[ShardInfo]
    content: ContentColumn


def read_inputs(spec: JobSpec, *, check_id_column: bool = True) -> JobInputs:
    """Find the input files and look at their footers and columns; no row is read but for ids.

    Args:
        spec: the job.
        check_id_column: refuse nulls and repeats in the column of ids, which is read whole for it.

    Raises:
        InputError: a file is not there or cannot be read.
        ConfigError: columns are missing, of a wrong type, or have names that the output adds.
    """
    infos = [inspect_shard(shard) for shard in resolve_inputs(spec.input.paths)]
    columns, id_column = spec.input.columns, spec.input.id_column
    content = detect_content(
        [info.schema for info in infos],
        spec.input.prompt_column,
        spec.input.messages_column,
        names=[info.shard.path for info in infos],
        exclude={*columns.values(), id_column or ""},
    )
    for info in infos:
        check_sampling_columns(info.schema, columns, info.shard.path)
        output_schema(info.schema, spec.output.prefix)
        if id_column is not None:
            check_id_type(info.schema, id_column, info.shard.path)
    if id_column is not None and check_id_column:
        check_ids([info.shard for info in infos], id_column)
    return JobInputs(infos, content)


def text_facts(spec: JobSpec, inputs: JobInputs, model: Path) -> dict[str, object]:
    """Everything that changes a text or its place in the output, as JSON values.

    Args:
        spec: the job.
        inputs: its files.
        model: folder of the model.
    """
    facts = spec.text_fields()
    # The same may be named in another way: what counts is what files, columns and weights hold.
    named_only = ["input.paths", "input.prompt_column", "input.messages_column"]
    if not spec.model.trust_remote_code:  # of a model's own code its name is all that is known
        named_only += ["model.name", "model.revision"]
    for key in named_only:
        del facts[key]
    return {
        **facts,
        "inputs": {info.shard.name: info.digest for info in inputs.infos},
        "content": {"column": inputs.content.name, "kind": inputs.content.kind},
        "model": model_files.model_identity(model),
    }


def job_sampling(spec: JobSpec, model: Path) -> Sampling:
    """What the job says of sampling, over what the model's own files say."""
    return spec.sampling.over(default_sampling(model_files.generation_defaults(model)))


def load_codec(spec: JobSpec, model: Path, context: int) -> TextCodec:
    """Between texts and tokens as the job wants it.

    Args:
        spec: the job.
        model: folder of the model.
        context: longest prompt and completion together.
    """
    return TextCodec.load(
        model,
        use_chat_template=spec.prompt.chat_template,
        system_prompt=spec.prompt.system_prompt,
        context=context,
        on_long_prompt=spec.prompt.on_long_prompt,
        special_tokens_in_prompts=spec.prompt.special_tokens,
        trust_remote_code=spec.model.trust_remote_code,
    )
