"""From the inputs that a person names to the list of input files."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyarrow import fs

from adaflash_batch.errors import ConfigError, InputError
from adaflash_batch.shards.locations import (
    LOCAL,
    fixed_part,
    is_pattern,
    locate,
    match_pattern,
    real_path,
    stat,
    walk_parquet,
)


@dataclass(frozen=True, slots=True)
class Shard:
    """An input file.

    Attributes:
        index: its number in the job, by order of name.
        name: its path relative to the directory that all inputs have in common; unique.
        path: where it is in `filesystem`.
        filesystem: a `pyarrow.fs.FileSystem`.
        origin: the file, directory or pattern that it was found by, as a path of `filesystem`.
    """

    index: int
    name: str
    path: str
    filesystem: Any = field(default_factory=lambda: LOCAL, repr=False, hash=False)
    origin: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class _Input:
    """One input of the command line: the files it stands for and the directory they are under."""

    text: str
    filesystem: Any
    origin: str
    base: str
    paths: list[str]


def resolve_inputs(inputs: Sequence[str]) -> list[Shard]:
    """The input files that paths, directories, globs and URIs stand for, in order of name.

    Directories are searched to any depth for `*.parquet`; names that begin with `.` or `_` are left
    out. A path that exists is taken as it is, glob characters or not. Raises InputError for an
    input that stands for no file, ConfigError for a file that is named twice.
    """
    if not inputs:
        raise ConfigError("no input is given", "name a Parquet file, a directory or a glob")
    expanded = [_expand(text) for text in inputs]
    _refuse_repeats(expanded)
    named = [
        (name, path, item)
        for item, base in zip(expanded, _bases(expanded), strict=True)
        for path in item.paths
        for name in [base + path[len(item.base) :].lstrip("/")]
    ]
    named.sort(key=lambda entry: entry[0])
    return [
        Shard(index, name, path, item.filesystem, item.origin)
        for index, (name, path, item) in enumerate(named)
    ]


def _expand(text: str) -> _Input:
    filesystem, path = locate(text)
    kind = stat(filesystem, path).type
    if kind == fs.FileType.File:
        found = _Input(text, filesystem, path, posixpath.dirname(path), [path])
    elif kind == fs.FileType.Directory:
        paths = list(walk_parquet(filesystem, path))
        if not paths:
            raise InputError(f"the directory {text} has no *.parquet file")
        found = _Input(text, filesystem, path, path, paths)
    elif kind == fs.FileType.NotFound and is_pattern(path):
        found = _Input(text, filesystem, path, fixed_part(path), _expand_pattern(filesystem, path))
        if not found.paths:
            raise InputError(f"no file matches {text}")
    elif kind == fs.FileType.NotFound:
        raise InputError(f"there is no file or directory {text}")
    else:
        raise InputError(f"{text} is neither a file nor a directory")
    return found


def _expand_pattern(filesystem: Any, pattern: str) -> list[str]:
    """Files that match, and the files in directories that match; each once."""
    found: dict[str, None] = {}
    for path in match_pattern(filesystem, pattern):
        is_directory = stat(filesystem, path).type == fs.FileType.Directory
        found.update(dict.fromkeys(walk_parquet(filesystem, path) if is_directory else [path]))
    return list(found)


def _bases(expanded: Sequence[_Input]) -> list[str]:
    """What stands before the path below its own base, for each input."""
    if any(item.filesystem != expanded[0].filesystem for item in expanded):
        return [f"{item.filesystem.type_name}/{item.base.strip('/')}/" for item in expanded]
    common = os.path.commonpath([item.base for item in expanded])
    return [
        f"{rest}/" if (rest := item.base[len(common) :].strip("/")) else "" for item in expanded
    ]


def _refuse_repeats(expanded: Sequence[_Input]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for item in expanded:
        for path in item.paths:
            key = (item.filesystem.type_name, real_path(item.filesystem, path))
            if key in seen:
                by = f"by {seen[key]} and by {item.text}" if seen[key] != item.text else "twice"
                raise ConfigError(f"the file {path} is named {by}", "name each input file once")
            seen[key] = item.text
