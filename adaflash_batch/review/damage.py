"""Where an input file cannot be read: which rows, which columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from adaflash_batch.errors import InputError
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.parquet import open_shard, read_batches


@dataclass(frozen=True, slots=True)
class Damage:
    """Rows of a file that cannot be read.

    Attributes:
        file: its path.
        first_row, end_row: the first of them, and the one after the last.
        column: where the damage is; None where that cannot be told.
        message: what the reader says.
        row_group: that the rows are in, by its first row and the one after its last.
    """

    file: str
    first_row: int
    end_row: int
    column: str | None
    message: str
    row_group: tuple[int, int] = field(repr=False)

    def to_json(self) -> dict[str, object]:
        """Without the row group."""
        return {
            "file": self.file,
            "first_row": self.first_row,
            "last_row": self.end_row - 1,
            "column": self.column,
            "message": self.message,
        }


def find_damage(shard: Shard, error: InputError) -> list[Damage]:
    """Read a file again, row group by row group, to see where it is damaged.

    Args:
        shard: the file.
        error: that reading it ended with; it stands for the whole file where nothing is found.
    """
    found = []
    with suppress(InputError):
        for number, (first_row, end_row) in enumerate(_row_groups(shard)):
            if _read(shard, number, None)[1] is not None:
                found += list(_damaged_columns(shard, number, first_row, end_row))
        if found:
            return found
    end_row = _num_rows(shard)
    return [Damage(shard.path, 0, end_row, None, error.message, (0, end_row))]


def _row_groups(shard: Shard) -> list[tuple[int, int]]:
    with open_shard(shard) as file:
        metadata = file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _num_rows(shard: Shard) -> int:
    with suppress(InputError), open_shard(shard) as file:
        return int(file.metadata.num_rows)
    return 0


def _damaged_columns(shard: Shard, group: int, first_row: int, end_row: int) -> Iterator[Damage]:
    with open_shard(shard) as file:
        names: Sequence[str] = list(file.schema_arrow.names)
    for name in names:
        num_read, message = _read(shard, group, name)
        if message is not None:
            begin = min(first_row + num_read, end_row - 1)
            yield Damage(shard.path, begin, end_row, name, message, (first_row, end_row))


def _read(shard: Shard, group: int, column: str | None) -> tuple[int, str | None]:
    """Rows of a row group that can be read, in all columns or one, and why no more can."""
    num_read = 0
    columns = None if column is None else [column]
    try:
        # Opened anew: after an error a reader's state is anybody's guess.
        with open_shard(shard) as file:
            for batch in read_batches(file, row_groups=[group], columns=columns):
                num_read += batch.num_rows
    except InputError as error:
        return num_read, error.message
    return num_read, None
