"""`_adaflash/rejects.parquet`: the rows with errors of all parts, once more, for eyes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from adaflash_batch.durable import put_in_place
from adaflash_batch.request import RowError, RowKey
from adaflash_batch.shards.footer import PartFooter
from adaflash_batch.shards.job_folder import FOLDER
from adaflash_batch.shards.locations import is_local, stat
from adaflash_batch.shards.parquet import read_batches
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.writer import list_parts, write_error

REJECTS = "rejects.parquet"
SCHEMA = pa.schema(
    [
        pa.field("input", pa.string()),
        pa.field("row", pa.int64()),
        pa.field("sample", pa.int32()),
        pa.field("kind", pa.string()),
        pa.field("message", pa.string()),
        pa.field("prompt", pa.string()),
        pa.field("part", pa.string()),
    ]
)
# For eyes: the prompt itself is in the part.
_PROMPT_CHARACTERS = 2000


OpenErrors = Iterable[tuple[Chunk, RowKey, RowError]]


def write_rejects(
    filesystem: Any, output: str, content: str, prefix: str, open_errors: OpenErrors = ()
) -> int:
    """Write the file anew from the parts that are there; without errors there is none.

    Args:
        filesystem: of the output.
        output: its directory there.
        content: the column that prompts are in.
        prefix: of our columns.
        open_errors: rows of chunks that are not committed; `part` is null for them.

    Returns the number of output rows with errors. Raises AdaflashError if it cannot be written.
    """
    path = _path(output)
    batches = chain(
        _rejected(filesystem, output, content, prefix), _not_committed(open_errors, content)
    )
    try:
        first = next(batches, None)
        if first is None:
            remove_rejects(filesystem, output)
            return 0
        if not is_local(filesystem):
            with filesystem.open_output_stream(path) as sink:
                return _write(sink, first, batches)
        scratch = Path(path).with_name(f".{REJECTS}.partial")
        with open(scratch, "wb") as sink:
            count = _write(sink, first, batches)
        put_in_place(scratch, Path(path))
        return count
    except (OSError, pa.ArrowException) as error:
        raise write_error(path, error) from error


def _path(output: str) -> str:
    return f"{output}/{FOLDER}/{REJECTS}"


def _write(sink: Any, first: Any, rest: Iterator[Any]) -> int:
    count = 0
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
        for batch in chain([first], rest):
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def remove_rejects(filesystem: Any, output: str) -> None:
    """Remove the file that a job before left, if there is one; AdaflashError if that fails."""
    path = _path(output)
    try:
        if stat(filesystem, path).type == fs.FileType.File:
            with suppress(FileNotFoundError):
                filesystem.delete_file(path)
    except (OSError, pa.ArrowException) as error:
        raise write_error(path, error) from error


def _rejected(filesystem: Any, output: str, content: str, prefix: str) -> Iterator[Any]:
    """Record batches of SCHEMA, in order of the rows."""
    for info in list_parts(filesystem, output):
        with filesystem.open_input_file(info.path) as source:
            file = pq.ParquetFile(source)
            footer = PartFooter.from_metadata(file.metadata.metadata)
            if footer is not None and footer.totals.num_errors > 0:
                yield from _rejected_of(file, footer, info.base_name, content, prefix)


def _rejected_of(
    file: Any, footer: PartFooter, part: str, content: str, prefix: str
) -> Iterator[Any]:
    row = footer.first_row - 1
    columns = [content, f"{prefix}sample", f"{prefix}error"]
    for batch in read_batches(file, columns=columns):
        samples = batch.column(columns[1])
        rows = []
        for sample in samples.to_pylist():
            row += sample == 0
            rows.append(row)
        found = pc.indices_nonzero(pc.is_valid(batch.column(columns[2])))
        if len(found) == 0:
            continue
        prompts, _, errors = batch.columns
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "input": footer.shard_name,
                    "row": rows[index],
                    "sample": samples[index].as_py(),
                    **errors[index].as_py(),
                    "prompt": _preview(prompts[index]),
                    "part": part,
                }
                for index in found.to_pylist()
            ],
            schema=SCHEMA,
        )


def _not_committed(errors: OpenErrors, content: str) -> Iterator[Any]:
    rows = [
        {
            "input": chunk.shard.name,
            "row": key.row,
            "sample": key.sample,
            "kind": error.kind,
            "message": error.message,
            "prompt": _preview(chunk.table[content][key.row - chunk.first_row]),
            "part": None,
        }
        for chunk, key, error in errors
    ]
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _preview(scalar: Any) -> str | None:
    try:
        prompt = scalar.as_py()
    except UnicodeDecodeError as error:
        prompt = error.object.decode(errors="backslashreplace")
    if prompt is None:
        return None
    text = (
        prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    )
    return text[:_PROMPT_CHARACTERS]
