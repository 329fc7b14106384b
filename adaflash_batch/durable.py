"""What a kill at any time leaves whole: flushed files, renames; locks that die with a process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adaflash_batch.errors import ConfigError

_POLL_S = 0.05


def flush(path: str | Path) -> None:
    """Make a file's content durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(scratch: Path, path: Path) -> None:
    """Flush a file and rename it over another one of the same folder, which stays whole till then.

    The name is durable when this returns.
    """
    flush(scratch)
    scratch.replace(path)
    flush(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its old content (`.NAME.partial`), then in place of it."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.write_bytes(content)
    put_in_place(scratch, path)


@contextmanager
def locked(folder: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a folder, which is made if it is not there; the system lets go when the process dies.

    Raises ConfigError if another process still holds it after `wait_s` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        until = time.monotonic() + wait_s
        while not _is_taken(file.fileno()):
            if time.monotonic() >= until:
                raise ConfigError(f"another process is at work in {folder}")
            time.sleep(_POLL_S)
        yield


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
