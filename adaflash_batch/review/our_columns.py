"""What is always true of the columns that we add, checked a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Complaint = tuple[str, str, Mask]

_REASONS = pa.array(["stop", "length", "error"])
_LEAST_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "truncated_tokens": 0}
_MAY_BE_NULL = ("drafter_first", "drafter_last")


@dataclass(frozen=True, slots=True)
class Histogram:
    """A column of lists of counts: of each row their number and the mean's numerator.

    Attributes:
        steps: sum of the counts.
        weighted: sum of count times place.
        has_negative: whether a count is below zero or missing.
        by_place: sum over all rows, for each place.
        nonzero: sum of the counts at places above 0.
    """

    steps: Ints
    weighted: Ints
    has_negative: Mask
    by_place: Ints
    nonzero: int


class OurColumns:
    """A batch of output rows as arrays.

    Args:
        batch: with all of our columns in their right types.
        prefix: of their names.

    Attributes:
        num_rows: in it.
        is_error: rows with an error.
        samples: their numbers, -1 where it is null.
        ints: `usage.prompt_tokens`, `spec.steps` and the like, 0 where it is null.
        histograms: `accepted_hist`, `verified_hist`.
    """

    def __init__(self, batch: Any, prefix: str) -> None:
        self.num_rows: int = batch.num_rows
        self._columns = {
            name: batch.column(prefix + name)
            for name in (
                "completion",
                "finish_reason",
                "sample",
                "error",
                "usage",
                "spec",
                "timing",
            )
        }
        self.is_error = _mask(pc.is_valid(self._columns["error"]))
        self.samples = _ints(self._columns["sample"], -1)
        self._nulls: dict[str, Mask] = {}
        self.ints: dict[str, Ints] = {}
        for column in ("usage", "spec"):
            for field in self._columns[column].type:
                if pa.types.is_integer(field.type):
                    self._take_ints(f"{column}.{field.name}")
        self.histograms = {
            name: _histogram(_child(self._columns["spec"], name))
            for name in ("accepted_hist", "verified_hist")
        }

    def complaints(self, most_tokens: Ints) -> Iterator[Complaint]:
        """Column, what is wrong, and in which rows.

        Args:
            most_tokens: max_new_tokens of each row.
        """
        yield from self._text()
        yield from self._usage(most_tokens)
        yield from self._speculation()
        yield from self._timing()

    def _take_ints(self, name: str) -> None:
        column, _, field = name.partition(".")
        values = _child(self._columns[column], field)
        self._nulls[name] = _mask(pc.is_null(values))
        self.ints[name] = _ints(values, 0)

    def _text(self) -> Iterator[Complaint]:
        reason, is_error = self._columns["finish_reason"], self.is_error
        has_text = _mask(pc.is_valid(self._columns["completion"]))
        yield "completion", "holds a text beside an error", has_text & is_error
        yield "completion", "is null and there is no error", ~has_text & ~is_error
        yield "completion", "is not valid UTF-8", _not_utf8(self._columns["completion"])
        yield "finish_reason", "is not stop, length or error", ~_mask(pc.is_in(reason, _REASONS))
        says_error = _mask(pc.equal(reason, "error").fill_null(False))
        yield "finish_reason", "says error and there is none", says_error & ~is_error
        yield "finish_reason", "does not say error and there is one", ~says_error & is_error
        for name in ("kind", "message"):
            text = _child(self._columns["error"], name)
            is_empty = _mask(pc.equal(text.fill_null(""), "")) & is_error
            yield "error", f"has no {name}", is_empty

    def _usage(self, most_tokens: Ints) -> Iterator[Complaint]:
        for name, least in _LEAST_USAGE.items():
            values = self.ints[f"usage.{name}"]
            yield "usage", f"{name} is null", self._nulls[f"usage.{name}"]
            yield "usage", f"{name} is below {least}", (values < least) & ~self.is_error
            yield "usage", f"{name} is not 0 beside an error", (values != 0) & self.is_error
        tokens = self.ints["usage.completion_tokens"]
        yield "usage", "completion_tokens is above max_new_tokens", tokens > most_tokens
        is_cut = _mask(pc.equal(self._columns["finish_reason"], "length").fill_null(False))
        too_few = is_cut & (tokens < most_tokens)
        yield "usage", "completion_tokens is below max_new_tokens, at which the text ended", too_few

    def _speculation(self) -> Iterator[Complaint]:
        of = {name: self.ints[f"spec.{name}"] for name in _names(self._columns["spec"].type)}
        for name, values in of.items():
            if name not in _MAY_BE_NULL:
                yield "spec", f"{name} is null", self._nulls[f"spec.{name}"]
                yield "spec", f"{name} is below 0", values < 0
        for less, more in (
            ("accepted", "verified"),
            ("verified", "drafted"),
            ("lookup_accepted", "lookup_verified"),
            ("lookup_verified", "verified"),
            ("lookup_accepted", "accepted"),
            ("lookup_steps", "steps"),
        ):
            yield "spec", f"{less} is above {more}", of[less] > of[more]
        for name, total in (("accepted_hist", "accepted"), ("verified_hist", "verified")):
            histogram = self.histograms[name]
            yield "spec", f"{name} holds no counts", histogram.has_negative
            yield "spec", f"{name} does not sum to steps", histogram.steps != of["steps"]
            yield "spec", f"{name} does not come to {total}", histogram.weighted != of[total]
        first, last = (self._nulls[f"spec.{name}"] for name in _MAY_BE_NULL)
        yield "spec", "only one of drafter_first and drafter_last is null", first != last

    def _timing(self) -> Iterator[Complaint]:
        for field in self._columns["timing"].type:
            values = _child(self._columns["timing"], field.name).cast(pa.float64())
            seconds = values.fill_null(np.nan).to_numpy(zero_copy_only=False)
            yield (
                "timing",
                f"{field.name} is no number of seconds",
                ~(np.isfinite(seconds) & (seconds >= 0)),
            )


def _names(struct_type: Any) -> list[str]:
    return [field.name for field in struct_type if pa.types.is_integer(field.type)]


def _child(struct: Any, name: str) -> Any:
    """A field, null where the struct is."""
    return pc.struct_field(struct, name)


def _mask(values: Any) -> Mask:
    mask: Mask = values.to_numpy(zero_copy_only=False)
    return mask


def _ints(values: Any, null: int) -> Ints:
    ints: Ints = values.fill_null(null).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return ints


def _not_utf8(texts: Any) -> Mask:
    """Arrow takes text from a file as it is."""
    wrong = np.zeros(len(texts), dtype=np.bool_)
    try:
        texts.validate(full=True)
    except pa.ArrowException:
        for row in range(len(texts)):
            try:
                texts[row].as_py()
            except UnicodeDecodeError:
                wrong[row] = True
    return wrong


def _histogram(lists: Any) -> Histogram:
    lengths = _ints(pc.list_value_length(lists), 0)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    values = lists.flatten()
    counts = _ints(values, -1)
    width = int(lengths.max(initial=0))
    return Histogram(
        steps=_sum_by(rows, counts, len(lengths)),
        weighted=_sum_by(rows, counts * places, len(lengths)),
        has_negative=_sum_by(rows, (counts < 0).astype(np.int64), len(lengths)) > 0,
        by_place=_sum_by(places, counts, width),
        nonzero=int(counts[places > 0].sum()),
    )


def _sum_by(keys: Ints, values: Ints, size: int) -> Ints:
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, keys, values)
    return sums


def row_settings(batch: Any, column: str | None, default: int) -> Ints:
    """A setting of each row: the row's own, or else the job's; 0 where it is wrong."""
    if column is None:
        return np.full(batch.num_rows, default, dtype=np.int64)
    values = batch.column(column)
    return np.array([_whole(value, default) for value in _python(values)], dtype=np.int64)


def _python(values: Any) -> list[Any]:
    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    return list(values.to_pylist())


def _whole(value: Any, default: int) -> int:
    if value is None:
        return default
    try:
        return min(int(value), 2**62) if value == int(value) else 0
    except (TypeError, ValueError, OverflowError):
        return 0
