"""What is found wrong: file, row, column, in words; of one kind in one file the first few rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

# A file that is wrong in every row is told of in so many lines, and one with the number of rows.
ROWS_LISTED = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        file: name of a part, of another file below the output, or of an input file.
        row: of the file, from 0; None where it is about the whole file.
        column: None where it is about no column in particular.
        message: what is wrong, as a predicate of these: `holds 3 rows, its footer says 4`.
    """

    file: str
    message: str
    row: int | None = None
    column: str | None = None

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        column = "" if self.column is None else f", column {self.column}"
        return f"{self.file}{row}{column}: {self.message}"


@dataclass(slots=True)
class Problems:
    """What is wrong, in the order in which it was found, and notes about what is no problem."""

    found: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _rows: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(
        self, file: str, message: str, *, row: int | None = None, column: str | None = None
    ) -> None:
        """Take a problem."""
        self.found.append(Problem(file, message, row, column))

    def add_rows(self, file: str, column: str, rows: Iterable[int], message: str) -> None:
        """Take the same problem in several rows of a column."""
        key = (file, column, message)
        for row in rows:
            if self._rows[key] < ROWS_LISTED:
                self.add(file, message, row=row, column=column)
            self._rows[key] += 1

    def end_file(self) -> None:
        """Say of how many more rows the same is true; call it when a file is done with."""
        for (file, column, message), count in self._rows.items():
            if count > ROWS_LISTED:
                more = count - ROWS_LISTED
                self.add(file, f"{message}, in {more} more rows, too", column=column)
        self._rows.clear()
