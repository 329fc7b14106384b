"""What a part file says of itself, and the sums over its rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.schema import OutputRow
from adaflash_batch.stats import SpeculationCounts

FORMAT = 2
NAMESPACE = b"adaflash."
_ROW_SUMS = ("num_rows", "num_output_rows", "num_errors")
_TOKEN_SUMS = ("prompt_tokens", "completion_tokens", "truncated_tokens")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over output rows: of a part, or of all parts of a job."""

    num_rows: int = 0
    num_output_rows: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated_tokens: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    def __add__(self, other: Totals) -> Totals:
        counts = SpeculationCounts()
        counts.add(self.counts)
        counts.add(other.counts)
        return Totals(
            num_rows=self.num_rows + other.num_rows,
            num_output_rows=self.num_output_rows + other.num_output_rows,
            num_errors=self.num_errors + other.num_errors,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            truncated_tokens=self.truncated_tokens + other.truncated_tokens,
            counts=counts,
        )


@dataclass(frozen=True, slots=True)
class PartFooter:
    """What a part says of itself in its key-value metadata, under `adaflash.*`.

    Attributes:
        fingerprint: of the job (`recovery.fingerprint`).
        shard_name, shard_digest, shard_index: the input file.
        chunk_index, first_row: which of its rows; their number is in `totals`.
        totals: sums over the part's rows.
        drafter_version: committed with this part, None if there is no drafter.
        sequence: how many parts of the job were committed before it.
    """

    fingerprint: str
    shard_name: str
    shard_digest: str
    shard_index: int
    chunk_index: int
    first_row: int
    totals: Totals
    drafter_version: int | None
    sequence: int = 0

    def to_metadata(self) -> dict[bytes, bytes]:
        """As Parquet key-value metadata; the values are JSON."""
        values = asdict(self)
        totals = values.pop("totals")
        for name in ("num_rows", "num_output_rows", "num_errors"):
            values[name] = totals.pop(name)
        values |= {"format": FORMAT, "counts": totals.pop("counts") | totals}
        return {NAMESPACE + k.encode(): json.dumps(v).encode() for k, v in values.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None) -> PartFooter | None:
        """Read it back; None if there is none, or none of this format."""
        values = {
            key.removeprefix(NAMESPACE).decode(): value
            for key, value in (metadata or {}).items()
            if key.startswith(NAMESPACE)
        }
        try:
            found = {key: json.loads(value) for key, value in values.items()}
            if found.pop("format") != FORMAT:
                return None
            counts = found.pop("counts")
            tokens = {name: counts.pop(name) for name in _TOKEN_SUMS}
            rows = {name: found.pop(name) for name in _ROW_SUMS}
            return cls(**found, totals=Totals(**rows, **tokens, counts=SpeculationCounts(**counts)))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def sum_rows(num_rows: int, outputs: Iterable[OutputRow]) -> Totals:
    """Totals of the output rows of `num_rows` input rows; errors add nothing but their number."""
    totals = dict.fromkeys((*_ROW_SUMS, *_TOKEN_SUMS), 0) | {"num_rows": num_rows}
    counts = SpeculationCounts()
    for row in outputs:
        totals["num_output_rows"] += 1
        if row.served is None:
            totals["num_errors"] += 1
            continue
        totals["prompt_tokens"] += row.served.prompt_tokens
        totals["completion_tokens"] += len(row.served.token_ids)
        totals["truncated_tokens"] += row.served.truncated_tokens
        counts.add(row.served.counts)
    return Totals(**totals, counts=counts)


def make_footer(
    chunk: Chunk,
    outputs: Iterable[OutputRow],
    *,
    fingerprint: str,
    shard_digest: str,
    drafter_version: int | None = None,
    sequence: int = 0,
) -> PartFooter:
    """The footer of the part of a chunk."""
    return PartFooter(
        fingerprint=fingerprint,
        shard_name=chunk.shard.name,
        shard_digest=shard_digest,
        shard_index=chunk.shard.index,
        chunk_index=chunk.index,
        first_row=chunk.first_row,
        totals=sum_rows(chunk.num_rows, outputs),
        drafter_version=drafter_version,
        sequence=sequence,
    )
