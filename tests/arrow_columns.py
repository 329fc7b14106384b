"""Arrow columns of every shape, drawn by hypothesis, and what is known of their rows."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import reject
from hypothesis import strategies as st

Text = bytes | None  # bytes, so that it need not be UTF-8
Turn = tuple[Text, Text] | None
Talk = list[Turn] | None


class Tagged(pa.ExtensionType):  # type: ignore[misc]
    """An extension type of somebody else's program: not registered here, as in a job."""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage, "tests.tagged")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"tag"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Tagged:
        return cls(storage)


@dataclass(frozen=True, slots=True)
class Contents:
    """A column of prompts, and for each row the kind of its error or the end of its text.

    Attributes:
        array: the column.
        kind: `text` or `messages`.
        rows: texts or conversations.
    """

    array: Any
    kind: str
    rows: list[Any]


_WORDS = [
    "hello",
    "x",
    "a b",
    "end\n",
    "a\0b",
    "naïve",
    "👍🏽",
    "สวัสดี",
    "<|im_end|>",
    "<s>hi",
    "{{ 1 }}",
]
_BLANK = ["", " ", "\n\t", "\u3000"]
texts = st.one_of(
    st.none(),
    st.sampled_from([*_WORDS, *_BLANK]).map(str.encode),
    st.text(max_size=6).map(str.encode),
    st.sampled_from([b"\xff\xfe", b"ok\xc3", b"\xed\xa0\x80"]),
    st.integers(240, 260).map(lambda length: b"y" * length),
)
INDEX_TYPES = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
_STRINGS = {"string": pa.string(), "large_string": pa.large_string(), "view": pa.string_view()}
_BYTES = {"string": pa.binary(), "large_string": pa.large_binary(), "view": pa.binary_view()}


@st.composite
def text_arrays(draw: st.DrawFn, values: Sequence[Text], *, may_extend: bool = True) -> Any:
    """These texts in some encoding of text."""
    encodings = ["string", "large_string", "view", "dictionary"]
    if all(value is None for value in values):
        encodings.append("null")
    if may_extend:
        encodings += ["tagged", "json"]
    encoding = draw(st.sampled_from(encodings))
    if encoding == "null":
        return pa.nulls(len(values))
    if encoding == "dictionary":
        return draw(text_dictionaries(values))
    if encoding == "json":
        return pa.ExtensionArray.from_storage(pa.json_(), _strings(values, "string"))
    if encoding == "tagged":
        storage = draw(text_arrays(values, may_extend=False))
        return pa.ExtensionArray.from_storage(Tagged(storage.type), storage)
    return _strings(values, encoding)


def _strings(values: Sequence[Text], encoding: str) -> Any:
    """Not checked to be UTF-8, as other writers may leave it."""
    return pa.array(list(values), _BYTES[encoding]).view(_STRINGS[encoding])


@st.composite
def text_dictionaries(draw: st.DrawFn, values: Sequence[Text]) -> Any:
    """Entries in any order, some of them unused or repeated."""
    used = [value for value in dict.fromkeys(values) if value is not None]
    unused = [value for value in draw(st.lists(texts, max_size=3)) if value is not None]
    entries = draw(st.permutations([*used, *unused]))
    places = [None if value is None else entries.index(value) for value in values]
    dictionary = _strings(entries, draw(st.sampled_from(["string", "large_string"])))
    indices = pa.array(places, draw(st.sampled_from(INDEX_TYPES)))
    return pa.DictionaryArray.from_arrays(indices, dictionary)


turns = st.none() | st.tuples(
    st.sampled_from([b"user", b"system", b"assistant", b"user", b"", None]) | texts, texts
)
talks = st.none() | st.lists(turns, max_size=3)


@st.composite
def talk_arrays(draw: st.DrawFn, rows: Sequence[Talk]) -> Any:
    """These conversations in some kind of list of some kind of struct."""
    kinds = ["list", "large_list", "view", "large_view", "tagged"]
    lengths = {len(row) for row in rows if row is not None}
    if len(lengths) <= 1 and lengths != {0}:
        kinds.append("fixed")
    kind = draw(st.sampled_from(kinds))
    length = max(lengths, default=1)
    padding: list[Turn] = [None] * length if kind == "fixed" else []
    flat = [turn for row in rows for turn in (padding if row is None else row)]
    return _lists(rows, draw(turn_arrays(flat)), kind, length)


