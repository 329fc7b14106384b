"""The sections of a job file: every key with its type, its default and what it means."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from adaflash_batch.models import DEFAULT_MODEL
from adaflash_batch.request import Sampling

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Read `4GiB`, `512 MB` and the like; ValueError for anything else, or for no bytes at all."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", text.strip(), re.IGNORECASE)
    factor = _BYTES.get(match[2].upper()) if match else None
    if match is None or factor is None or (size := int(float(match[1]) * factor)) == 0:
        raise ValueError("it should be a size with its unit, like 4GiB or 512MB")
    return size


def as_tuple(value: object) -> object:
    """A list as a tuple; one string stands for a list of one, anything else for itself."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _none_if_off(value: object) -> object:
    return None if value in ("none", "off") else value


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorLimit:
    """How many rows of a job may carry errors.

    Attributes:
        most: rows, or a share of all rows where `is_share`.
    """

    most: float
    is_share: bool

    def rows(self, num_rows: int) -> int:
        """The most of so many rows."""
        return int(self.most * num_rows + 1e-9) if self.is_share else int(self.most)


def parse_limit(text: str) -> ErrorLimit:
    """Read `100` (rows) or `2.5%` (of all rows); ValueError for anything else."""
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None or (match[2] and float(match[2]) > 100):
        raise ValueError("it should be a number of rows, like 100, or a share of them, like 2.5%")
    return ErrorLimit(float(match[2]) / 100, True) if match[2] else ErrorLimit(int(match[1]), False)


def _as_limit(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    parse_limit(str(value))
    return str(value)


def _as_size(value: object) -> str:
    parse_bytes(str(value))
    return str(value)


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(as_tuple)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(as_tuple)]
# TOML and JSON know only text as keys.
LogitBias = dict[
    Annotated[int, Field(ge=0, strict=False)], Annotated[float, Field(allow_inf_nan=False)]
]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Drafter = Annotated[Name | None, BeforeValidator(_none_if_off)]
Size = Annotated[str, BeforeValidator(_as_size)]
Limit = Annotated[str | None, BeforeValidator(_as_limit)]

_SECTION = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class InputSection(BaseModel):
    """Where the prompts are."""

    model_config = _SECTION

    paths: Names = ()
    """Parquet files, directories, globs or URIs, relative to the current directory."""
    prompt_column: Name | None = None
    """Column that holds the prompt as text."""
    messages_column: Name | None = None
    """Column that holds the prompt as a list of {role, content}."""
    id_column: Name | None = None
    """Column that identifies a row for its random choices, instead of its position."""
    columns: dict[Name, Name] = {}
    """FIELD=COLUMN: take a sampling field from an input column; null is the job's value."""


class PromptSection(BaseModel):
    """How a prompt becomes tokens."""

    model_config = _SECTION

    system_prompt: str | None = None
    """System message put before every prompt that has none of its own."""
    chat_template: bool | None = None
    """Whether prompts go through the model's chat template; on where the model has one."""
    on_long_prompt: Literal["error", "truncate-left", "truncate-right"] = "error"
    """What to do with a prompt that leaves no room for max_new_tokens."""
    special_tokens: Literal["text", "parse"] = "text"
    """Whether the text of a special token in a prompt stays text or becomes that token."""


class OutputSection(BaseModel):
    """Where the completions go."""

    model_config = _SECTION

    directory: Name
    """Output directory; in the current one and named after the first input unless given."""
    prefix: str = ""
    """Put before the names of the columns that this program adds."""
    chunk_rows: Count = 1000
    """Rows of one output file."""


