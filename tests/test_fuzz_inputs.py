"""Inputs of every shape: refused before the start, or every row comes out once and unchanged."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_columns import (
    Contents,
    Talk,
    Text,
    cells,
    contents,
    extra_columns,
    write_input,
)
from folders import CONTEXT, echo_model_folder, run
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.engine.target import Target
from adaflash_batch.shards.schema import OUR_COLUMNS

OURS = [name for name, _ in OUR_COLUMNS]
# Its end is the end of the last turn, so that the model repeats that.
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
WRITING: dict[str, list[Any]] = {
    "compression": ["snappy", "none", "zstd", "gzip"],
    "use_dictionary": [True, False],
    "data_page_version": ["1.0", "2.0"],
    "store_schema": [True, False],
    "write_statistics": [True, False],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that repeats the end of its prompt, loaded once for all jobs."""
    folder = echo_model_folder(tmp_path_factory.mktemp("echo") / "model", TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", functools.cache(Target.load))
        yield folder


@dataclass(frozen=True, slots=True)
class Shard:
    """One input file to be: its table, and what is known of its rows."""

    table: Any
    said: Contents
    group_rows: int
    options: dict[str, Any]


@st.composite
def shards(draw: st.DrawFn, kind: str) -> Shard:
    num_rows = draw(st.integers(0, 12))
    said = draw(contents(num_rows, kind))
    extras = [draw(extra_columns(num_rows)) for _ in range(draw(st.integers(0, 3)))]
    fields = [pa.field("prompt", said.array.type)]
    fields += [field.with_name(f"c{place}") for place, (field, _) in enumerate(extras)]
    metadata = draw(st.none() | st.just({"origin": "a test", "adaflash.format": "99"}))
    table = pa.Table.from_arrays(
        [said.array, *(array for _, array in extras)], schema=pa.schema(fields, metadata)
    )
    options = {name: draw(st.sampled_from(values)) for name, values in WRITING.items()}
    return Shard(table, said, draw(st.integers(1, 13)), options)


@given(
    files=st.sampled_from(["text", "messages"]).flatmap(
        lambda kind: st.lists(shards(kind), min_size=1, max_size=3)
    ),
    chunk_rows=st.integers(1, 13),
    new=st.integers(1, 2),
)
def test_every_row_of_any_input_comes_out_once_and_unchanged(
    model: Path, files: list[Shard], chunk_rows: int, new: int
) -> None:
    kind = files[0].said.kind
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"in{place}.parquet" for place in range(len(files))]
        tables = [
            write_input(path, shard.table, shard.group_rows, shard.options)
            for path, shard in zip(paths, files, strict=True)
        ]
        keys: dict[str, object] = {"output.chunk_rows": chunk_rows, "sampling.max_new_tokens": new}
        keys |= {"prompt.chat_template": kind == "messages"}
        summary = run(paths, model, Path(folder) / "out", keys)
        written = [
            sorted((Path(folder) / "out").glob(f"part-{place:05d}-*.parquet"))
            for place in range(len(files))
        ]
        errors = 0
        for shard, table, outputs in zip(files, tables, written, strict=True):
            assert len(outputs) == -(-table.num_rows // chunk_rows)
            check_input_columns(table, outputs)
            errors += check_rows(shard.said, outputs, new)
    assert summary.fields["rows"] == sum(table.num_rows for table in tables)
    assert summary.fields["errors"] == errors


def check_input_columns(table: Any, outputs: Sequence[Path]) -> None:
    """Types, metadata and values are those of the input."""
    found: dict[str, list[str]] = {name: [] for name in table.column_names}
    for path in outputs:
        part = pq.ParquetFile(path).read()
        assert part.column_names == [*table.column_names, *OURS]
        for field in table.schema:
            assert part.schema.field(field.name).equals(field, check_metadata=True)
            found[field.name] += cells(part[field.name])
        kept = {k: v for k, v in part.schema.metadata.items() if not k.startswith(b"adaflash.")}
        assert kept == {b"origin": b"a test"} or not kept
        assert bool(kept) == bool(table.schema.metadata)
    for name in table.column_names:
        assert found[name] == cells(table[name])


def check_rows(said: Contents, outputs: Sequence[Path], new: int) -> int:
    """Each row has the completion or the error that its prompt calls for; how many have errors."""
    rows = [row for path in outputs for row in pq.read_table(path, columns=OURS).to_pylist()]
    assert len(rows) == len(said.rows)
    expect = text_kind if said.kind == "text" else talk_kind
    for row, prompt in zip(rows, said.rows, strict=True):
        kind, last = expect(prompt, CONTEXT - new)
        assert (row["error"] and row["error"]["kind"]) == kind
        assert row["sample"] == 0
        assert (row["completion"] is None) == (kind is not None)
        if kind is None and last is not None and last < 128:
            assert row["completion"] == chr(last) * new
    return sum(row["error"] is not None for row in rows)


def text_kind(text: Text, room: int) -> tuple[str | None, int | None]:
    """The kind of the row's error, or the last byte of its prompt."""
    if text is None:
        return "null_prompt", None
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        return "bad_text", None
    if not decoded or decoded.isspace():
        return "empty_prompt", None
    return ("prompt_too_long", None) if len(text) > room else (None, text[-1])


def talk_kind(talk: Talk, room: int) -> tuple[str | None, int | None]:
    """The same of a conversation."""
    if talk is None:
        return "null_prompt", None
    for turn in talk:
        if turn is None or not turn[0] or turn[1] is None:
            return "bad_messages", None
        if any(text_kind(part, room)[0] == "bad_text" for part in turn):
            return "bad_messages", None
    if not any(turn[1].decode().strip() for turn in talk if turn and turn[1]):
        return "empty_prompt", None
    prompt = b"".join(role + b":" + text for role, text in talk if role and text is not None)  # type: ignore[misc]
    return ("prompt_too_long", None) if len(prompt) > room else (None, prompt[-1])
