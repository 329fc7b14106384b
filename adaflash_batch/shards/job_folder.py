"""`_adaflash/` in the output directory: the resolved job, its fingerprint, its summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from adaflash_batch.durable import flush
from adaflash_batch.errors import AdaflashError, ConfigError
from adaflash_batch.shards.locations import is_local, list_directory, stat
from adaflash_batch.shards.recovery import differences, fingerprint
from adaflash_batch.shards.writer import PART_NAME

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
        self._path = f"{output}/{FOLDER}"

    def claim(self, text_facts: Mapping[str, object], spec: Mapping[str, object]) -> str:
        """Make the output directory this job's, or find that it is already; its fingerprint.

        Until the first part is there, it belongs to whoever comes last: a mistake that shows only
        once the model is loaded can be mended where it was made.

        Args:
            text_facts: everything that changes a text or its place, as JSON values.
            spec: the resolved job, for people.

        Raises:
            ConfigError: parts of another job are here; the message lists the differences.
        """
        before = self._read(JOB)
        if before is not None and self._has_parts():
            changed = differences(before.get("text_facts", {}), text_facts)
            if changed:
                lines = "\n  ".join(changed)
                raise ConfigError(
                    f"the output directory {self._output} holds another job's rows; "
                    f"it differs in\n  {lines}",
                    "run the job as it was begun, or name another directory with --out",
                )
        mark = fingerprint(text_facts)
        self._write(JOB, {"fingerprint": mark, "spec": spec, "text_facts": text_facts})
        return mark

    def has_summary(self) -> bool:
        """Whether an earlier run left its summary."""
        path = f"{self._path}/{SUMMARY}"
        return bool(stat(self._filesystem, path).type == fs.FileType.File)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Replace summary.json."""
        self._write(SUMMARY, summary)

    def _has_parts(self) -> bool:
        found = list_directory(self._filesystem, self._output)
        return any(PART_NAME.fullmatch(info.base_name) for info in found)

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
                Path(temporary).write_bytes(data)
                flush(temporary)
            else:
                with self._filesystem.open_output_stream(temporary) as stream:
                    stream.write(data)
            self._filesystem.move(temporary, path)
        except (OSError, pa.ArrowException) as error:
            raise AdaflashError(
                f"cannot write {path}: {error}", "parts that are committed are unharmed"
            ) from error
