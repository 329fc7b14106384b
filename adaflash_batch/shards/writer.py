"""Part files. What commits one is a rename, or on an object store the one put.

On filesystems with renames a part is written under a temporary name, made durable, and renamed.
An object store shows an object whole or not at all, and its renames are copies: there the part is
put under its name at once.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from adaflash_batch.durable import flush
from adaflash_batch.errors import AdaflashError, ConfigError
from adaflash_batch.shards.footer import NAMESPACE, PartFooter, Totals, make_footer, sum_rows
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.locations import (
    LOCAL,
    has_rename,
    is_local,
    is_pattern,
    list_directory,
    locate,
    path_matches,
    stat,
)
from adaflash_batch.shards.parquet_form import write_parquet

__all__ = [
    "PART_NAME",
    "TEMPORARY_NAME",
    "PartFooter",
    "Totals",
    "list_parts",
    "make_footer",
    "part_name",
    "prepare_output",
    "sum_rows",
    "write_part",
]

PART_NAME = re.compile(r"part-(\d{5,})-(\d{5,})\.parquet")
# A leading dot: readers of the directory pass over it.
TEMPORARY_NAME = re.compile(r"\.part-(\d{5,})-(\d{5,})\.parquet\.[0-9a-f]{8}\.tmp")


def part_name(shard_index: int, chunk_index: int) -> str:
    """The name of a chunk's part file: `part-00003-00012.parquet`."""
    return f"part-{shard_index:05d}-{chunk_index:05d}.parquet"


def list_parts(filesystem: Any, directory: str) -> list[Any]:
    """Files of a directory that are named like parts, as FileInfos by name; it need not be there.

    Raises InputError where the directory cannot be listed.
    """
    if stat(filesystem, directory).type != fs.FileType.Directory:
        return []
    return [
        info
        for info in list_directory(filesystem, directory)
        if info.type == fs.FileType.File and PART_NAME.fullmatch(info.base_name)
    ]


def write_part(
    directory: str, name: str, table: Any, footer: PartFooter, filesystem: Any = LOCAL
) -> None:
    """Write and commit a part: all of it is there under its name, or none.

    The schema metadata of the table is kept, except what an earlier job left under `adaflash.*`.
    Raises AdaflashError with the temporary file removed; parts that exist are not touched.
    """
    metadata = {
        key: value
        for key, value in (table.schema.metadata or {}).items()
        if not key.startswith(NAMESPACE)
    }
    table = table.replace_schema_metadata(metadata | footer.to_metadata())
    temporary = f".{name}.{secrets.token_hex(4)}.tmp"
    try:
        if is_local(filesystem):
            _write_local(Path(directory), name, temporary, table)
        else:
            _write_remote(filesystem, directory, name, temporary, table)
    except (OSError, pa.ArrowException) as error:
        raise write_error(f"{directory}/{name}", error) from error


def _write_local(directory: Path, name: str, temporary: str, table: Any) -> None:
    path = directory / temporary
    try:
        with open(path, "xb") as file:
            _write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, directory / name)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    flush(directory)


def _write_remote(filesystem: Any, directory: str, name: str, temporary: str, table: Any) -> None:
    # Closing an upload commits it, also after an error: nothing is opened before all is in hand.
    buffer = pa.BufferOutputStream()
    _write_table(table, buffer)
    path = f"{directory}/{temporary if has_rename(filesystem) else name}"
    try:
        with filesystem.open_output_stream(path) as stream:
            stream.write(buffer.getvalue())
        if has_rename(filesystem):
            filesystem.move(path, f"{directory}/{name}")
    except BaseException:
        with suppress(OSError, pa.ArrowException):
            filesystem.delete_file(path)
        raise


def _write_table(table: Any, target: Any) -> None:
    write_parquet(table, target)


def write_error(path: str, error: Exception) -> AdaflashError:
    """The words for a file of the output that cannot be written."""
    number = getattr(error, "errno", None)
    hint = "what is already committed is unharmed; run the same command again to go on"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return AdaflashError(f"no space left for {path}", f"free some space; {hint}")
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return AdaflashError(f"no permission to write {path}", f"check its directory; {hint}")
    return AdaflashError(f"cannot write {path}: {error}", hint)


def prepare_output(directory: str, shards: Sequence[Shard]) -> tuple[Any, str]:
    """Check an output directory against the input, create it, and try writing in it.

    Returns its filesystem and its path there. Raises ConfigError: it is a file, cannot be written
    to, has input files below it, or is where the next run would take its files for input.
    """
    filesystem, path = locate(directory)
    if stat(filesystem, path).type == fs.FileType.File:
        raise ConfigError(f"the output directory {directory} is a file", "name a directory")
    for shard in shards:
        if shard.filesystem == filesystem:
            refuse_overlap(filesystem, path, shard)
    try:
        filesystem.create_dir(path, recursive=True)
        probe = f"{path}/.adaflash-{secrets.token_hex(4)}.tmp"
        filesystem.open_output_stream(probe).close()
        filesystem.delete_file(probe)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"cannot write to the output directory {directory}: {error}",
            "name a directory that can be written to with --out",
        ) from error
    return filesystem, path


def refuse_overlap(filesystem: Any, output: str, shard: Shard) -> None:
    """ConfigError if an output directory holds an input file, or would be input to a later run."""
    hint = "name another directory with --out"
    resolve = os.path.realpath if is_local(filesystem) else str
    output, source, origin = (
        resolve(output),
        resolve(shard.path),
        resolve(shard.origin or shard.path),
    )
    if _is_below(source, output):
        raise ConfigError(f"the output directory {output} holds the input file {shard.path}", hint)
    kind = stat(filesystem, origin).type
    inside = kind == fs.FileType.Directory and _is_below(output, origin)
    is_glob = kind == fs.FileType.NotFound and is_pattern(origin)
    matched = is_glob and _is_found_by(f"{output}/{part_name(0, 0)}", origin)
    if inside or matched:
        raise ConfigError(
            f"the output directory {output} is inside the input {origin}",
            f"its files would be input to the next run; {hint}",
        )


def _is_found_by(path: str, pattern: str) -> bool:
    """Whether a pattern matches a file or a directory above it."""
    parts = path.split("/")
    return any(path_matches("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
