"""Trajectories on disk: whole chunks in safetensors, bounded, read one trajectory at a time.

    chunk-000003/index.json, states-000.safetensors, ...     renamed into place when whole

States are kept in bfloat16. A full store drops its oldest chunks or takes no more, as it was told.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaflash_batch.durable import flush
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import Trajectory
from adaflash_batch.request import RowKey

INDEX = "index.json"
# A file this large is written at a time; so much is held in memory besides what is decoding.
_FILE_BYTES = 64 * 2**20
# More than a tensor's entry in a file's header takes, and a trajectory's in the index.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class Taps:
    """Target layers that are stored, and those of them that are read.

    Attributes:
        stored: in the order in which their states lie side by side.
        wanted: in the order in which they are read; all are among `stored`.
    """

    stored: tuple[int, ...]
    wanted: tuple[int, ...]

    def of(self, features: Tensor) -> Tensor:
        """Stored features [L, stored * H] as wanted, [L, wanted * H]."""
        if self.wanted == self.stored:
            return features
        places = [self.stored.index(layer) for layer in self.wanted]
        rows = features.reshape(len(features), len(self.stored), -1)
        return rows[:, places].flatten(1)


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """Where a trajectory lies, and what is known of it without reading it.

    Attributes:
        file: its safetensors file.
        key: its request's.
        domain: what kind of prompt it had.
        prompt_length: tokens of the prompt.
        length: tokens of prompt and continuation.
        taps: which of the stored layers are read; None reads them as they lie.
    """

    file: Path
    key: RowKey
    domain: str
    prompt_length: int
    length: int
    taps: Taps | None = None

    @property
    def num_generated(self) -> int:
        """Tokens that the target wrote."""
        return self.length - self.prompt_length

    def read(self, *, with_teacher: bool = True) -> Trajectory:
        """The trajectory; without a teacher `last_hidden` is None and not read."""
        name = _name(self.key)
        with safe_open(self.file, framework="pt") as tensors:
            features = tensors.get_tensor(f"{name}.features")
            return Trajectory(
                key=self.key,
                token_ids=tensors.get_tensor(f"{name}.token_ids").long(),
                prompt_length=self.prompt_length,
                features=features if self.taps is None else self.taps.of(features),
                last_hidden=tensors.get_tensor(f"{name}.last_hidden") if with_teacher else None,
                first_hidden=self.prompt_length - 1,
            )

    def read_tokens(self) -> Tensor:
        """The generated tokens alone, int64."""
        with safe_open(self.file, framework="pt") as tensors:
            tokens: Tensor = tensors.get_tensor(f"{_name(self.key)}.token_ids")
        return tokens[self.prompt_length :].long()


class TrajectoryStore:
    """Chunks of one kind of trajectories in a folder of their own.

    Args:
        folder: made when the first chunk is written.
        most_bytes: all chunks together never take more.
        notify: is told of chunks that are dropped.
        taps: of what is read from it.
        may_drop: a new chunk drops the oldest ones for its sake, but never the newest, which says
            how far decoding has come. Otherwise a chunk without room is a ConfigError.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        notify: Callable[[str], None],
        *,
        taps: Taps | None = None,
        may_drop: bool = True,
    ) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._notify = notify
        self._taps = taps
        self._may_drop = may_drop
        for stale in folder.glob(".*.partial"):
            shutil.rmtree(stale)

    @property
    def num_bytes(self) -> int:
        """What lies on disk."""
        return sum(_folder_bytes(chunk) for chunk in self._chunks())

    @property
    def progress(self) -> tuple[int, int]:
        """(chunks, generated tokens) written so far, dropped ones included."""
        chunks = self._chunks()
        if not chunks:
            return 0, 0
        index = _read_index(chunks[-1])
        return int(index["number"]) + 1, int(index["tokens_so_far"])

    @property
    def has_dropped(self) -> bool:
        """Whether chunks of the beginning are gone."""
        chunks = self._chunks()
        return bool(chunks) and int(_read_index(chunks[0])["number"]) > 0

    def entries(self, most_tokens: int | None = None) -> list[StoredTrajectory]:
        """What is there, in the order of decoding.

        Args:
            most_tokens: leave out chunks begun when so many tokens had been generated.
        """
        chunks = self._chunks()
        return [each for chunk in chunks for each in _entries(chunk, most_tokens, self._taps)]

    @contextmanager
    def chunk(self) -> Iterator[ChunkWriter]:
        """The next chunk; it counts once the block has ended without an error."""
        number, tokens = self.progress
        writer = ChunkWriter(self._folder, number, tokens, self._make_room)
        try:
            yield writer
            writer.commit()
        finally:
            shutil.rmtree(writer.scratch, ignore_errors=True)

    def _make_room(self, wanted: int) -> None:
        chunks = self._chunks()
        sizes = [_folder_bytes(chunk) for chunk in chunks]
        while sum(sizes) + wanted > self._most_bytes:
            if not self._may_drop or len(chunks) < 2:
                raise self._is_full(wanted, sum(sizes))
            oldest, _ = chunks.pop(0), sizes.pop(0)
            self._notify(f"disk is full (--disk): dropping the oldest trajectories, {oldest.name}")
            _remove(oldest)

    def _is_full(self, wanted: int, taken: int) -> ConfigError:
        sizes = (
            f"{wanted / 2**20:.1f} MiB after {taken / 2**20:.1f} MiB, of "
            f"{self._most_bytes / 2**20:.1f} MiB"
        )
        if self._may_drop:
            return ConfigError(
                f"the trajectories of one chunk take more than --disk allows: {sizes}",
                "give more with --disk, or tap fewer layers, or lower --concurrency",
            )
        return ConfigError(
            f"the trajectories in {self._folder} take more than --disk allows: {sizes}",
            "give more with --disk, or ask for fewer --tokens",
        )

    def _chunks(self) -> list[Path]:
        return sorted(self._folder.glob("chunk-*"))


