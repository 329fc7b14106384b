"""Part files: their footers, and whether these fit the job, the name and the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from adaflash_batch.errors import first_line
from adaflash_batch.review.job_output import JobOutput, PartFile
from adaflash_batch.shards.footer import PartFooter
from adaflash_batch.shards.parquet import open_parquet
from adaflash_batch.shards.writer import part_name

# Where every footer is a request over a network, one after the other takes hours.
_AT_ONCE = 16
# What a damaged file may raise while it is read; names in its footer need not be text.
READ_ERRORS = (OSError, UnicodeDecodeError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class Part:
    """A part file and its footer.

    Attributes:
        footer: None where `damage` says why.
        num_rows: output rows that the file holds.
        damage: why the file is no whole part.
    """

    file: PartFile
    footer: PartFooter | None
    num_rows: int = 0
    damage: str | None = None


def read_parts(job: JobOutput, files: Iterable[PartFile]) -> Iterator[Part]:
    """The footers of part files, in order; a file that is gone by then is left out."""
    waiting = iter(files)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # So many at a time: of a million parts not all footers are in memory.
        while group := list(islice(waiting, 8 * _AT_ONCE)):
            read = pool.map(lambda file: _read_part(job.filesystem, file), group)
            yield from (part for part in read if part is not None)


def _read_part(filesystem: Any, file: PartFile) -> Part | None:
    try:
        with open_parquet(filesystem, file.path) as opened:
            metadata = opened.metadata
            footer = PartFooter.from_metadata(metadata.metadata)
    except FileNotFoundError:
        return None
    except READ_ERRORS as error:
        return Part(file, None, damage=f"cannot be read as Parquet: {first_line(error)}")
    damage = None
    if footer is None or not _is_typed(footer):
        damage = "has no footer of a part: this version of adaflash-batch did not write it"
    return Part(file, None if damage else footer, metadata.num_rows, damage)


def _is_typed(footer: PartFooter) -> bool:
    totals = footer.totals
    counts = (footer.shard_index, footer.chunk_index, footer.first_row, footer.sequence)
    sums = (totals.num_rows, totals.num_output_rows, totals.num_errors, totals.completion_tokens)
    return all(isinstance(value, int) for value in (*counts, *sums))


def is_misnamed(part: Part) -> bool:
    """Whether a part has another name than the job would give it."""
    footer = part.footer
    return footer is not None and part.file.name != part_name(
        footer.shard_index, footer.chunk_index
    )


def objections(job: JobOutput, part: Part) -> list[str]:
    """What of a part's footer does not fit the job, the part's name or its rows; none if it does.

    They are predicates of the file: `was written by another job`.
    """
    footer = part.footer
    if footer is None:
        return [part.damage or "has no footer"]
    found = []
    if is_misnamed(part):
        found.append(
            f"has the wrong name: it holds chunk {footer.chunk_index} of input file "
            f"{footer.shard_index} ({footer.shard_name})"
        )
    if footer.fingerprint != job.fingerprint:
        found.append(
            f"was written by another job: its fingerprint is {footer.fingerprint[:12]}…, "
            f"job.json has {job.fingerprint[:12]}…"
        )
    if part.num_rows != footer.totals.num_output_rows:
        found.append(f"holds {part.num_rows} rows, its footer says {footer.totals.num_output_rows}")
    return found + _input_objections(job, footer)


def _input_objections(job: JobOutput, footer: PartFooter) -> list[str]:
    index = footer.shard_index
    source = job.inputs[index] if 0 <= index < len(job.inputs) else None
    if source is None or source.name != footer.shard_name:
        return [
            f"belongs to input file {index} ({footer.shard_name}), "
            f"the job has {source.name if source else 'none'} in its place"
        ]
    found = []
    if source.digest != footer.shard_digest:
        found.append(f"was made from another state of the input file {source.name}")
    chunk, num_rows = footer.chunk_index, footer.totals.num_rows
    if not 0 <= chunk < job.chunks(index):
        found.append(f"holds chunk {chunk}, {source.name} has {job.chunks(index)} chunks")
    elif (footer.first_row, num_rows) != job.rows_of(index, chunk):
        first, count = job.rows_of(index, chunk)
        found.append(
            f"holds {num_rows} input rows from row {footer.first_row} on, its chunk has {count} "
            f"from row {first} on"
        )
    return found
