"""A part against its footer, its input and what is always true, a batch of rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc

from adaflash_batch.errors import first_line
from adaflash_batch.request import Sampling
from adaflash_batch.review.input_rows import InputComparison, InputRows
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.leftovers import Rejects
from adaflash_batch.review.our_columns import Ints, OurColumns, row_settings
from adaflash_batch.review.parts import READ_ERRORS, Part
from adaflash_batch.review.problems import Problems
from adaflash_batch.review.row_order import SampleOrder, Sums
from adaflash_batch.review.schemas import schema_differences
from adaflash_batch.shards.footer import PartFooter
from adaflash_batch.shards.parquet import open_parquet, read_batches
from adaflash_batch.shards.schema import OUR_COLUMNS


class PartCheck:
    """Checks one part after the other.

    Args:
        job: whose parts they are.
        problems: takes what is wrong.
        rejects: takes the rows with errors.
    """

    def __init__(self, job: JobOutput, problems: Problems, rejects: Rejects) -> None:
        self._job = job
        self._problems = problems
        self._rejects = rejects
        self._sampling = job.spec.sampling.over(Sampling())

    def check(self, part: Part, schema: Any, source: InputRows | None) -> Any:
        """Read a part whole.

        Args:
            part: with a footer.
            schema: that it should have; None where no input file and no earlier part tells.
            source: the rows of its input file, None to leave the comparison out.

        Returns the schema that it has, None if it cannot be read.
        """
        name = part.file.name
        try:
            with open_parquet(self._job.filesystem, part.file.path) as file:
                found = file.schema_arrow
                if self._check_schema(name, found, schema):
                    self._check_rows(part, file, source)
                    self._rejects.parts.add(name)
                return found
        except READ_ERRORS as error:
            self._problems.add(name, f"cannot be read to its end: {first_line(error)}")
            return None

    def _check_schema(self, name: str, found: Any, wanted: Any) -> bool:
        """Whether the columns are such that their values can be looked at."""
        differences = list(schema_differences(found, wanted, self._job.prefix))
        for column, message in differences:
            self._problems.add(name, message, column=column)
        return not any(column is not None for column, _ in differences)

    def _check_rows(self, part: Part, file: Any, source: InputRows | None) -> None:
        footer = part.footer
        assert footer is not None
        order, sums = SampleOrder(), Sums()
        comparison = self._comparison(file.schema_arrow, footer, source)
        begin = 0
        for batch in read_batches(file):
            ours = OurColumns(batch, self._job.prefix)
            samples, most_tokens = self._settings(batch)
            for row, message in order.take(ours, samples, begin):
                self._add(part, "sample", row, message)
            for column, message, mask in ours.complaints(most_tokens):
                rows = (np.flatnonzero(mask) + begin).tolist()
                self._problems.add_rows(part.file.name, self._job.prefix + column, rows, message)
            if comparison is not None:
                self._compare(part, comparison, batch, ours.samples, begin)
            self._keep_errors(part, batch, ours, footer.first_row + sums.totals.get("num_rows", 0))
            sums.add(ours)
            begin += batch.num_rows
        for row, message in order.end():
            self._add(part, "sample", row, message)
        for message in sums.differences(footer.totals):
            self._problems.add(part.file.name, message)

    def _add(self, part: Part, column: str, row: int, message: str) -> None:
        self._problems.add_rows(part.file.name, self._job.prefix + column, [row], message)

    def _settings(self, batch: Any) -> tuple[Ints, Ints]:
        """Samples and most tokens of each row."""
        columns, names = self._job.spec.input.columns, batch.schema.names
        own = {field: name for field, name in columns.items() if names.count(name) == 1}
        return (
            row_settings(batch, own.get("n"), self._sampling.n),
            row_settings(batch, own.get("max_new_tokens"), self._sampling.max_new_tokens),
        )

    def _comparison(
        self, schema: Any, footer: PartFooter, source: InputRows | None
    ) -> InputComparison | None:
        if source is None:
            return None
        names = schema.names[: len(schema) - len(OUR_COLUMNS)]
        return InputComparison(source, names, footer.first_row, footer.totals.num_rows)

    def _compare(
        self, part: Part, comparison: InputComparison, batch: Any, samples: Ints, begin: int
    ) -> None:
        footer = part.footer
        assert footer is not None
        for column, different in comparison.differences(batch, samples):
            rows = (np.flatnonzero(different) + begin).tolist()
            message = f"is not what the input file {footer.shard_name} has in that row"
            self._problems.add_rows(part.file.name, column, rows, message)

    def _keep_errors(self, part: Part, batch: Any, ours: OurColumns, first_row: int) -> None:
        """Remember the rows with errors.

        Args:
            first_row: of the input file, that begins next.
        """
        indices = np.flatnonzero(ours.is_error)
        if not len(indices):
            return
        rows = first_row - 1 + np.cumsum(ours.samples == 0)
        errors = batch.column(f"{self._job.prefix}error")
        kinds, messages = (pc.struct_field(errors, name) for name in ("kind", "message"))
        for index in indices.tolist():
            said = (_text(kinds[index]), _text(messages[index]))
            self._rejects.add(part.file.name, int(rows[index]), int(ours.samples[index]), *said)


def _text(scalar: Any) -> str | None:
    try:
        return None if not scalar.is_valid else str(scalar.as_py())
    except UnicodeDecodeError:
        return None
