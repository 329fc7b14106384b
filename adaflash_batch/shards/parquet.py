"""Input files as Parquet: opening, what the footer says, and batches of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adaflash_batch.errors import InputError, first_line
from adaflash_batch.shards.inputs import Shard

# With a buffer Arrow reads a column chunk piece by piece; without one it holds all of it.
_READ_BUFFER = 256 * 1024
_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_ROWS = 8192

_DIGEST_BLOCK = 256 * 1024
_DIGEST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What is known of an input file before its rows are read.

    Attributes:
        shard: the file.
        num_rows: rows in it.
        schema: its Arrow schema, with metadata.
        digest: hexadecimal, see `inspect_shard`.
    """

    shard: Shard
    num_rows: int
    schema: Any
    digest: str


def inspect_shard(shard: Shard) -> ShardInfo:
    """Read the footer of an input file; InputError if it is not a whole Parquet file.

    The digest covers the size, the footer, and every byte of a file up to 16 MiB or 64 evenly
    spaced blocks of 256 KiB of a larger one. The footer alone (sizes, offsets, statistics) would
    miss an edit that keeps the lengths; all of a terabyte would take longer than it is worth.
    """
    with open_shard(shard) as file:
        metadata, schema = file.metadata, file.schema_arrow
    with _reporting(shard), shard.filesystem.open_input_file(shard.path) as source:
        digest = _digest(source, metadata.serialized_size + 8)
    return ShardInfo(shard, metadata.num_rows, schema, digest)


@contextmanager
def open_parquet(filesystem: Any, path: str) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile` that is read piece by piece; raises what Arrow raises."""
    with filesystem.open_input_file(path) as source:
        # Checksums of pages, where a file has them, tell damage that still decodes to something.
        yield pq.ParquetFile(
            source, buffer_size=_READ_BUFFER, pre_buffer=False, page_checksum_verification=True
        )


@contextmanager
def open_shard(shard: Shard) -> Iterator[Any]:
    """`open_parquet`; whatever goes wrong while it is open becomes InputError."""
    with _reporting(shard), open_parquet(shard.filesystem, shard.path) as file:
        yield file


def read_batches(
    file: Any,
    *,
    row_groups: Sequence[int] | None = None,
    columns: Sequence[str] | None = None,
    max_rows: int = _BATCH_ROWS,
) -> Iterator[Any]:
    """Record batches of an open file, each of about 8 MiB where rows are even, or `max_rows`."""
    groups = range(file.metadata.num_row_groups) if row_groups is None else row_groups
    size = min(max_rows, _batch_rows([file.metadata.row_group(group) for group in groups]))
    # A group at a time: Arrow cannot put dictionaries of two of them into one batch, where they
    # are within structs or lists. Threads would decode columns side by side with the decoder's
    # own: two cores are better there.
    for group in groups:
        yield from file.iter_batches(
            batch_size=size, row_groups=[group], columns=columns, use_threads=False
        )


def _batch_rows(groups: Sequence[Any]) -> int:
    """Rows a batch, from the row group with the widest rows."""
    widest = max((g.total_byte_size / g.num_rows for g in groups if g.num_rows), default=1.0)
    return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(widest, 1.0))))


@contextmanager
def _reporting(shard: Shard) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"cannot read {shard.path} as Parquet: {first_line(error)}",
            "the file may be cut short, damaged or of another format",
        ) from error


def _digest(source: Any, footer_size: int) -> str:
    size = source.size()
    step = max(_DIGEST_BLOCK, -(-size // _DIGEST_BLOCKS))
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    for offset in range(0, size, step):
        digest.update(source.read_at(min(_DIGEST_BLOCK, size - offset), offset))
    digest.update(source.read_at(min(footer_size, size), max(0, size - footer_size)))
    return digest.hexdigest()
