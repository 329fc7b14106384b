"""`run --fresh`: a whole new output beside the old one, which takes its place when it is whole.

The new one grows in `_adaflash/fresh/`, an output directory like any other. When its last part is
there, a mark (`_adaflash/fresh/whole`) says so; from then on every run that comes finishes the
move before anything else, so that a kill in its middle costs nothing.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import fs

from adaflash_batch.durable import flush
from adaflash_batch.shards.job_folder import FOLDER
from adaflash_batch.shards.locations import has_rename, is_local, stat
from adaflash_batch.shards.writer import list_parts, write_error

FRESH = "fresh"
WHOLE = "whole"
# What the old job left of its own; of a new one it would tell wrong things.
_REPLACED = ("summary.json", "rejects.parquet", "drafter", "journal", "job.json")


def fresh_path(output: str) -> str:
    """Where the new output of a directory grows."""
    return f"{output}/{FOLDER}/{FRESH}"


def mark_whole(filesystem: Any, output: str) -> None:
    """The new output is whole: from here on the old one is gone, killed or not."""
    source = fresh_path(output)
    path = f"{source}/{WHOLE}"
    own = [name for name in _REPLACED if _is_there(filesystem, f"{source}/{FOLDER}/{name}")]
    mark = {"parts": _parts(filesystem, source), "own": own}
    try:
        with filesystem.open_output_stream(path) as stream:
            stream.write(json.dumps(mark).encode())
        if is_local(filesystem):
            flush(path)
            flush(source)
    except (OSError, pa.ArrowException) as error:
        raise write_error(path, error) from error


def finish_move(filesystem: Any, output: str) -> bool:
    """Put the new output in the place of the old one; does nothing without the mark.

    May be repeated after a kill at any point. Returns whether there was anything to do. Raises
    AdaflashError if it cannot be done.
    """
    mark = _read_mark(filesystem, output)
    if mark is None:
        return False
    source = fresh_path(output)
    try:
        for name in mark["parts"]:
            _replace(filesystem, f"{source}/{name}", f"{output}/{name}")
        for name in set(_parts(filesystem, output)) - set(mark["parts"]):
            filesystem.delete_file(f"{output}/{name}")
        for name in mark["own"]:
            _replace(filesystem, f"{source}/{FOLDER}/{name}", f"{output}/{FOLDER}/{name}")
        for name in set(_REPLACED) - set(mark["own"]):
            _delete(filesystem, f"{output}/{FOLDER}/{name}")
        if is_local(filesystem):
            flush(output)
            flush(f"{output}/{FOLDER}")
        # The mark goes first: without it the rest is only litter, which `discard` removes.
        filesystem.delete_file(f"{source}/{WHOLE}")
        discard(filesystem, output)
        return True
    except (OSError, pa.ArrowException) as error:
        raise write_error(output, error) from error


def discard(filesystem: Any, output: str) -> None:
    """Remove a new output that is not whole."""
    if stat(filesystem, fresh_path(output)).type == fs.FileType.Directory:
        filesystem.delete_dir(fresh_path(output))


def _parts(filesystem: Any, directory: str) -> list[str]:
    return [info.base_name for info in list_parts(filesystem, directory)]


def _read_mark(filesystem: Any, output: str) -> dict[str, list[str]] | None:
    path = f"{fresh_path(output)}/{WHOLE}"
    if not _is_there(filesystem, path):
        return None
    # A torn one was not flushed, so nothing has been moved.
    with suppress(OSError, ValueError, pa.ArrowException), filesystem.open_input_file(path) as file:
        mark = json.loads(file.read())
        if isinstance(mark, dict) and mark.keys() == {"parts", "own"}:
            return mark
    return None


def _is_there(filesystem: Any, path: str) -> bool:
    return bool(stat(filesystem, path).type != fs.FileType.NotFound)


def _replace(filesystem: Any, source: str, target: str) -> None:
    """Put a file or directory in the place of another; what is not there was moved before."""
    kind = stat(filesystem, source).type
    if kind == fs.FileType.Directory:  # which cannot be renamed over another one
        _delete(filesystem, target)
    if kind == fs.FileType.File and not has_rename(filesystem):
        filesystem.copy_file(source, target)
        filesystem.delete_file(source)
    elif kind != fs.FileType.NotFound:
        filesystem.move(source, target)


def _delete(filesystem: Any, path: str) -> None:
    kind = stat(filesystem, path).type
    if kind == fs.FileType.Directory:
        filesystem.delete_dir(path)
    elif kind != fs.FileType.NotFound:
        filesystem.delete_file(path)
