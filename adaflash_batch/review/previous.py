"""What an output directory holds before a job begins, read without a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import fs

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.footer import PartFooter, Totals
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.job_folder import JobFolder
from adaflash_batch.shards.locations import is_local, locate, stat
from adaflash_batch.shards.recovery import fingerprint, read_footer
from adaflash_batch.shards.writer import list_parts, refuse_overlap

_MOST_TOLD = 5


@dataclass(slots=True)
class Previous:
    """An output directory.

    Attributes:
        directory: as the user names it.
        path, local: where it is; whether that is on this machine.
        exists: whether it is there.
        done: (input file, chunk) of the parts of this very job.
        totals: sums over them.
        part_bytes: of their files.
        differences: of the job that wrote it from this one, a line each.
        refusals: why a run would not begin.
    """

    directory: str
    path: str
    local: bool
    exists: bool = False
    done: set[tuple[int, int]] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)
    part_bytes: int = 0
    differences: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def mean_completion_tokens(self) -> float | None:
        """Of the rows that are done, None where none is."""
        served = self.totals.num_output_rows - self.totals.num_errors
        return self.totals.completion_tokens / served if served else None

    def to_json(self) -> dict[str, object]:
        """What is there, and what is in the way."""
        return {
            "directory": self.directory,
            "exists": self.exists,
            "parts_done": len(self.done),
            "rows_done": self.totals.num_rows,
            "fingerprint_matches": not self.differences if self.exists else None,
            "differences": self.differences,
        }


def look_at_output(
    directory: str, facts: Mapping[str, object], shards: list[Shard], *, is_fresh: bool = False
) -> Previous:
    """Read an output directory as a run would find it, and change nothing.

    Args:
        directory: of the output.
        facts: `job_facts.text_facts` of the job.
        shards: its input files.
        is_fresh: whether the job replaces what is there.
    """
    filesystem, path = locate(directory)
    found = Previous(directory, path, is_local(filesystem))
    kind = stat(filesystem, path).type
    found.exists = kind == fs.FileType.Directory
    if kind == fs.FileType.File:
        found.refusals.append(f"the output directory {directory} is a file")
        return found
    found.refusals += _overlaps(filesystem, path, shards)
    if found.local and not os.access(existing_above(path), os.W_OK | os.X_OK):
        found.refusals.append(f"the output directory {directory} cannot be written to")
    if found.exists and not is_fresh:
        _read_parts(filesystem, found, facts)
    return found


def existing_above(path: str) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    return next(each for each in (Path(path), *Path(path).parents) if each.exists())


def _overlaps(filesystem: Any, path: str, shards: list[Shard]) -> Iterator[str]:
    for shard in shards:
        try:
            if shard.filesystem == filesystem:
                refuse_overlap(filesystem, path, shard)
        except ConfigError as error:
            yield error.message
            return


def _read_parts(filesystem: Any, found: Previous, facts: Mapping[str, object]) -> None:
    mark = fingerprint(facts)
    others: list[str] = []
    num_parts = 0
    for info in list_parts(filesystem, found.path):
        num_parts += 1
        footer = _read_footer(filesystem, info.path)
        if footer is None:
            continue  # not whole: a run does its rows again
        if footer.fingerprint != mark:
            others.append(info.path)
            continue
        found.done.add((footer.shard_index, footer.chunk_index))
        found.totals += footer.totals
        found.part_bytes += int(info.size or 0)
    if num_parts:
        found.differences += _job_differences(filesystem, found, facts)
    if found.differences:
        found.refusals.append(f"the output directory {found.directory} holds another job's rows")
    elif others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        found.refusals.append(f"{others[0]}{more} was written by another job")


def _read_footer(filesystem: Any, path: str) -> PartFooter | None:
    """None also of what no job of ours wrote."""
    try:
        return read_footer(filesystem, path)
    except ConfigError:
        return None


def _job_differences(filesystem: Any, found: Previous, facts: Mapping[str, object]) -> list[str]:
    try:
        return JobFolder(filesystem, found.path).differences(facts)
    except ConfigError as error:
        found.refusals.append(error.message)
        return []
