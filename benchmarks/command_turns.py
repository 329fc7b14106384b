"""The command itself, Parquet to Parquet, as one that takes turns with engines."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from turns import EngineDied, busy_s

_RUN = "from adaflash_batch.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Command:
    """`adaflash-batch run` with what does not change between turns.

    Attributes:
        drafter: None decodes with neither drafter nor lookup.
        log: takes what it prints for people.
    """

    model: Path
    drafter: Path | None
    threads: int
    log: Path

    def turn(self, texts: Sequence[str], concurrency: int, max_new_tokens: int) -> dict[str, Any]:
        """Run a job of these prompts. Raises EngineDied.

        Returns:
            `tokens`, `seconds` from the first request to the last row, `startup_s` the rest of the
            process's time, `peak_bytes`, `cores` and `others`.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pq.write_table(pa.table({"prompt": list(texts)}), folder / "in.parquet")
            arguments = ["run", str(folder / "in.parquet"), "--out", str(folder / "out")]
            arguments += ["--concurrency", str(concurrency), *self._settings(max_new_tokens)]
            return self._run(arguments)

    def _settings(self, max_new_tokens: int) -> list[str]:
        drafts = ["--no-lookup"] if self.drafter is None else ["--drafter", str(self.drafter)]
        return [
            *("--model", str(self.model), "--prompt-column", "prompt"),
            *("--threads", str(self.threads), "--temperature", "0", "--ignore-eos"),
            *("--max-new-tokens", str(max_new_tokens), *drafts),
        ]

    def _run(self, arguments: list[str]) -> dict[str, Any]:
        busy, used, began = busy_s(), _children_s(), time.perf_counter()
        with self.log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN, *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # as the engines: Linux shares cores out by session
            )
            assert process.stdout is not None
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
        wall, code = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
        process.returncode = code
        if code != 0:
            raise EngineDied(f"ended with exit code {code}, see {self.log}")
        summary = json.loads(output.splitlines()[-1])
        own = _children_s() - used
        return {
            "tokens": summary["output_tokens"],
            "seconds": summary["elapsed_s"],
            "startup_s": wall - summary["elapsed_s"],
            "peak_bytes": 1024 * usage.ru_maxrss,
            "tau": summary["emitted_per_step"],
            "learning_s": summary["learning_s"],
            "cores": own / wall,
            "others": max(busy_s() - busy - own, 0.0) / wall,
        }


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
