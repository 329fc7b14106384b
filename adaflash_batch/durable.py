"""What a kill at any time leaves whole: flushed files, renames."""

from __future__ import annotations

import os
from pathlib import Path


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
