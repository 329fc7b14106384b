"""Many tiny rows through a tiny model: does anything grow with the rows that are done?

Usage:
    python benchmarks/many_rows.py [--rows 200000] [--chunk-rows 1000] [--new 2] [--json FILE]

A random model of a few thousand weights is made on the spot, so that what is measured is everything
but the model. The command itself runs in a process of its own (one thread); what stands here only
times its commits and reads its memory twice a second. The figures are told by quarters of the rows:
where the last is like the second, nothing grows. Peak memory is that of the process; the first
quarter has the libraries coming in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_INTERVAL_S = 0.5
_BATCH = 10_000
_WORDS = (
    *("red", "blue", "small", "large", "old", "new", "round", "flat"),
    *("cat", "dog", "house", "tree", "river", "stone", "road", "cloud"),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """One chunk: when it was committed, after how many rows, and what that took."""

    at_s: float
    rows: int
    taken_s: float


@dataclass(frozen=True, slots=True)
class Quarter:
    """Figures of a quarter of the rows; seconds of a commit are its median and its worst."""

    rows: int
    peak_rss_mib: float
    rows_per_s: float
    commit_ms: float
    worst_commit_ms: float


def prompt(row: int) -> str:
    """A few words, different for rows that are near each other."""
    count = len(_WORDS)
    return f"the {_WORDS[row % count]} {_WORDS[row // count % count]} number {row}"


def write_prompts(path: Path, num_rows: int) -> None:
    """A Parquet file of them, in row groups."""
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, _BATCH):
            rows = range(start, min(start + _BATCH, num_rows))
            writer.write_table(pa.table([list(rows), list(map(prompt, rows))], schema=schema))


def measure(model: Path, folder: Path, num_rows: int, chunk_rows: int, new: int) -> list[Quarter]:
    """Run the command on `num_rows` rows in a folder of its own; see Quarter."""
    write_prompts(folder / "in.parquet", num_rows)
    log = folder / "commits.jsonl"
    arguments = [
        *("run", str(folder / "in.parquet"), "--model", str(model), "--out", str(folder / "out")),
        *("--chunk-rows", str(chunk_rows), "--max-new-tokens", str(new), "--threads", "1"),
        *("--dtype", "float32", "--kv-memory", "16MiB", "--no-chat-template", "--no-lookup"),
    ]
    command = [sys.executable, __file__, "--commits", str(log), *arguments]
    began = time.monotonic()
    with open(folder / "stderr.txt", "w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        memory = [
            (time.monotonic() - began, rss) for rss in _memory_of(process.pid) if _wait(process)
        ]
    if process.wait() != 0:
        raise SystemExit((folder / "stderr.txt").read_text())
    commits = [Commit(**json.loads(line)) for line in log.read_text().splitlines()]
    return quarters(commits, memory, began)


def _wait(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_INTERVAL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _memory_of(pid: int) -> Iterator[int]:
    """Resident bytes of a process whenever asked, until it is gone."""
    status = Path(f"/proc/{pid}/status")
    while True:
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except FileNotFoundError:
            return
        if "VmRSS" not in fields:
            return
        yield int(fields["VmRSS"].split()[0]) * 1024


def quarters(
    commits: Sequence[Commit], memory: Sequence[tuple[float, int]], began: float
) -> list[Quarter]:
    """The commits in four runs of the same number, and the memory while they were made."""
    found, start_s = [], commits[0].at_s - began
    for place in range(4):
        own = commits[len(commits) * place // 4 : len(commits) * (place + 1) // 4]
        end_s = own[-1].at_s - began
        rows = own[-1].rows - own[0].rows
        taken = sorted(commit.taken_s for commit in own)
        found.append(
            Quarter(
                rows=own[-1].rows,
                peak_rss_mib=max((m for t, m in memory if start_s <= t <= end_s), default=0)
                / 2**20,
                rows_per_s=rows / (own[-1].at_s - own[0].at_s),
                commit_ms=1000 * taken[len(taken) // 2],
                worst_commit_ms=1000 * taken[-1],
            )
        )
        start_s = end_s
    return found


def run_command(log: Path, arguments: Sequence[str]) -> None:
    """What the command does, with every commit noted in a file."""
    from adaflash_batch.cli import main
    from adaflash_batch.shards.output import Output

    commit, num_rows = Output.commit, 0
    with open(log, "w") as notes:

        def timed(self: Output, chunk: Any, *others: Any) -> None:
            nonlocal num_rows
            began = time.monotonic()
            commit(self, chunk, *others)
            num_rows += chunk.num_rows
            now = time.monotonic()
            notes.write(json.dumps({"at_s": now, "rows": num_rows, "taken_s": now - began}) + "\n")

        Output.commit = timed  # type: ignore[method-assign, assignment]
        try:
            main(arguments)
        finally:
            notes.flush()


def main_of_benchmark() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--chunk-rows", type=int, default=1000)
    parser.add_argument("--new", type=int, default=2, help="tokens generated for each row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from folders import tiny_model_folder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model_folder(folder / "model")
        began = time.monotonic()
        found = measure(model, folder, options.rows, options.chunk_rows, options.new)
        taken_s = time.monotonic() - began
    for quarter in found:
        print(
            f"up to row {quarter.rows:>7}: peak {quarter.peak_rss_mib:7.1f} MiB, "
            f"{quarter.rows_per_s:7.1f} rows/s, commit {quarter.commit_ms:6.2f} ms "
            f"(worst {quarter.worst_commit_ms:.1f})"
        )
    print(f"{options.rows} rows in {taken_s:.0f} s")
    if options.json is not None:
        settings = {"rows": options.rows, "chunk_rows": options.chunk_rows, "new": options.new}
        report = {**settings, "seconds": taken_s, "quarters": [asdict(q) for q in found]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--commits"]:
        run_command(Path(sys.argv[2]), sys.argv[3:])
    else:
        main_of_benchmark()
