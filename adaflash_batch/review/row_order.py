"""Samples of each row in order, all of them; and the sums over a part against its footer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from adaflash_batch.review.our_columns import Ints, OurColumns
from adaflash_batch.shards.footer import Totals

# They depend on the order in which rows were finished, which no file tells.
_NOT_SUMS = ("drafter_first", "drafter_last")


@dataclass(slots=True)
class SampleOrder:
    """Follows the samples of a part: 0 to n - 1 of one input row, then of the next.

    A row that was refused before it was decoded has sample 0 alone, with its error.

    Attributes:
        num_rows: input rows that have begun.
    """

    num_rows: int = 0
    _last: int = -1
    _first: int = 0
    _length: int = 0
    _wanted: int = 0
    _is_error: bool = False

    def take(self, ours: OurColumns, wanted: Ints, begin: int) -> Iterator[tuple[int, str]]:
        """Rows of the part that are not in order, and why.

        Args:
            ours: a batch of its rows.
            wanted: number of samples of each row's input row.
            begin: row of the part that the batch begins with.
        """
        samples = ours.samples
        before = np.concatenate(([self._last], samples[:-1]))
        self._last = int(samples[-1]) if len(samples) else self._last
        for index in np.flatnonzero((samples != 0) & (samples != before + 1)).tolist():
            yield begin + index, f"is {samples[index]}, it follows {before[index]}"
        starts = np.flatnonzero(samples == 0)
        self._length += int(starts[0]) if len(starts) else len(samples)
        ends = np.append(starts, len(samples))[1:]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield from self.end()
            self.num_rows += 1
            self._first, self._length = begin + start, end - start
            self._wanted, self._is_error = int(wanted[start]), bool(ours.is_error[start])

    def end(self) -> Iterator[tuple[int, str]]:
        """No more samples of the row that is open come."""
        is_refused = self._length == 1 and self._is_error
        if self.num_rows and self._length != self._wanted and not is_refused:
            yield self._first, f"begins {self._length} samples, the job asks for {self._wanted}"


@dataclass(slots=True)
class Sums:
    """Sums over the rows of a part, by the names of the footer."""

    totals: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, list[int]] = field(default_factory=dict)

    def add(self, ours: OurColumns) -> None:
        """Take in a batch."""
        self._add("num_rows", int((ours.samples == 0).sum()))
        self._add("num_output_rows", ours.num_rows)
        self._add("num_errors", int(ours.is_error.sum()))
        self._add("drafting", ours.histograms["verified_hist"].nonzero)
        for name, values in ours.ints.items():
            self._add(name.partition(".")[2], int(values.sum()))
        for name, histogram in ours.histograms.items():
            sums = self.histograms.setdefault(name, [])
            sums.extend([0] * (len(histogram.by_place) - len(sums)))
            for place, count in enumerate(histogram.by_place.tolist()):
                sums[place] += count

    def differences(self, totals: Totals) -> Iterator[str]:
        """What a footer says otherwise."""
        said = asdict(totals)
        said |= said.pop("counts")
        for name, value in said.items():
            if name in _NOT_SUMS:
                continue
            found: Any = self.histograms.get(name) if name.endswith("_hist") else None
            found = self.totals.get(name, 0) if found is None and name in self.totals else found
            if found != value and (found or value):
                yield f"its footer says {value} {name}, its rows come to {found}"

    def _add(self, name: str, value: int) -> None:
        self.totals[name] = self.totals.get(name, 0) + value