def _lists(rows: Sequence[Talk], turns_: Any, kind: str, length: int) -> Any:
    mask = pa.array([row is None for row in rows], pa.bool_())
    sizes = [0 if row is None else len(row) for row in rows]
    starts = [sum(sizes[:place]) for place in range(len(rows) + 1)]
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(turns_, length, mask=mask)
    if kind in ("view", "large_view"):
        make = pa.ListViewArray if kind == "view" else pa.LargeListViewArray
        index = pa.int32() if kind == "view" else pa.int64()
        offsets = pa.array(starts[:-1], index)
        return make.from_arrays(offsets, pa.array(sizes, index), turns_, mask=mask)
    if kind == "large_list":
        return pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), turns_, mask=mask)
    plain = pa.ListArray.from_arrays(pa.array(starts, pa.int32()), turns_, mask=mask)
    if kind == "tagged":
        return pa.ExtensionArray.from_storage(Tagged(plain.type), plain)
    return plain


@st.composite
def turn_arrays(draw: st.DrawFn, values: Sequence[Turn]) -> Any:
    """Structs with a role, a content and whatever else, in any order."""
    roles = draw(text_arrays([None if turn is None else turn[0] for turn in values]))
    contents = draw(text_arrays([None if turn is None else turn[1] for turn in values]))
    fields = {"role": roles, "content": contents}
    if draw(st.booleans()):
        fields["name"] = pa.nulls(len(values), pa.string())
    if draw(st.booleans()):
        fields["tools"] = pa.array([[{"id": 1}]] * len(values))
    names = draw(st.permutations(sorted(fields)))
    mask = pa.array([turn is None for turn in values], pa.bool_())
    array = pa.StructArray.from_arrays([fields[name] for name in names], names, mask=mask)
    is_tagged = draw(st.integers(0, 4)) == 0
    return pa.ExtensionArray.from_storage(Tagged(array.type), array) if is_tagged else array


@st.composite
def contents(draw: st.DrawFn, num_rows: int, kind: str) -> Contents:
    """A column of texts or conversations."""
    if kind == "text":
        said = draw(st.lists(texts, min_size=num_rows, max_size=num_rows))
        return Contents(draw(text_arrays(said)), "text", said)
    talked = draw(st.lists(talks, min_size=num_rows, max_size=num_rows))
    if draw(st.integers(0, 9)) == 0:
        return Contents(pa.nulls(num_rows), "messages", [None] * num_rows)
    return Contents(draw(talk_arrays(talked)), "messages", talked)


_MOMENT = st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))
_SECONDS = _MOMENT.map(lambda moment: moment.replace(microsecond=0))
SCALARS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "flag": (pa.bool_(), st.booleans()),
    "tiny": (pa.int8(), st.integers(-128, 127)),
    "huge": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "half": (pa.float16(), st.floats(width=16)),
    "real": (pa.float64(), st.floats()),
    "price": (pa.decimal128(9, 2), st.decimals(-999, 999, places=2)),
    "small_price": (pa.decimal32(5, 2), st.just(Decimal("1.25"))),
    "large_price": (pa.decimal256(60, 3), st.decimals(-999, 999, places=3)),
    "moment": (pa.timestamp("us"), _MOMENT),
    "moment_s": (pa.timestamp("s", "Asia/Tokyo"), _SECONDS),
    "moment_ns": (pa.timestamp("ns", "+02:00"), _MOMENT),
    "day": (pa.date32(), _MOMENT.map(lambda moment: moment.date())),
    "day_ms": (pa.date64(), _MOMENT.map(lambda moment: moment.date())),
    "hour": (pa.time32("s"), _SECONDS.map(lambda moment: moment.time())),
    "hour_ns": (pa.time64("ns"), _MOMENT.map(lambda moment: moment.time())),
    "span": (pa.duration("ms"), st.integers(0, 10**6)),
    "raw": (pa.binary(), st.binary(max_size=4)),
    "raw_view": (pa.binary_view(), st.binary(max_size=20)),
    "raw_large": (pa.large_binary(), st.binary(max_size=4)),
    "fixed": (pa.binary(2), st.binary(min_size=2, max_size=2)),
    "note": (pa.string(), st.text(max_size=4)),
    "note_view": (pa.string_view(), st.text(max_size=20)),
    "note_large": (pa.large_string(), st.text(max_size=4)),
    "label": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "y", ""])),
    "code": (pa.dictionary(pa.uint16(), pa.int64()), st.integers(0, 3)),
    "nothing": (pa.null(), st.none()),
}


