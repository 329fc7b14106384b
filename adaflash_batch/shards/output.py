"""The output directory: what is there, and how a chunk is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adaflash_batch.request import RowKey
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.portion import Portion
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.recovery import Committed
from adaflash_batch.shards.schema import OutputRow, build_table, output_schema
from adaflash_batch.shards.writer import Totals, make_footer, part_name, write_part


class Output:
    """The parts of one job.

    Args:
        filesystem: of the output directory.
        path: the directory's path there.
        prefix: put before the names of our columns.
        infos: the input files.
        fingerprint: of the job.
        done: the parts of the portion that are there already.
        portion: the chunks that this run is for.

    Attributes:
        num_rows: input rows of the portion.
        resumed_rows: those that were committed before.
        totals: sums over all parts.
        num_parts: parts written by this process.
    """

    def __init__(
        self,
        filesystem: Any,
        path: str,
        *,
        prefix: str,
        infos: Sequence[ShardInfo],
        fingerprint: str,
        done: Committed,
        portion: Portion,
    ) -> None:
        self._filesystem = filesystem
        self._path = path
        self._prefix = prefix
        self._infos = infos
        self._fingerprint = fingerprint
        self._done = done
        self._portion = portion
        self.num_rows = portion.num_rows
        self.resumed_rows = done.totals.num_rows
        self.totals: Totals = done.totals
        self.num_parts = 0

    @property
    def num_rows_left(self) -> int:
        """Input rows of the portion that no part holds."""
        return self.num_rows - self.totals.num_rows

    def is_done(self, shard: int, chunk: int) -> bool:
        """Whether an earlier run committed the chunk, or it is another one's."""
        return self._done.is_done(shard, chunk) or not self._portion.holds(shard, chunk)

    def commit(
        self, chunk: Chunk, rows: Mapping[RowKey, OutputRow], drafter_version: int | None = None
    ) -> None:
        """Write the part of a whole chunk, with the version that drafted at its end."""
        schema = output_schema(chunk.table.schema, self._prefix)
        footer = make_footer(
            chunk,
            rows.values(),
            fingerprint=self._fingerprint,
            shard_digest=self._infos[chunk.shard.index].digest,
            drafter_version=drafter_version,
            sequence=self._done.num_committed + self.num_parts,
        )
        name = part_name(chunk.shard.index, chunk.index)
        table = build_table(chunk, rows, schema)
        write_part(self._path, name, table, footer, self._filesystem)
        self.totals += footer.totals
        self.num_parts += 1