class ChunkWriter:
    """A chunk on its way to the disk."""

    def __init__(
        self, folder: Path, number: int, tokens_before: int, make_room: Callable[[int], None]
    ) -> None:
        self._chunk = folder / f"chunk-{number:06}"
        self.scratch = folder / f".chunk-{number:06}.partial"
        self._number, self._tokens_before = number, tokens_before
        self._make_room = make_room
        self._pending: dict[str, Tensor] = {}
        self._written = self._num_files = self._num_tokens = 0
        self._rows: list[dict[str, Any]] = []
        self.scratch.mkdir(parents=True)

    def add(self, trajectory: Trajectory, domain: str) -> None:
        """Take a trajectory; it may be written later."""
        name, hidden = _name(trajectory.key), trajectory.last_hidden
        assert hidden is not None
        self._pending |= {
            f"{name}.token_ids": trajectory.token_ids.to("cpu", torch.int32),
            f"{name}.features": _stored(trajectory.features),
            f"{name}.last_hidden": _stored(hidden),
        }
        length = len(trajectory.token_ids)
        row = {"key": [*trajectory.key], "domain": domain, "length": length}
        row |= {"prompt_length": trajectory.prompt_length, "file": self._file_name}
        self._rows.append(row)
        self._num_tokens += length - trajectory.prompt_length
        if _num_bytes(self._pending) >= _FILE_BYTES:
            self._flush()

    def commit(self) -> None:
        """Make it part of the store."""
        self._flush()
        # In the order of the rows, not in that in which they happened to finish.
        self._rows.sort(key=lambda row: row["key"])
        tokens = self._tokens_before + self._num_tokens
        index: dict[str, Any] = {"number": self._number, "tokens_before": self._tokens_before}
        index |= {"tokens_so_far": tokens, "trajectories": self._rows}
        (self.scratch / INDEX).write_text(json.dumps(index), "utf-8")
        flush(self.scratch / INDEX)
        flush(self.scratch)
        self.scratch.rename(self._chunk)
        flush(self._chunk.parent)

    @property
    def _file_name(self) -> str:
        return f"states-{self._num_files:03}.safetensors"

    def _flush(self) -> None:
        if not self._pending:
            return
        entries = _ENTRY_BYTES * (len(self._pending) + len(self._rows))
        self._make_room(self._written + _num_bytes(self._pending) + entries)
        path = self.scratch / self._file_name
        save_file(self._pending, path)
        flush(path)
        self._written += path.stat().st_size
        self._num_files += 1
        self._pending = {}


def _entries(chunk: Path, most_tokens: int | None, taps: Taps | None) -> Iterator[StoredTrajectory]:
    index = _read_index(chunk)
    if most_tokens is not None and int(index["tokens_before"]) >= most_tokens:
        return
    for row in index["trajectories"]:
        yield StoredTrajectory(
            file=chunk / row["file"],
            key=RowKey(*row["key"]),
            domain=row["domain"],
            prompt_length=row["prompt_length"],
            length=row["length"],
            taps=taps,
        )


def _read_index(chunk: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((chunk / INDEX).read_text("utf-8"))
    return index


def _name(key: RowKey) -> str:
    return ".".join(map(str, key))


def _stored(states: Tensor) -> Tensor:
    # A copy: states are often rows of a larger tensor, which would be written whole.
    return states.to("cpu", torch.bfloat16, copy=True).contiguous()


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _remove(chunk: Path) -> None:
    """Renamed first: a chunk without its first files must never be taken for a whole one."""
    scratch = chunk.with_name(f".{chunk.name}.partial")
    chunk.rename(scratch)
    shutil.rmtree(scratch)