def _wrapped(inner: tuple[Any, Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    """A list, struct or map of these."""
    arrow_type, values = inner
    lists = st.lists(st.none() | values, max_size=3)
    made: list[tuple[Any, Any]] = [
        (make(arrow_type), lists) for make in (pa.list_, pa.large_list, pa.list_view)
    ]
    pair = st.lists(st.none() | values, min_size=2, max_size=2)
    made.append((pa.list_(arrow_type, 2), pair))
    members = st.fixed_dictionaries({"a": st.none() | values, "b": st.none() | st.integers(0, 9)})
    made.append((pa.struct([("a", arrow_type), ("b", pa.int16())]), members))
    pairs = st.lists(st.tuples(st.text(max_size=2), st.none() | values), max_size=2)
    made.append((pa.map_(pa.string(), arrow_type), pairs))
    return st.sampled_from(made)


column_types = st.sampled_from(sorted(SCALARS)).map(SCALARS.__getitem__)
column_types = column_types | column_types.flatmap(_wrapped)
column_types = column_types | column_types.flatmap(_wrapped)


@st.composite
def extra_columns(draw: st.DrawFn, num_rows: int) -> tuple[Any, Any]:
    """A column that is nobody's business: its field with metadata, and its array."""
    arrow_type, values = draw(column_types)
    rows = draw(st.lists(st.none() | values, min_size=num_rows, max_size=num_rows))
    array = _array(rows, arrow_type)
    if draw(st.integers(0, 4)) == 0:
        array = pa.ExtensionArray.from_storage(Tagged(array.type), array)
    metadata = draw(st.none() | st.dictionaries(st.sampled_from("ab"), st.text(max_size=2)))
    may_be_null = array.null_count > 0 or pa.types.is_null(arrow_type) or draw(st.booleans())
    field = pa.field("c", array.type, nullable=may_be_null, metadata=metadata)
    return field, array


def _array(rows: Sequence[Any], arrow_type: Any) -> Any:
    """These values; something plain in their place where Arrow cannot write and read them."""
    try:
        array = pa.array(rows, arrow_type)
        table = pa.table({"c": array})
        for place in range(len(rows) + 1):
            list(_read_back(table.slice(place, 1), pa.BufferOutputStream()).iter_batches())
    except (pa.ArrowException, ValueError, TypeError):
        return pa.array(range(len(rows)))
    return array


def _read_back(table: Any, stream: Any) -> Any:
    pq.write_table(table, stream)
    return pq.ParquetFile(pa.BufferReader(stream.getvalue()))


def write_input(path: Path, table: Any, group_rows: int, options: dict[str, Any]) -> Any:
    """Write row groups of some rows, with empty ones between; the table as it reads back.

    An example that Arrow cannot write or read again itself is none of ours.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with pq.ParquetWriter(path, table.schema, **options) as writer:
            for start in range(0, table.num_rows, group_rows):
                writer.write_table(table.slice(start, group_rows))
                writer.write_table(table.slice(0, 0))
        file = pq.ParquetFile(path)
        return pa.Table.from_batches(file.iter_batches(batch_size=1), file.schema_arrow)
    except pa.ArrowException:
        reject()


def cells(column: Any) -> list[Any]:
    """What a column holds, row by row: equal for equal values, NaN and wrong bytes included."""
    return [_cell(scalar) for chunk in column.chunks for scalar in chunk]


def _cell(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ExtensionScalar | pa.DictionaryScalar):
        return _cell(scalar.value)
    if isinstance(scalar, pa.StructScalar):
        return [_cell(value) for value in scalar.values()]
    if isinstance(scalar, pa.ListScalar | pa.ListViewScalar | pa.LargeListViewScalar):
        return [_cell(value) for value in scalar.values]
    try:
        return repr(scalar.as_py())
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()
    except ValueError:  # nanoseconds, which Python has not
        return scalar.value
