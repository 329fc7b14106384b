"""Rows of an input file, read forwards once, and compared with the columns of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from adaflash_batch.errors import InputError, first_line
from adaflash_batch.review.our_columns import Ints, Mask
from adaflash_batch.shards.parquet import read_batches


class InputRows:
    """Goes through an input file; row groups of which no row is asked for are not read.

    Args:
        file: an open `pyarrow.parquet.ParquetFile`.
        name: what to call it.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name
        self._groups = iter(range(file.metadata.num_row_groups))
        self._batches: Iterator[Any] = iter(())
        self._rest: Any = None
        self._row = 0

    def read(self, first_row: int, count: int) -> list[Any]:
        """Record batches of the rows from `first_row` on; fewer rows where the file ends.

        `first_row` is never before the end of what was read last. Raises InputError.
        """
        assert first_row >= self._row
        try:
            return self._read(first_row, count)
        except (OSError, pa.ArrowException) as error:
            raise InputError(
                f"cannot read {self._name}: {first_line(error)}",
                "--no-inputs looks at the output alone",
            ) from error

    def _read(self, first_row: int, count: int) -> list[Any]:
        pieces = []
        while count > 0 and self._reach(first_row):
            size = min(self._rest.num_rows, count)
            pieces.append(self._drop(size))
            first_row += size
            count -= size
        return pieces

    def _reach(self, row: int) -> bool:
        """Stand before a row; False if the file has none of that number."""
        while True:
            if self._rest is not None:
                self._drop(min(row - self._row, self._rest.num_rows))
                if self._rest.num_rows:
                    return True
            self._rest = next(self._batches, None)
            if self._rest is None and not self._next_group(row):
                return False

    def _next_group(self, row: int) -> bool:
        for group in self._groups:
            num_rows = self._file.metadata.row_group(group).num_rows
            if self._row + num_rows > row:
                self._batches = read_batches(self._file, row_groups=[group])
                return True
            self._row += num_rows
        return False

    def _drop(self, count: int) -> Any:
        """Take so many rows from the front of what is in memory."""
        taken = self._rest.slice(0, count)
        self._rest = self._rest.slice(count)
        self._row += count
        return taken


class InputComparison:
    """Compares the input columns of a part, batch by batch, with the rows that they came from.

    Args:
        source: of the input file.
        names: its columns, in order, of which the part has equally many before ours.
        first_row, count: the rows of the part's chunk.
    """

    def __init__(self, source: InputRows, names: list[str], first_row: int, count: int) -> None:
        self._source = source
        self._names = names
        self._next = first_row
        self._left = count
        self._carried: list[Any] = []

    def differences(self, batch: Any, samples: Ints) -> Iterator[tuple[str, Mask]]:
        """Column, and the rows of the batch that have another value there.

        Rows that the input does not have are left out: that their number is wrong shows elsewhere.
        """
        starts = samples == 0
        wanted = min(int(starts.sum()), self._left)
        read = self._source.read(self._next, wanted)
        pieces = [*self._carried, *read]
        num_read = sum(piece.num_rows for piece in read)
        self._next += num_read
        self._left -= num_read
        if not pieces:
            return
        places = np.cumsum(starts) - (0 if self._carried else 1)
        known = (places >= 0) & (places < sum(piece.num_rows for piece in pieces))
        last = pieces[-1]
        self._carried = [last.slice(last.num_rows - 1)]
        rows = np.flatnonzero(known)
        for index, name in enumerate(self._names):
            ours = pa.chunked_array([_comparable(batch.column(index))])
            theirs = pa.chunked_array([_comparable(piece.column(index)) for piece in pieces])
            different = np.zeros(len(samples), dtype=np.bool_)
            different[_different(ours, theirs, rows, places[rows])] = True
            yield name, different


def _different(ours: Any, theirs: Any, rows: Ints, places: Ints) -> list[int]:
    """Of these rows of ours those whose value is not the one at the place that belongs to it."""
    if len(rows) == len(ours) and ours.equals(_taken(theirs, places)):
        return []
    pairs = zip(rows.tolist(), places.tolist(), strict=True)
    return [row for row, place in pairs if not _same(ours[row], theirs[place])]


def _taken(values: Any, places: Ints) -> Any:
    """The values at these places, in their order; some others where Arrow cannot do that."""
    if len(places) == 0 or places[-1] - places[0] + 1 == len(places):
        is_run = len(places) == 0 or bool((np.diff(places) == 1).all())
        if is_run:
            return values.slice(int(places[0]) if len(places) else 0, len(places))
    try:
        return values.take(pa.array(places))
    except pa.ArrowNotImplementedError:  # string_view and binary_view, in lists too
        return values


def _comparable(array: Any) -> Any:
    """The same values without dictionary or extension; numbers as bits, so that NaN equals NaN."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _comparable(array.storage)
    if pa.types.is_dictionary(array.type):
        return _comparable(array.dictionary_decode())
    if pa.types.is_floating(array.type):
        return array.view({16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[array.type.bit_width])
    return array


def _same(one: Any, other: Any) -> bool:
    if one.equals(other):
        return True
    try:
        return _alike(one.as_py(), other.as_py())
    except (UnicodeDecodeError, ValueError, OverflowError):  # a value that Python has none for
        return False


def _alike(one: Any, other: Any) -> bool:
    """Equal Python values, NaN in lists and structs included."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return bool(one == other or (one != one and other != other))
