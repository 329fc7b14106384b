"""A job's output directory as others find it. Nothing is written, nothing is held."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs
from pydantic import ValidationError

from adaflash_batch.errors import ConfigError, first_line
from adaflash_batch.job_place import Place
from adaflash_batch.shards.fresh import WHOLE, fresh_path
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.job_folder import FOLDER, JOB
from adaflash_batch.shards.locations import locate, stat
from adaflash_batch.shards.reader import num_chunks
from adaflash_batch.shards.writer import PART_NAME, list_parts
from adaflash_batch.spec import JobSpec

_OLD_HINT = "run the job again with this version of adaflash-batch: it fills in what is missing"


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file as job.json has it.

    Attributes:
        index, name: as of `Shard`.
        location: absolute path or URI.
        num_rows, digest: when the job began.
    """

    index: int
    name: str
    location: str
    num_rows: int
    digest: str

    def shard(self) -> Shard:
        """The file, there or not."""
        filesystem, path = locate(self.location)
        return Shard(self.index, self.name, path, filesystem)


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file that is named like a part.

    Attributes:
        shard, chunk: what its name says.
        size: bytes.
    """

    name: str
    path: str
    size: int
    shard: int
    chunk: int


class JobOutput:
    """What job.json says of a job, and where its files are.

    Args:
        directory: what to call it in messages.
        filesystem, path: where it is.

    Attributes:
        spec: the resolved job.
        fingerprint, text_facts: what the job is known by.
        inputs: its input files.
        created: when it began, ISO 8601; None where that is not told.

    Raises:
        ConfigError: there is no job, or its job.json cannot be used.
    """

    def __init__(self, directory: str, filesystem: Any, path: str) -> None:
        self.directory, self.filesystem, self.path = directory, filesystem, path
        self.folder = f"{path}/{FOLDER}"
        said = self._read_job()
        try:
            self.spec = JobSpec.model_validate(said["spec"])
            self.fingerprint = str(said["fingerprint"])
            self.text_facts: dict[str, Any] = dict(said["text_facts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.folder}/{JOB} was not written by this version of adaflash-batch: "
                f"{_reason(error)}",
                _OLD_HINT,
            ) from error
        self.inputs = self._read_inputs(said)
        self.created: str | None = said.get("created")

    @classmethod
    def open(cls, directory: str) -> JobOutput:
        """The output that a path or a URI names; raises as the class does."""
        return cls(directory, *locate(directory))

    @property
    def chunk_rows(self) -> int:
        """Input rows of a part."""
        return self.spec.output.chunk_rows

    @property
    def prefix(self) -> str:
        """Before the names of our columns."""
        return self.spec.output.prefix

    @property
    def num_rows(self) -> int:
        """Input rows of the whole job."""
        return sum(each.num_rows for each in self.inputs)

    def chunks(self, shard: int) -> int:
        """How many chunks an input file has."""
        return num_chunks(self.inputs[shard].num_rows, self.chunk_rows)

    def rows_of(self, shard: int, chunk: int) -> tuple[int, int]:
        """First row and number of rows of a chunk of an input file."""
        first = chunk * self.chunk_rows
        return first, min(self.chunk_rows, self.inputs[shard].num_rows - first)

    def part_files(self) -> list[PartFile]:
        """Files that are named like parts, in order of input file and chunk."""
        found = []
        for info in list_parts(self.filesystem, self.path):
            name = PART_NAME.fullmatch(info.base_name)
            assert name is not None
            size = int(info.size or 0)
            found.append(PartFile(info.base_name, info.path, size, int(name[1]), int(name[2])))
        return sorted(found, key=lambda part: (part.shard, part.chunk))

    @property
    def runs(self) -> Path:
        """Local folder of the reports and locks of its runs; there or not."""
        return self._place().runs

    @property
    def journals(self) -> Path:
        """Local folder of its journals; there or not."""
        return self._place().journals(self.path)

    def _place(self) -> Place:
        return Place(self.filesystem, self.path, self.spec.run.scratch)

    def fresh(self) -> JobOutput | None:
        """The output that `run --fresh` is making to take this one's place, if there is one."""
        path = fresh_path(self.path)
        if stat(self.filesystem, f"{path}/{FOLDER}/{JOB}").type != fs.FileType.File:
            return None
        return JobOutput(path, self.filesystem, path)

    @property
    def is_being_replaced(self) -> bool:
        """Whether a whole new output is taking this one's place, or a kill stopped it in that."""
        mark = f"{fresh_path(self.path)}/{WHOLE}"
        return bool(stat(self.filesystem, mark).type == fs.FileType.File)

    def _read_job(self) -> dict[str, Any]:
        path = f"{self.folder}/{JOB}"
        if stat(self.filesystem, path).type != fs.FileType.File:
            raise ConfigError(
                f"{self.directory} holds no job: {path} is not there",
                "name the directory that adaflash-batch run wrote to (--out)",
            )
        said = read_json(self.filesystem, path)
        if not isinstance(said, dict):
            raise ConfigError(f"{path} is damaged: it holds no JSON object")
        return said

    def _read_inputs(self, said: dict[str, Any]) -> list[InputFile]:
        try:
            return [
                InputFile(
                    int(each["index"]),
                    str(each["name"]),
                    str(each["location"]),
                    int(each["num_rows"]),
                    str(each["digest"]),
                )
                for each in said["inputs"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.folder}/{JOB} does not list the input files with their rows, so what is "
                "missing cannot be told",
                _OLD_HINT,
            ) from error


def read_json(filesystem: Any, path: str) -> Any:
    """The JSON in a file; ConfigError if it cannot be read or is none."""
    try:
        with filesystem.open_input_stream(path) as stream:
            return json.loads(stream.read())
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return first_line(error)
