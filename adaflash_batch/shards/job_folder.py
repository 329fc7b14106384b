"""`_adaflash/` in the output directory: the resolved job, its fingerprint, its summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from adaflash_batch.durable import write_whole
from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.locations import has_rename, is_local, location, stat
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.recovery import differences, fingerprint
from adaflash_batch.shards.run_folder import utc_now
from adaflash_batch.shards.writer import list_parts, write_error

FOLDER = "_adaflash"
JOB = "job.json"
SUMMARY = "summary.json"


class JobFolder:
    """The folder of a job's own files, on any `pyarrow.fs` filesystem.

    Args:
        filesystem: of the output directory.
        output: the output directory's path there.
    """

    def __init__(self, filesystem: Any, output: str) -> None:
        self._filesystem = filesystem
        self._output = output
        self._name = location(filesystem, output)
        self._path = f"{output}/{FOLDER}"

    def claim(
        self,
        text_facts: Mapping[str, object],
        spec: Mapping[str, object],
        infos: Sequence[ShardInfo] = (),
        *,
        is_in_use: bool = False,
        is_fresh: bool = False,
    ) -> str:
        """Make the output directory this job's, or find that it is already; its fingerprint.

        Until the first row is there, it belongs to whoever comes last: a mistake that shows only
        once the model is loaded can be mended where it was made.

        Args:
            text_facts: everything that changes a text or its place, as JSON values.
            spec: the resolved job, for people.
            infos: its input files.
            is_in_use: a run is at work here, or left rows in journals.
            is_fresh: whether it was asked to do everything anew.

        Raises:
            ConfigError: rows of another job are here; the message lists the differences.
        """
        before = self._read(JOB)
        if before is not None and (is_in_use or self.has_parts()):
            changed = _changed(before, text_facts)
            if changed:
                lines = "\n  ".join(changed)
                raise ConfigError(
                    f"the output directory {self._name} holds another job's rows; "
                    f"it differs in\n  {lines}",
                    "run the job as it was begun, name another directory with --out, or replace "
                    "what is there with --fresh",
                )
        mark = fingerprint(text_facts)
        created = (before or {}).get("created") if is_same(before, mark) else None
        job = {
            "fingerprint": mark,
            "created": created or utc_now(),
            "fresh": is_fresh,
            "spec": spec,
            "text_facts": text_facts,
            "inputs": [_input(info) for info in infos],
        }
        self._write(JOB, job)
        return mark

    def goes_on_fresh(self, mark: str, num_chunks: int) -> bool:
        """Whether the job with a fingerprint was begun anew here and is not whole.

        Args:
            mark: the fingerprint.
            num_chunks: parts that it has when it is whole.
        """
        before = self._read(JOB)
        is_it = is_same(before, mark) and before is not None and bool(before.get("fresh"))
        return is_it and self._num_parts() < num_chunks

    def differences(self, text_facts: Mapping[str, object]) -> list[str]:
        """In what the job that the directory belongs to differs from another one, a line each.

        Raises ConfigError where its job.json cannot be read.
        """
        before = self._read(JOB)
        return [] if before is None else _changed(before, text_facts)

    def fingerprint(self) -> str | None:
        """Of the job that the directory belongs to; None if there is none."""
        before = self._read(JOB)
        return None if before is None else before.get("fingerprint")

    def has_summary(self, name: str = SUMMARY) -> bool:
        """Whether an earlier run left its summary."""
        path = f"{self._path}/{name}"
        return bool(stat(self._filesystem, path).type == fs.FileType.File)

    def write_summary(self, summary: Mapping[str, object], name: str = SUMMARY) -> None:
        """Replace summary.json, or that of a portion."""
        self._write(name, summary)

    def has_parts(self) -> bool:
        """Whether a chunk is committed here."""
        return self._num_parts() > 0

    def _num_parts(self) -> int:
        return len(list_parts(self._filesystem, self._output))

    def _read(self, name: str) -> dict[str, Any] | None:
        path = f"{self._path}/{name}"
        if stat(self._filesystem, path).type != fs.FileType.File:
            return None
        try:
            with self._filesystem.open_input_stream(path) as stream:
                value = json.loads(stream.read())
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", "name another directory with --out"
            ) from error
        return value if isinstance(value, dict) else None

    def _write(self, name: str, value: Mapping[str, object]) -> None:
        data = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
        path, temporary = f"{self._path}/{name}", f"{self._path}/.{name}.tmp"
        try:
            self._filesystem.create_dir(self._path, recursive=True)
            if is_local(self._filesystem):
                write_whole(Path(path), data)
                return
            target = temporary if has_rename(self._filesystem) else path
            with self._filesystem.open_output_stream(target) as stream:
                stream.write(data)
            if target != path:
                self._filesystem.move(temporary, path)
        except (OSError, pa.ArrowException) as error:
            raise write_error(path, error) from error


def _changed(job: Mapping[str, Any], text_facts: Mapping[str, object]) -> list[str]:
    return differences(job.get("text_facts", {}), text_facts)


def is_same(job: Mapping[str, Any] | None, mark: str) -> bool:
    """Whether a job.json is that of the job with a fingerprint."""
    return job is not None and job.get("fingerprint") == mark


def _input(info: ShardInfo) -> dict[str, object]:
    shard = info.shard
    return {
        "index": shard.index,
        "name": shard.name,
        "location": location(shard.filesystem, shard.path),
        "num_rows": info.num_rows,
        "digest": info.digest,
    }
