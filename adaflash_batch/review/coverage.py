"""Which rows of the input have a part, and which have two or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from adaflash_batch.review.job_output import JobOutput

# A job that has just begun lacks nearly everything: so many gaps are listed for each input file.
_GAPS_LISTED = 20


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that no part holds, of consecutive chunks.

    Attributes:
        input: name of the input file.
        first_row, num_rows: which of its rows.
        first_chunk, last_chunk: which chunks those are.
    """

    input: str
    first_row: int
    num_rows: int
    first_chunk: int
    last_chunk: int

    def __str__(self) -> str:
        last_row = self.first_row + self.num_rows - 1
        rows = f"row {last_row}" if self.num_rows == 1 else f"rows {self.first_row} to {last_row}"
        chunks = (
            f"chunk {self.first_chunk}"
            if self.first_chunk == self.last_chunk
            else f"chunks {self.first_chunk} to {self.last_chunk}"
        )
        return f"{self.input}: {rows} ({chunks})"


@dataclass(slots=True)
class Coverage:
    """The chunks that parts hold.

    Attributes:
        names: of the part of each chunk.
    """

    names: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, shard: int, chunk: int, name: str) -> str | None:
        """Take a part; the name of another one that holds the same chunk, if there is one."""
        other = self.names.get((shard, chunk))
        if other is None:
            self.names[shard, chunk] = name
        return other

    def num_missing(self, job: JobOutput) -> int:
        """Input rows of the job that no part holds."""
        present = sum(job.rows_of(*key)[1] for key in self.names if _is_of(job, key))
        return job.num_rows - present

    def gaps(self, job: JobOutput) -> Iterator[Gap]:
        """What is missing, in order; of each input file the first few."""
        for source in job.inputs:
            for first, last in islice(self._runs(job, source.index), _GAPS_LISTED):
                begin = job.rows_of(source.index, first)[0]
                end = sum(job.rows_of(source.index, last))
                yield Gap(source.name, begin, end - begin, first, last)

    def _runs(self, job: JobOutput, shard: int) -> Iterator[tuple[int, int]]:
        """First and last of consecutive chunks without a part."""
        first = None
        num_chunks = job.chunks(shard)
        for chunk in range(num_chunks):
            is_missing = (shard, chunk) not in self.names
            if is_missing and first is None:
                first = chunk
            if first is not None and not is_missing:
                yield first, chunk - 1
                first = None
        if first is not None:
            yield first, num_chunks - 1


def _is_of(job: JobOutput, key: tuple[int, int]) -> bool:
    shard, chunk = key
    return 0 <= shard < len(job.inputs) and 0 <= chunk < job.chunks(shard)
