"""64-bit hashes of more rows than memory would hold, in a temporary file: which occur twice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from adaflash_batch.errors import AdaflashError

_BLOCK = 1 << 20


class Hashes:
    """Takes hashes in any order; 8 bytes each on disk. Use it in a `with` statement.

    Raises:
        AdaflashError: the temporary file cannot be written.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._count = 0

    def __enter__(self) -> Hashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, hashes: Any) -> None:
        """Keep an array of uint64."""
        try:
            self._file.write(hashes.tobytes())
            self._file.flush()
        except OSError as error:
            raise AdaflashError(
                f"cannot keep hashes of rows in {tempfile.gettempdir()}: {error.strerror}",
                "name a directory with more space in TMPDIR; a row takes 8 bytes",
            ) from error
        self._count += len(hashes)

    def repeated(self) -> Iterator[set[int]]:
        """The values that occur twice or more, some at a time."""
        said: set[int] = set()  # one that goes on into the next block is said once
        for block in self._sorted_blocks():
            repeated = set(np.unique(block[1:][block[1:] == block[:-1]]).tolist())
            if repeated - said:
                yield repeated - said
            said = repeated

    def num_repeats(self) -> int:
        """How many hashes are the same as one before them."""
        return sum(int((block[1:] == block[:-1]).sum()) for block in self._sorted_blocks())

    def _sorted_blocks(self) -> Iterator[Any]:
        """Sorted runs that overlap by one, so that every pair of neighbours is in one of them."""
        if self._count == 0:
            return
        hashes = np.memmap(self._file, dtype=np.uint64, mode="r+", shape=(self._count,))
        hashes.sort()
        for start in range(0, len(hashes) - 1, _BLOCK):
            yield hashes[start : start + _BLOCK + 1]
