"""Finished jobs to look at, and ways to damage what they left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import run, tiny_model_folder, write_rows

from adaflash_batch import cli
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.shards.footer import PartFooter

PROMPTS = ["one", "a much longer prompt than the others", None, "x", "", "four more", "seven"]
MORE = ["eight", "nine is here", "ten", "11"]
KEYS: Mapping[str, object] = {
    "output.chunk_rows": 3,
    "sampling.temperature": 0.8,
    "input.columns": {"n": "samples", "max_new_tokens": "limit"},
}


@dataclass(frozen=True)
class Job:
    """A finished job and what it was made from, in one folder that may be damaged."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def part(self, shard: int, chunk: int) -> Path:
        return self.out / f"part-{shard:05d}-{chunk:05d}.parquet"

    def opened(self) -> JobOutput:
        return JobOutput.open(str(self.out))


def input_columns(prompts: list[str | None]) -> dict[str, Any]:
    count = len(prompts)
    return {
        "id": pa.array(range(count), pa.int16()),
        "prompt": pa.array(prompts, pa.large_string()).dictionary_encode(),
        "samples": pa.array([(None, 1, 2, 3)[i % 4] for i in range(count)], pa.int8()),
        "limit": pa.array([(None, 5)[i % 2] for i in range(count)], pa.int32()),
        "share": pa.array([float("nan") if i % 2 else i / 2 for i in range(count)]),
        "tags": pa.array([[f"tag {i}"] * (i % 3) if i % 4 else None for i in range(count)]),
    }


def make_job(folder: Path, keys: Mapping[str, object] = KEYS) -> Job:
    """Seven rows and four, in chunks of three: parts of 3, 3, 1 and of 3, 1 rows."""
    model = tiny_model_folder(folder / "model")
    first = write_rows(folder / "a.parquet", input_columns([*PROMPTS]))
    second = write_rows(folder / "b.parquet", input_columns([*MORE]))
    run([first, second], model, folder / "out", keys)
    return Job(folder)


def copied(job: Job, folder: Path) -> Job:
    """A copy to damage; its model and inputs are copies, too, and job.json knows where."""
    shutil.copytree(job.folder, folder, dirs_exist_ok=True)
    copy = Job(folder)
    change_job(
        copy, lambda said: json.loads(json.dumps(said).replace(str(job.folder), str(folder)))
    )
    return copy


def change_job(job: Job, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change job.json: in place, or by what `change` returns."""
    path = job.out / "_adaflash" / "job.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(change(said) or said))


def rewrite(part: Path, change: Callable[[Any], Any]) -> None:
    """Change the rows of a part; its footer says what it said."""
    table = pq.read_table(part)
    metadata = table.schema.metadata
    pq.write_table(change(table).replace_schema_metadata(metadata), part, write_page_checksum=True)


def refoot(part: Path, **changes: Any) -> None:
    """Change fields of a part's footer, or of the sums in it."""
    table = pq.read_table(part)
    metadata = table.schema.metadata
    footer = PartFooter.from_metadata(metadata)
    assert footer is not None
    own = {key: value for key, value in changes.items() if hasattr(footer, key)}
    sums = {key: value for key, value in changes.items() if key not in own}
    footer = replace(footer, **own, totals=replace(footer.totals, **sums))
    table = table.replace_schema_metadata(metadata | footer.to_metadata())
    pq.write_table(table, part, write_page_checksum=True)


def changed(column: str, row: int, value: Any) -> Callable[[Any], Any]:
    """For `rewrite`: another value, or of a struct some other fields."""

    def change(table: Any) -> Any:
        index = table.schema.get_field_index(column)
        values = table.column(column).to_pylist()
        old = values[row]
        is_struct = isinstance(value, dict) and isinstance(old, dict)
        values[row] = {**old, **value} if is_struct else value
        field = table.schema.field(column)
        plain = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        array = pa.array(values, plain)
        array = array.dictionary_encode() if plain is not field.type else array
        return table.set_column(index, field, array)

    return change


def command(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return caught.value.code or 0, out, err
