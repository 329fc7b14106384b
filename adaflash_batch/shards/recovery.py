"""What an output directory already holds, and whether it belongs to this job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.locations import LOCAL, list_directory, stat
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.portion import Portion
from adaflash_batch.shards.reader import num_chunks
from adaflash_batch.shards.writer import PART_NAME, TEMPORARY_NAME, PartFooter, Totals

_OTHER_DIRECTORY = "name another directory with --out"


@dataclass(slots=True)
class Committed:
    """The parts of a job that are whole.

    Attributes:
        done: (shard, chunk) of each.
        totals: sums over them.
        drafter_version: that was committed with the last one of them.
        num_committed: parts that the job had committed by then; some may have been lost since.
        notes: lines for people about files that do not count.
    """

    done: set[tuple[int, int]] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)
    drafter_version: int | None = None
    num_committed: int = 0
    notes: list[str] = field(default_factory=list)

    def is_done(self, shard_index: int, chunk_index: int) -> bool:
        """Whether the chunk needs no more work."""
        return (shard_index, chunk_index) in self.done

    def _add(self, footer: PartFooter) -> None:
        self.done.add((footer.shard_index, footer.chunk_index))
        self.totals += footer.totals
        # Of parts from before there was a sequence the highest version counts.
        version, found = footer.drafter_version, self.drafter_version
        is_later = footer.sequence >= self.num_committed
        is_even = footer.sequence + 1 == self.num_committed
        if is_later or (is_even and version is not None and (found is None or version > found)):
            self.drafter_version = version
        self.num_committed = max(self.num_committed, footer.sequence + 1)


def committed(
    directory: str,
    fingerprint: str,
    shards: Sequence[ShardInfo],
    chunk_rows: int,
    filesystem: Any = LOCAL,
    portion: Portion | None = None,
) -> Committed:
    """Read the footers of the parts in an output directory and remove our temporary files.

    A part that cannot be read counts as missing and is noted: its chunk is done again and the new
    part takes its place. A directory that does not exist holds nothing.

    Args:
        directory: of the output, in `filesystem`.
        fingerprint: of the job.
        shards: its input files.
        chunk_rows: rows of a chunk.
        filesystem: that of `directory`.
        portion: files of other chunks are another run's, which may be writing them; None is all.

    Raises:
        ConfigError: a part is of another job, of other input files or of chunks of other rows.
    """
    found = Committed()
    if stat(filesystem, directory).type == fs.FileType.NotFound:
        return found
    for info in list_directory(filesystem, directory):
        if info.type != fs.FileType.File:
            continue
        if portion is not None and _is_of_others(info.base_name, portion):
            continue
        if TEMPORARY_NAME.fullmatch(info.base_name):
            with suppress(OSError, pa.ArrowException):
                filesystem.delete_file(info.path)
        elif PART_NAME.fullmatch(info.base_name):
            footer = read_footer(filesystem, info.path)
            if footer is None:
                found.notes.append(f"{info.path} is not whole: its rows are done again")
            else:
                _check(info.path, footer, fingerprint, shards, chunk_rows)
                found._add(footer)
        elif info.base_name.endswith(".parquet") and info.base_name[0] not in "._":
            found.notes.append(f"{info.path} is no part of this job: readers may take it for one")
    return found


def _is_of_others(name: str, portion: Portion) -> bool:
    """Whether a file is a part, whole or not, of a chunk outside the portion."""
    found = PART_NAME.fullmatch(name) or TEMPORARY_NAME.fullmatch(name)
    if found is None or int(found[1]) >= len(portion.starts):
        return False
    return not portion.holds(int(found[1]), int(found[2]))


def read_footer(filesystem: Any, path: str) -> PartFooter | None:
    """The footer of a part, None if the file is torn; ConfigError if it is somebody else's."""
    try:
        with filesystem.open_input_file(path) as source:
            metadata = pq.ParquetFile(source).metadata
    except PermissionError as error:
        raise ConfigError(f"cannot read {path}: {error}", _OTHER_DIRECTORY) from error
    except (OSError, pa.ArrowException):
        return None
    footer = PartFooter.from_metadata(metadata.metadata)
    if footer is None:
        raise ConfigError(
            f"{path} was not written by this version of adaflash-batch", _OTHER_DIRECTORY
        )
    return footer if footer.totals.num_output_rows == metadata.num_rows else None


def _check(
    path: str, footer: PartFooter, fingerprint: str, shards: Sequence[ShardInfo], chunk_rows: int
) -> None:
    """ConfigError unless the part is one that this job would write under this name."""
    if footer.fingerprint != fingerprint:
        raise ConfigError(f"{path} was written by another job", _OTHER_DIRECTORY)
    name = PART_NAME.fullmatch(path.rsplit("/", 1)[-1])
    assert name is not None
    if (int(name[1]), int(name[2])) != (footer.shard_index, footer.chunk_index):
        raise ConfigError(
            f"{path} has been renamed: it holds chunk {footer.chunk_index} of input file "
            f"{footer.shard_index}",
            _OTHER_DIRECTORY,
        )
    shard = shards[footer.shard_index] if footer.shard_index < len(shards) else None
    if shard is None or shard.shard.name != footer.shard_name:
        raise ConfigError(
            f"{path} belongs to the input file {footer.shard_name}, this job has "
            f"{shard.shard.name if shard else 'none'} in its place",
            _OTHER_DIRECTORY,
        )
    if shard.digest != footer.shard_digest:
        raise ConfigError(
            f"the input file {shard.shard.path} has changed since {path} was written",
            _OTHER_DIRECTORY,
        )
    _check_rows(path, footer, shard.num_rows, chunk_rows)


def _check_rows(path: str, footer: PartFooter, shard_rows: int, chunk_rows: int) -> None:
    first_row = footer.chunk_index * chunk_rows
    expected = (first_row, min(chunk_rows, shard_rows - first_row))
    has = (footer.first_row, footer.totals.num_rows)
    if footer.chunk_index >= num_chunks(shard_rows, chunk_rows) or has != expected:
        raise ConfigError(
            f"{path} holds {has[1]} rows from row {has[0]} on, which is no chunk of {chunk_rows} "
            "rows",
            "give --chunk-rows as it was when the output was begun",
        )


def fingerprint(fields: Mapping[str, object]) -> str:
    """A hexadecimal digest of everything that decides the text of a job's completions.

    Args:
        fields: nested mappings and sequences of strings, finite numbers, booleans and None.
    """
    return hashlib.sha256(_canonical(fields).encode()).hexdigest()


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """What differs, a line each: `sampling.temperature: 0.0 -> 0.7`.

    Empty iff the fingerprints are equal.
    """
    before, after = _flatten("", old), _flatten("", new)
    return [
        f"{path}: {before.get(path, '(absent)')} -> {after.get(path, '(absent)')}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _flatten(path: str, value: object) -> dict[str, str]:
    """Path of each leaf -> its canonical JSON; an empty mapping is a leaf."""
    if not isinstance(value, Mapping) or not value:
        return {path: _canonical(value)}
    leaves: dict[str, str] = {}
    for key, inner in value.items():
        leaves |= _flatten(f"{path}.{key}" if path else str(key), inner)
    return leaves
