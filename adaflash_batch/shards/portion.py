"""What part of a job a run does: all of it, or one of several shares of its chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.reader import num_chunks

_VARIABLES = {"slurm": "SLURM_ARRAY_TASK_ID", "kubernetes": "JOB_COMPLETION_INDEX"}


@dataclass(frozen=True, slots=True)
class Portion:
    """A run of chunks without a gap, over all input files in their order.

    Attributes:
        name: `all`, or `00002-of-00008`.
        first, end: numbers of its first chunk and of the one after its last.
        starts: number of the first chunk of each input file.
        sizes: rows of each input file.
        chunk_rows: rows of a chunk.
    """

    name: str
    first: int
    end: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    chunk_rows: int

    def holds(self, shard: int, chunk: int) -> bool:
        """Whether a chunk of an input file is in it."""
        if shard >= len(self.starts):
            return False
        return self.first <= self.starts[shard] + chunk < self.end

    @property
    def num_rows(self) -> int:
        """Its input rows."""
        return self._rows_before(self.end) - self._rows_before(self.first)

    def overlaps(self, other: Portion) -> bool:
        """Whether a chunk is in both; an empty portion has none to share."""
        return max(self.first, other.first) < min(self.end, other.end)

    def _rows_before(self, number: int) -> int:
        """Rows of all chunks before one."""
        shard = max(bisect_right(self.starts, number) - 1, 0)
        if not self.starts:
            return 0
        in_shard = min((number - self.starts[shard]) * self.chunk_rows, self.sizes[shard])
        return sum(self.sizes[:shard]) + in_shard


def whole_job(infos: Sequence[ShardInfo], chunk_rows: int) -> Portion:
    """All chunks of these input files."""
    return one_of(infos, chunk_rows, 0, 1)


def one_of(infos: Sequence[ShardInfo], chunk_rows: int, index: int, count: int) -> Portion:
    """Portion `index` of `count`; their numbers of chunks differ by one at the most."""
    counts = [num_chunks(info.num_rows, chunk_rows) for info in infos]
    ends = tuple(accumulate(counts))
    total = ends[-1] if ends else 0
    return Portion(
        name="all" if count == 1 else f"{index:05d}-of-{count:05d}",
        first=total * index // count,
        end=total * (index + 1) // count,
        starts=(0, *ends[:-1]) if ends else (),
        sizes=tuple(info.num_rows for info in infos),
        chunk_rows=chunk_rows,
    )


def read_name(name: str) -> tuple[int, int] | None:
    """Index and count that a portion's name stands for, None if it is none."""
    if name == "all":
        return 0, 1
    index, mark, count = name.partition("-of-")
    is_one = bool(mark) and index.isdecimal() and count.isdecimal() and int(index) < int(count)
    return (int(index), int(count)) if is_one else None


def index_from(scheduler: str, num_shards: int, environment: Mapping[str, str]) -> int:
    """The index that a scheduler gives to this process.

    Args:
        scheduler: `slurm` or `kubernetes`.
        num_shards: how many there are.
        environment: of the process.

    Raises:
        ConfigError: the variable is not set, no number, or out of range: a task that took a wrong
            share would leave rows undone and nobody would know.
    """
    variable = _VARIABLES[scheduler]
    value = environment.get(variable, "")
    if not value.strip():
        state = "empty" if variable in environment else "not set"
        raise ConfigError(
            f"{variable} is {state}, so it is not known which shard this run is",
            "run it as a task of an array, or give --shard-index",
        )
    if not value.strip().isdecimal() or int(value) >= num_shards:
        raise ConfigError(
            f"{variable} is {value!r}, with --num-shards {num_shards} it must be 0 to "
            f"{num_shards - 1}",
            "number the array's tasks from 0",
        )
    return int(value)
