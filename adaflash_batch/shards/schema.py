"""The columns of the output: the input's, unchanged, and ours, typed and never inferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Completion, RowError, RowKey, Timing
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.stats import SpeculationCounts

_INT = pa.int32()

# Order and types of our columns. Changing either is a new format (footer.FORMAT).
OUR_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("completion", pa.string()),
    ("finish_reason", pa.string()),
    ("sample", _INT),
    ("error", pa.struct([("kind", pa.string()), ("message", pa.string())])),
    (
        "usage",
        pa.struct(
            [("prompt_tokens", _INT), ("completion_tokens", _INT), ("truncated_tokens", _INT)]
        ),
    ),
    (
        "spec",
        pa.struct(
            [
                ("steps", _INT),
                ("drafted", _INT),
                ("verified", _INT),
                ("accepted", _INT),
                ("accepted_hist", pa.list_(_INT)),
                ("drafter_first", _INT),
                ("drafter_last", _INT),
                ("verified_hist", pa.list_(_INT)),
                ("lookup_steps", _INT),
                ("lookup_verified", _INT),
                ("lookup_accepted", _INT),
            ]
        ),
    ),
    (
        "timing",
        pa.struct(
            [
                ("queued_s", pa.float32()),
                ("prefill_s", pa.float32()),
                ("decode_s", pa.float32()),
            ]
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """What is written for one sample of one row.

    Attributes:
        completion: the text, ignored where `outcome` is an error.
        outcome: what came of the request, or why the row never became one.
    """

    completion: str | None
    outcome: Completion | RowError

    @property
    def error(self) -> RowError | None:
        """Why there is no completion."""
        return self.outcome if isinstance(self.outcome, RowError) else self.outcome.error

    @property
    def served(self) -> Completion | None:
        """The request's outcome if it succeeded."""
        if isinstance(self.outcome, RowError) or self.outcome.finish_reason == "error":
            return None
        return self.outcome


def output_schema(input_schema: Any, prefix: str = "") -> Any:
    """The Arrow schema of the output for an input of this schema; ours come last.

    Raises ConfigError if one of our names, with the prefix, is an input column.
    """
    ours = [pa.field(prefix + name, arrow_type) for name, arrow_type in OUR_COLUMNS]
    taken = [field.name for field in ours if field.name in input_schema.names]
    if taken:
        raise ConfigError(
            f"the input has a column named {taken[0]!r}, which the output adds",
            "choose a prefix for the added columns, e.g. --output-prefix adaflash_",
        )
    return pa.schema([*input_schema, *ours], metadata=input_schema.metadata)


def build_table(chunk: Chunk, rows: Mapping[RowKey, OutputRow], schema: Any) -> Any:
    """The output rows of a chunk: one a sample, in order of input row, then sample.

    Args:
        chunk: the input rows.
        rows: samples 0 up to `n` of every input row, or sample 0 alone where that is an error.
        schema: `output_schema` of the chunk's table.
    """
    indices: list[int] = []
    outputs: list[OutputRow] = []
    for index in range(chunk.num_rows):
        samples = _samples_of(chunk, index, rows)
        indices.extend([index] * len(samples))
        outputs.extend(samples)
    assert len(outputs) == len(rows), "rows of another chunk or samples beyond n"
    columns = [_repeat(column, indices, chunk.num_rows) for column in chunk.table.columns]
    return pa.Table.from_arrays(columns + _our_arrays(chunk, indices, outputs), schema=schema)


def _samples_of(chunk: Chunk, index: int, rows: Mapping[RowKey, OutputRow]) -> list[OutputRow]:
    prompt = chunk.prompts[index]
    key = RowKey(chunk.shard.index, chunk.first_row + index, 0)
    first = rows[key]
    if first.error is not None and key._replace(sample=1) not in rows:
        return [first]
    return [rows[key._replace(sample=sample)] for sample in range(prompt.sampling.n)]


def _repeat(column: Any, indices: Sequence[int], num_rows: int) -> Any:
    if len(indices) == num_rows:  # every row has at least one sample, so each has exactly one
        return column
    try:
        return column.take(pa.array(indices, pa.int64()))
    # Views, in lists too, and dictionaries that together exceed their index type.
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        slices = [piece for i in indices for piece in column.slice(i, 1).chunks]
        return pa.chunked_array(slices, type=column.type)


def _our_arrays(chunk: Chunk, indices: Sequence[int], outputs: Sequence[OutputRow]) -> list[Any]:
    samples = [i - first for i, first in enumerate(_first_positions(indices))]
    values = {
        "completion": [row.completion if row.served else None for row in outputs],
        "finish_reason": [row.served.finish_reason if row.served else "error" for row in outputs],
        "sample": samples,
        "error": [_error_value(row) for row in outputs],
        "usage": [_usage_value(row.served) for row in outputs],
        "spec": [_spec_value(row.served) for row in outputs],
        "timing": [_timing_value(row.served) for row in outputs],
    }
    return [pa.array(values[name], arrow_type) for name, arrow_type in OUR_COLUMNS]


def _first_positions(indices: Sequence[int]) -> list[int]:
    """For each output row, the position of the first output row of the same input row."""
    first: dict[int, int] = {}
    return [first.setdefault(index, position) for position, index in enumerate(indices)]


def _error_value(row: OutputRow) -> dict[str, str] | None:
    if row.served is not None:
        return None
    error = row.error or RowError("unknown", "the request failed without saying why")
    return {"kind": error.kind, "message": error.message}


def _usage_value(served: Completion | None) -> dict[str, int]:
    return {
        "prompt_tokens": served.prompt_tokens if served else 0,
        "completion_tokens": len(served.token_ids) if served else 0,
        "truncated_tokens": served.truncated_tokens if served else 0,
    }


def _spec_value(served: Completion | None) -> dict[str, Any]:
    counts = served.counts if served else SpeculationCounts()
    return {name: getattr(counts, name) for name in SpeculationCounts.__slots__}


def _timing_value(served: Completion | None) -> dict[str, float]:
    timing = served.timing if served else Timing()
    return {name: getattr(timing, name) for name in Timing.__slots__}
