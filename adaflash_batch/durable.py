"""What a kill at any time leaves whole: flushed files, renames; locks that die with a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from adaflash_batch.errors import LockedError

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

    Raises LockedError if another process still holds it after `wait_s` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / "lock", wait_s=wait_s, why=f"another process is at work in {folder}"):
        yield


@contextmanager
def held(path: Path, *, wait_s: float = 0.0, why: str) -> Iterator[None]:
    """Hold a lock file, which is made if it is not there and stays.

    A lock is the system's (flock), not the file's being there: that of a dead process is free.

    Args:
        path: the file.
        wait_s: seconds to wait for whoever holds it.
        why: said where it stays held.

    Raises:
        LockedError: it is held.
    """
    lock = FileLock(path, timeout=wait_s, poll_interval=_POLL_S)
    try:
        lock.acquire()
    except Timeout:
        raise LockedError(why, "run the same command again when it has ended") from None
    try:
        yield
    finally:
        lock.release()
