"""Sampling columns of every type and value: a row gets what it asks for, or its error."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_columns import Tagged
from folders import kinds, read_rows, run, tiny_model_folder, write_rows
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError
from adaflash_batch.request import sampling_fields

NEW = 2
KINDS = sampling_fields()
_INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
_REALS = [pa.float16(), pa.float32(), pa.float64()]
_DECIMALS = [pa.decimal32(9, 3), pa.decimal128(30, 3), pa.decimal256(50, 3)]
_ENDS = [0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 1e-40, 5e-324, 1e29, 1e300, math.inf, -math.inf, math.nan]
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63), *_ENDS]),
    st.floats(),
)
WORDS = st.one_of(st.text(max_size=2), st.sampled_from(["a", "", " ", "\0", "é"]))
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tiny_model_folder(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", functools.cache(Target.load))
        yield folder


def as_column(values: Sequence[Any], arrow_type: Any) -> Any:
    """Those of the values that the type can hold, null for the others."""
    return pa.array([_held(value, arrow_type) for value in values], arrow_type)


def _held(value: Any, arrow_type: Any) -> Any:
    try:
        is_real = isinstance(value, float) and math.isfinite(value)
        if pa.types.is_decimal(arrow_type) and value is not None:
            value = round(Decimal(value), 3)
        elif pa.types.is_integer(arrow_type) and is_real:
            value = int(value)
        return pa.scalar(value, arrow_type).as_py()
    except (pa.ArrowException, ArithmeticError, ValueError, TypeError):
        return None


@st.composite
def columns(draw: st.DrawFn, kind: str) -> Any:
    """A column for a field of this kind: mostly of a fitting type, of any value."""

    def rows(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(st.none() | values, min_size=1, max_size=5))

    if kind in ("int", "float"):
        array = as_column(rows(NUMBERS), draw(st.sampled_from(_INTEGERS + _REALS + _DECIMALS)))
        if draw(st.booleans()) and not pa.types.is_decimal(array.type):
            array = array.dictionary_encode()
    elif kind == "bool":
        array = pa.array(rows(st.booleans()), pa.bool_())
    else:
        values = WORDS if kind == "strings" else st.integers(-2, 300)
        inner = draw(st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))
        inner = inner if kind == "strings" else draw(st.sampled_from(_INTEGERS))
        if draw(st.booleans()):
            array = as_column(rows(values), inner)
        else:
            lists = [
                None if row is None else [_held(value, inner) for value in row]
                for row in rows(st.lists(st.none() | values, max_size=3))
            ]
            array = pa.array(lists, draw(st.sampled_from(LISTS))(inner))
    if draw(st.integers(0, 5)) == 0:
        array = pa.ExtensionArray.from_storage(Tagged(array.type), array)
    return array


@given(data=st.data(), field=st.sampled_from(sorted(KINDS)))
def test_any_value_is_served_or_the_error_of_its_row(
    model: Path, data: st.DataObject, field: str
) -> None:
    array = data.draw(columns(KINDS[field]))
    plain = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    values = plain.to_pylist()
    if field == "n":  # many are allowed, but take their time
        values = [None if value is None else min(float(value), 40.0) for value in values]
        array = pa.array(values, pa.float64())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        table = {"prompt": [f"row {row}" for row in range(len(values))], "own": array}
        shard = write_rows(Path(folder) / "in.parquet", table)
        keys: dict[str, object] = {
            "input.columns": {field: "own"},
            "input.prompt_column": "prompt",
            "sampling.max_new_tokens": NEW,
            "sampling.temperature": 0.7,
            "output.chunk_rows": 2,
        }
        run(shard, model, out, keys)
        check(field, values, read_rows(out))


def check(field: str, values: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Every row is there, in order and with its samples, and a null row is always served."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["prompt"], []).append(row)
    assert list(found) == [f"row {row}" for row in range(len(values))]
    for value, samples in zip(values, found.values(), strict=True):
        kind = samples[0]["error"] and samples[0]["error"]["kind"]
        assert kind in (None, "bad_sampling", "prompt_too_long", "bad_logits")
        assert [row["sample"] for row in samples] == [*range(len(samples))]
        assert all((row["completion"] is None) == (row["error"] is not None) for row in samples)
        if value is None:
            assert kind is None
        wanted = int(value) if field == "n" and kind is None and value is not None else 1
        assert len(samples) == wanted


@given(
    field=st.sampled_from(sorted(KINDS)),
    array=st.sampled_from(
        [
            pa.array(["x"]).cast(pa.binary()),
            pa.array([{"a": 1}]),
            pa.array([[["a"]]]),
            pa.array([1], pa.timestamp("s")),
            pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())),
            pa.array([1], pa.duration("s")),
        ]
    ),
)
def test_a_type_that_cannot_set_it_is_refused_before_the_start(field: str, array: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shard = write_rows(Path(folder) / "in.parquet", {"prompt": ["x"], "own": array})
        out = Path(folder) / "out"
        with pytest.raises(ConfigError) as error:
            run(shard, Path("no model"), out, {"input.columns": {field: "own"}})
        for word in (str(shard), "'own'", field):
            assert word in error.value.message
        assert not out.exists()


def test_what_only_a_row_can_get_wrong_leaves_its_neighbours_alone(
    model: Path, tmp_path: Path
) -> None:
    """Numbers at the ends of what they may be: the smallest temperature, the greatest seed."""
    table = {
        "prompt": ["a"] * 6,
        "heat": pa.array([5e-324, 1e-40, 1e29, 0.0, math.nan, 1.0]),
        "seed": pa.array([2**64 - 1, 0, 1, None, 5, 2**63], pa.uint64()),
    }
    shard = write_rows(tmp_path / "in.parquet", table)
    run(shard, model, tmp_path / "out", {"input.columns": {"temperature": "heat", "seed": "seed"}})
    assert kinds(tmp_path / "out") == [None, None, None, None, "bad_sampling", None]
