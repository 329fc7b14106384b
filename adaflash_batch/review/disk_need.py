"""How much disk the output will take, and how much is free."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from adaflash_batch.review.lengths import Work
from adaflash_batch.review.previous import Previous, existing_above
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.locations import stat

# Text is 4 to 5 bytes a token; that parts are compressed is left as a margin.
_TOKEN_BYTES = 5
_ROW_BYTES = 100


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Bytes.

    Attributes:
        at_most: about what the parts that are missing take.
        is_measured: whether that is by parts that are done.
        free: where the output goes; None where that cannot be told.
    """

    at_most: int
    is_measured: bool
    free: int | None

    @property
    def fits(self) -> bool:
        """Whether there is room as far as one can tell."""
        return self.free is None or self.at_most <= self.free

    def to_json(self) -> dict[str, object]:
        """Need, room, and how the need was found."""
        return {
            "at_most_bytes": self.at_most,
            "measured": self.is_measured,
            "free_bytes": self.free,
            "fits": self.fits,
        }


def disk_need(
    shards: Sequence[Shard], num_rows: int, rows_left: int, work: Work, previous: Previous
) -> DiskNeed:
    """Estimate what the parts that are missing will take.

    Args:
        shards: the input files, whose columns the output repeats.
        num_rows: of all of them.
        rows_left: of those, rows that no part holds.
        work: what they ask for.
        previous: the output directory.
    """
    free = shutil.disk_usage(existing_above(previous.path)).free if previous.local else None
    done = previous.totals.num_rows
    if done:
        return DiskNeed(previous.part_bytes * rows_left // done, True, free)
    size = sum(int(stat(shard.filesystem, shard.path).size or 0) for shard in shards)
    samples = work.requests / work.rows if work.rows else 1.0
    inputs = size * samples * rows_left / max(num_rows, 1)
    texts = work.completion_tokens * _TOKEN_BYTES + rows_left * samples * _ROW_BYTES
    return DiskNeed(int(inputs + texts), False, free)
