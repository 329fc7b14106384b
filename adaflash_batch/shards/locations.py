"""Places that a person names: local paths and `pyarrow.fs` URIs, and what is found there."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from adaflash_batch.errors import ConfigError, InputError

LOCAL = fs.LocalFileSystem()

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# What may stand in a URI as it is. `%` too: a person who escapes does it everywhere.
_SAFE_IN_URI = "/%:@!$&'()+,;=-._~"
_OBJECT_STORES = frozenset({"s3", "gcs", "abfs"})
_MAGIC = re.compile(r"[*?[]")


def locate(text: str) -> tuple[Any, str]:
    """The filesystem of a path or URI and the path in it (absolute if local).

    Raises ConfigError for an empty text or a URI that `pyarrow.fs` does not know.
    """
    if not text:
        raise ConfigError("a path is empty")
    if not _is_utf8(text):
        raise ConfigError(f"the path {text!r} is not valid UTF-8", "rename the file")
    if not _SCHEME.match(text):
        return LOCAL, os.path.abspath(os.path.expanduser(text))
    base, mark, query = text.partition("?")
    try:
        filesystem, path = fs.FileSystem.from_uri(quote(base, safe=_SAFE_IN_URI) + mark + query)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"cannot use the address {text}: {error}", "use a local path, file:// or s3://"
        ) from error
    return filesystem, os.path.abspath(path) if is_local(filesystem) else path.rstrip("/")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def location(filesystem: Any, path: str) -> str:
    """What `locate` finds a file by: its path, or its URI."""
    scheme = {"gcs": "gs", "abfs": "abfs"}.get(filesystem.type_name, filesystem.type_name)
    return path if is_local(filesystem) else f"{scheme}://{path}"


def is_local(filesystem: Any) -> bool:
    """Whether paths of the filesystem are paths of this machine."""
    return isinstance(filesystem, fs.LocalFileSystem)


def has_rename(filesystem: Any) -> bool:
    """Whether a file may be renamed over another one at once; object stores copy and delete."""
    kind = filesystem.type_name
    # Of those behind fsspec it is not known: a torn part shows, since its footer is its end.
    return is_local(filesystem) or not (kind in _OBJECT_STORES or kind.startswith("py::"))


def is_pattern(path: str) -> bool:
    """Whether the path has glob characters."""
    return _MAGIC.search(path) is not None


def fixed_part(pattern: str) -> str:
    """The leading directories of a pattern that have no glob character."""
    parts = pattern.split("/")
    first = next((i for i, part in enumerate(parts) if is_pattern(part)), len(parts) - 1)
    return "/".join(parts[:first]) or "/"


def real_path(filesystem: Any, path: str) -> str:
    """One spelling for one file: directories resolved; a link to a file is a file of its own."""
    if not is_local(filesystem):
        return path
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def stat(filesystem: Any, path: str) -> Any:
    """The FileInfo of a path; InputError where the filesystem refuses to say."""
    try:
        return filesystem.get_file_info(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def list_directory(filesystem: Any, directory: str) -> list[Any]:
    """What is directly in a directory, in order of name, as FileInfos."""
    try:
        found = filesystem.get_file_info(fs.FileSelector(directory))
        return sorted(found, key=lambda info: info.base_name)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot list the directory {directory}: {error}") from error
    except UnicodeDecodeError as error:
        name = error.object.decode(errors="backslashreplace")
        raise InputError(f"the file name {name} in {directory} is not valid UTF-8") from error


def walk_parquet(filesystem: Any, directory: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of the *.parquet files below a directory; hidden and underscored names are left out.

    Links to directories are followed unless they lead back up.
    """
    here = os.path.realpath(directory) if is_local(filesystem) else directory
    if here in above:
        return
    for info in list_directory(filesystem, directory):
        if info.base_name.startswith((".", "_")):
            continue
        if info.type == fs.FileType.Directory:
            yield from walk_parquet(filesystem, info.path, (*above, here))
        elif info.base_name.lower().endswith(".parquet"):
            yield info.path


def match_pattern(filesystem: Any, pattern: str) -> list[str]:
    """Paths of files and directories that a glob pattern matches (`**`: any depth)."""
    base = fixed_part(pattern)
    if stat(filesystem, base).type != fs.FileType.Directory:
        return []
    rest = pattern[len(base) :].strip("/").split("/")
    return sorted(set(_match(filesystem, base, rest)))


def _match(filesystem: Any, directory: str, parts: list[str]) -> Iterator[str]:
    head, rest = parts[0], parts[1:]
    if head == "**":
        yield from _match(filesystem, directory, rest) if rest else [directory]
    for info in list_directory(filesystem, directory):
        is_directory = info.type == fs.FileType.Directory
        if not name_matches(info.base_name, head):
            continue
        if head == "**":
            yield from _match(filesystem, info.path, parts) if is_directory else []
        elif not rest:
            yield info.path
        elif is_directory:
            yield from _match(filesystem, info.path, rest)


def name_matches(name: str, pattern: str) -> bool:
    """Whether one name fits one part of a pattern; hidden names only fit where it says so."""
    if name.startswith((".", "_")) and not pattern.startswith(name[0]):
        return False
    return fnmatch.fnmatchcase(name, pattern)


def path_matches(path: str, pattern: str) -> bool:
    """Whether a path fits a whole pattern."""
    return _parts_match(path.split("/"), pattern.split("/"))


def _parts_match(names: list[str], parts: list[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**" and _parts_match(names, parts[1:]):
        return True
    if not names or not name_matches(names[0], parts[0]):
        return False
    return _parts_match(names[1:], parts if parts[0] == "**" else parts[1:])
