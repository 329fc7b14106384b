"""The nouns that every part speaks: Prompt, Sampling, Request, Completion. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from adaflash_batch.errors import ConfigError
from adaflash_batch.stats import SpeculationCounts

FinishReason = Literal["stop", "length", "error"]


class RowKey(NamedTuple):
    """Where a completion belongs: input file, row in it, sample of that row (all 0-based)."""

    shard: int
    row: int
    sample: int


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row carries no completion.

    Attributes:
        kind: a stable snake_case word that programs may test, e.g. `prompt_too_long`.
        message: the same for people.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are chosen. Raises ConfigError for a value out of range.

    Attributes:
        temperature: 0 takes the argmax; otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens with at least this probability; 1 is off.
        top_k: keep the k most likely tokens; 0 is off.
        min_p: keep tokens at least this likely relative to the most likely one; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occur in
            the prompt or in the text so far (Keskar et al. 2019); 1 is off.
        presence_penalty: subtracted once from the logit of a token that was generated before.
        frequency_penalty: subtracted once for each time that a token was generated before.
        min_new_tokens: the end-of-sequence tokens and `stop_token_ids` cannot be chosen earlier.
        max_new_tokens: tokens generated at the most, at least 1.
        stop: strings that end the text; the text is cut before the first of them.
        stop_token_ids: token ids that end the text, besides the model's own.
        ignore_eos: the model's own end-of-sequence tokens do not end the text.
        seed: with row, sample and position, the key of every random choice.
        n: completions per prompt, at most `MOST_SAMPLES`.
        logit_bias: (token id, amount added to its logit) pairs, in order of token id.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, is_right, wanted in _CHECKS:
            value = getattr(self, name)
            # `not (…)` rather than the opposite comparison: NaN fails both.
            if not is_right(value):
                raise ConfigError(f"{name} is {value!r}, it must be {wanted}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens "
                f"({self.max_new_tokens})"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is taken."""
        return self.temperature == 0.0

    @property
    def reshapes_logits(self) -> bool:
        """Whether logits depend on the text so far or on fixed biases."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_new_tokens > 0
            or bool(self.logit_bias)
        )


_FINITE = 1e30
# All samples of a row are held until its chunk is whole.
MOST_SAMPLES = 10_000
_CHECKS = (
    ("temperature", lambda v: 0.0 <= v < _FINITE, "0 or more"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "above 0 and at most 1"),
    ("top_k", lambda v: v >= 0, "0 (off) or more"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "between 0 and 1"),
    ("repetition_penalty", lambda v: 0.0 < v < _FINITE, "above 0"),
    ("presence_penalty", lambda v: -_FINITE < v < _FINITE, "a finite number"),
    ("frequency_penalty", lambda v: -_FINITE < v < _FINITE, "a finite number"),
    ("min_new_tokens", lambda v: v >= 0, "0 or more"),
    ("max_new_tokens", lambda v: v >= 1, "1 or more"),
    ("stop", lambda v: all(v), "without empty strings"),
    ("seed", lambda v: -(2**63) <= v < 2**64, "a 64-bit integer"),
    ("n", lambda v: 1 <= v <= MOST_SAMPLES, f"1 or more, at most {MOST_SAMPLES}"),
)


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input row as it was read.

    Attributes:
        shard: number of the input file in the job.
        row: 0-based position in the file.
        identity: 64 bits that name the row for random choices (`shards.reader.row_identity`).
        content: text, or the turns of a conversation; None iff `error` is set.
        sampling: the job's sampling with the row's own columns laid over it.
        error: why the row cannot be served; the rest of its chunk is.
    """

    shard: int
    row: int
    identity: int
    content: str | tuple[Message, ...] | None
    sampling: Sampling
    error: RowError | None = None


class StopWatch(Protocol):
    """Looks for stop strings in a text that arrives token by token."""

    def feed(self, token_id: int) -> bool:
        """Take the next token; True when a stop string is now complete."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of one prompt, ready to decode.

    Attributes:
        key: where the completion belongs.
        token_ids: the prompt, at least one token.
        sampling: how tokens are chosen.
        identity: see Prompt.
        stop_watch: stateful, owned by this request; None when there are no stop strings.
        truncated_tokens: how many prompt tokens were cut to fit the context.
    """

    key: RowKey
    token_ids: list[int]
    sampling: Sampling
    identity: int
    stop_watch: StopWatch | None = None
    truncated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that a request spent waiting, in prefill, and in decoding."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of a request.

    Attributes:
        key: where it belongs.
        token_ids: what was generated, with the token that ended it (end of sequence, stop token,
            or the last token of a stop string).
        finish_reason: `stop`, `length` or `error`.
        prompt_tokens: tokens of the prompt as decoded (after truncation).
        truncated_tokens: prompt tokens that were cut.
        error: set iff finish_reason is `error`.
    """

    key: RowKey
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    truncated_tokens: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    timing: Timing = Timing()
    error: RowError | None = None


def sampling_fields() -> Mapping[str, str]:
    """Names of the fields of Sampling that an input column may set, with their Arrow-like kind."""
    return {
        "temperature": "float",
        "top_p": "float",
        "top_k": "int",
        "min_p": "float",
        "repetition_penalty": "float",
        "presence_penalty": "float",
        "frequency_penalty": "float",
        "min_new_tokens": "int",
        "max_new_tokens": "int",
        "stop": "strings",
        "stop_token_ids": "ints",
        "ignore_eos": "bool",
        "seed": "int",
        "n": "int",
    }