class ModelSection(BaseModel):
    """The model whose text it is."""

    model_config = _SECTION

    name: Name = DEFAULT_MODEL
    """Model folder or hub id."""
    revision: Name | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the model; auto is the checkpoint's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class SamplingSection(BaseModel):
    """How tokens are chosen; None is the model's generation config, else Sampling's default."""

    model_config = _SECTION

    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens with this probability; 1 is off."""
    top_k: int | None = None
    """Keep this many most likely tokens; 0 is off."""
    min_p: float | None = None
    """Keep tokens at least this likely relative to the most likely one; 0 is off."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens in the prompt or the text so far; 1 is off."""
    presence_penalty: float | None = None
    """Subtracted once from the logit of a token generated before."""
    frequency_penalty: float | None = None
    """Subtracted for each time that a token was generated before."""
    min_new_tokens: int | None = None
    """The text cannot end before this many tokens."""
    max_new_tokens: int | None = None
    """Tokens generated at the most."""
    stop: Names | None = None
    """String that ends the text and is cut from it."""
    stop_token_ids: TokenIds | None = None
    """Token id that ends the text, besides the model's own."""
    ignore_eos: bool | None = None
    """Go on past the model's own end-of-sequence tokens."""
    seed: int | None = None
    """With row, sample and position, the key of every random choice."""
    n: int | None = None
    """Completions per prompt, at most 10,000."""
    logit_bias: LogitBias | None = None
    """Token id -> amount added to its logit."""

    def over(self, defaults: Sampling) -> Sampling:
        """Lay the values given here over `defaults`. Raises ConfigError if they do not agree."""
        given: dict[str, object] = {k: v for k, v in dict(self).items() if v is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        return dataclasses.replace(defaults, **given)  # type: ignore[arg-type]


class EngineSection(BaseModel):
    """How much of the machine is used; changes no text, but for `context`, `deterministic`."""

    model_config = _SECTION

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU that PyTorch can use."""
    deterministic: bool = False
    """On a GPU, round every token alike whatever else is in its pass; slower, changes texts."""
    concurrency: Count = 64
    """Requests decoded at once."""
    token_budget: Count = 1024
    """Tokens that go through the model in one step."""
    kv_memory: Size | None = None
    """Memory for keys and values, like 4GiB; a share of what is free unless given."""
    threads: Count | None = None
    """CPU threads; the cores available unless given."""
    context: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt and completion together; the model's unless given."""
    share_prefixes: bool = True
    """Compute what prompts begin with in common once, and the prompt of n samples."""

    @property
    def kv_bytes(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else parse_bytes(self.kv_memory)


class SpeculationSection(BaseModel):
    """How drafts are made; changes no text."""

    model_config = _SECTION

    drafter: Drafter = None
    """Folder of a DFlash drafter; none decodes without."""
    drafter_store: Drafter = None
    """Folder of drafters kept between jobs; the model's current version drafts."""
    width: Count | None = None
    """Most draft tokens verified at once; all that are drafted unless given."""
    widths: Literal["survival", "adaflash", "fixed"] = "survival"
    """Verify what is expected to be fastest; what the scalar head of AdaFlash says; or all."""
    when: Literal["pays", "always"] = "pays"
    """Draft only in steps where that is faster than plain decoding, or in all."""
    lookup: bool = True
    """Draft from the request's own text and from finished rows, too, where they repeat."""


class AdaptSection(BaseModel):
    """How the drafter learns while the job runs; changes no text."""

    model_config = _SECTION

    when: Literal["pays", "even", "always", "off"] = "pays"
    """Learn while it pays within the job; all it can bear; all the time, for later jobs; never."""
    share: Share = 0.5
    """Most of the time that learning may take."""
    parameters: Literal["all", "new", "lora", "heads"] = "all"
    """All; those that plain DFlash has not; low-rank additions and the latter; judging heads."""
    rank: Count = 8
    """Of low-rank additions."""
    place: Literal["auto", "inline", "thread", "process"] = "auto"
    """Learn between steps, in a thread or in a process; auto chooses by the device."""
    threads: Count | None = None
    """CPU threads of a trainer in its own thread or process; half of the decoder's if not given."""
    objective: Literal["opd", "forward_kl", "ce"] = "opd"
    """What the drafter is trained for: opd mixes cross-entropy and reverse KL."""
    ce_weight: Share = 0.8
    """Share of the cross-entropy in opd."""
    clip: Positive | None = None
    """Nats that one vocabulary entry adds to the reverse KL at the most."""
    gamma: Positive = 4.0
    """Draft positions count less by exp(-1 / gamma) each."""
    optimiser: Literal["adamw", "muon"] = "muon"
    """Muon for the projections, AdamW for the rest; or AdamW for all."""
    rate: Positive = 5e-4
    """Learning rate."""
    updates: Count = 16
    """Updates of a round; only a round that proves better is drafted with."""
    fresh: Count = 64
    """Finished texts that must come before another round."""
    batch: Count = 8
    """Texts of an update."""
    anchors: Count = 16
    """Blocks of each of them."""
    replay_share: Share = 0.5
    """Share of an update's texts that come from the whole job; the rest are the newest."""
    averaging: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share that averaged weights keep of themselves in an update; 0 drafts with the weights."""
    pull: Annotated[float, Field(ge=0)] = 100.0
    """Pull back to the weights that draft, relative to the learning rate; against forgetting."""
    ranks: Count = 1
    """Processes that share each update by DeepSpeed's ZeRO (extra deepspeed)."""
    zero_stage: Annotated[int, Field(ge=1, le=2)] = 1
    """Of ZeRO: share out the optimiser's memory, or the gradients too."""
    memory: Size = "1GiB"
    """For the states of finished texts to learn from."""

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return parse_bytes(self.memory)


class RunSection(BaseModel):
    """When a run ends early, and what part of a job it does; changes no text."""

    model_config = _SECTION

    max_errors: Limit = None
    """Stop when more rows carry errors: a number, or a share of all rows like 2.5%."""
    grace: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0
    """Seconds to finish what is being decoded, after a signal to stop."""
    scratch: Name | None = None
    """Local folder for journals and, of outputs that are not local, locks."""
    fresh: bool = False
    """Do everything anew; what is there is replaced only when the new output is whole."""
    num_shards: Count | None = None
    """Share the job out to so many runs, on one output directory."""
    shard_index: Annotated[int, Field(ge=0)] | None = None
    """Which of them this run is, from 0."""
    shards_from: Literal["slurm", "kubernetes"] | None = None
    """Take shard_index from SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX."""

    @property
    def error_limit(self) -> ErrorLimit | None:
        """`max_errors` as numbers."""
        return None if self.max_errors is None else parse_limit(self.max_errors)
