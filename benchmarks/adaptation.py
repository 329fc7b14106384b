"""A drafter that learns in a job against one that does not: the command line, all costs charged.

Usage: python benchmarks/adaptation.py shift|memory|scratch --prompts FILE.parquet --out DIR
           [--drafter DIR] [--rows N] [--shards N] [--aim pays|even|always]
           [--swap | --in-turn CORE | --beside CORE] [--json FILE] [-- OPTIONS OF run]

    shift    a job that learns, to the end that `--aim` says, and the same with `--adapt off`:
             time, τ, tokens/s by shard
    memory   the first half of the rows, then the second half as a job of its own, one drafter store
    scratch  a drafter that was never trained against decoding without one

The two jobs that are compared run at the same time, each with one thread on a core of its own, so
that whatever else the machine does falls on both; `--swap` does it again on each other's cores.
`--in-turn` runs them one after the other on one core, where the other core is not free. A part's
time is when its file was committed: loading, learning, publishing and writing are all in it. Of
jobs in turn the seconds of the processor are told, too. `--beside` (shift only) is for a machine
that has other work: the learning job has one core, and whenever it has done five shards the frozen
one does one of them beside it, as a job of its own, so that both meet the same other work. Compared
are seconds of the processor, those of loading counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.model import initialise
from adaflash_batch.drafter.vocabulary import VOCABULARY
from adaflash_batch.shards.footer import PartFooter

_ROOT = Path(__file__).parent.parent
_RUN = "from adaflash_batch.cli import main; main()"


@dataclass(frozen=True)
class Part:
    """One part of a job's output.

    Attributes:
        seconds: since the part before it, or since the job was started.
        tau: tokens that a request's step with drafts emitted; None where none drafted.
        drafting: share of the requests' steps that drafted.
    """

    tokens: int
    seconds: float
    tau: float | None
    drafting: float
    version: int | None


class Job:
    """One run of the command line, on one core."""

    def __init__(
        self, folder: Path, inputs: Sequence[Path], core: int, options: Sequence[str]
    ) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._log = folder.with_suffix(".log").open("w")
        command = ["taskset", "-c", str(core), sys.executable, "-c", _RUN, "run"]
        command += [*map(str, inputs), "--out", str(folder), "--threads", "1", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.began = time.time()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        self._out, self._ended, self.processor_s = "", self.began, 0.0
        # Its end is to be seen when it comes, whichever job is waited for.
        self._waiting = threading.Thread(target=self._wait)
        self._waiting.start()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        self._out = self._process.stdout.read()
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.processor_s = used.ru_utime + used.ru_stime
        self._ended = time.time()

    def finish(self) -> dict[str, Any]:
        """Wait for its end; what it took, its summary and its parts in the order of commit."""
        self._waiting.join()
        seconds = self._ended - self.began
        self._log.close()
        if self._process.returncode != 0:
            raise SystemExit(f"{self.folder} failed: see {self._log.name}")
        summary = json.loads(self._out.splitlines()[-1])
        parts = [asdict(part) for part in self._parts()]
        return {"seconds": round(seconds, 1), "summary": summary, "parts": parts}

    def _parts(self) -> list[Part]:
        parts, before = [], self.began
        for path in sorted(self.folder.glob("part-*.parquet"), key=lambda p: p.stat().st_mtime):
            footer = PartFooter.from_metadata(pq.read_metadata(path).metadata)
            assert footer is not None
            totals, now = footer.totals, path.stat().st_mtime
            tau, share = totals.counts.emitted_per_drafting_step, totals.counts.drafting
            parts.append(
                Part(
                    tokens=totals.completion_tokens,
                    seconds=round(now - before, 2),
                    tau=None if tau is None else round(tau, 4),
                    drafting=round(share / max(totals.counts.steps, 1), 4),
                    version=footer.drafter_version,
                )
            )
            before = now
        return parts

    @property
    def num_parts(self) -> int:
        """Committed."""
        return len(list(self.folder.glob("part-*.parquet")))

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return not self._waiting.is_alive()

    def texts(self) -> list[str]:
        """Completions in the order of the input."""
        paths = sorted(self.folder.glob("part-*.parquet"))
        return [t for p in paths for t in pq.read_table(p)["completion"].to_pylist()]


def split(prompts: Path, folder: Path, rows: int, shards: int) -> list[Path]:
    """The first rows in files of equal length, in their order."""
    table = pq.read_table(prompts).slice(0, rows)
    size, paths = -(-table.num_rows // shards), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        paths.append(folder / f"shard-{number:03}.parquet")
        pq.write_table(table.slice(number * size, size), paths[-1])
    return paths


def pair(
    out: Path, inputs: Sequence[Path], options: dict[str, list[str]], cores: Sequence[int]
) -> dict[str, Any]:
    """Two jobs, at the same time or on one core in turn; how many of their texts are the same."""
    jobs: dict[str, Job] = {}
    found: dict[str, Any] = {}
    for (name, given), core in zip(options.items(), cores, strict=True):
        jobs[name] = Job(out / name, inputs, core, given)
        if len(set(cores)) == 1:
            found[name] = jobs[name].finish()
            found[name]["processor_s"] = round(jobs[name].processor_s, 1)
    found = found or {name: job.finish() for name, job in jobs.items()}
    first, second = (job.texts() for job in jobs.values())
    same = sum(a == b for a, b in zip(first, second, strict=True))
    return {**found, "rows": len(first), "same_texts": same}


def beside(
    out: Path, inputs: Sequence[Path], options: dict[str, list[str]], core: int, every: int = 5
) -> dict[str, Any]:
    """A learning job, and the frozen one on every fifth shard beside it."""
    one = out / "one-row.parquet"
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pq.read_table(inputs[0]).slice(0, 1), one)
    loading = Job(out / "loading", [one], core, [*options["frozen"], "--max-new-tokens", "1"])
    loading.finish()
    learning, frozen = Job(out / "adapted", inputs, core, options["adapted"]), []
    in_the_middle = range(every // 2, len(inputs), every)
    for shard in in_the_middle:
        while learning.num_parts <= shard and not learning.is_over:
            time.sleep(1.0)
        frozen.append(Job(out / f"frozen-{shard:03}", [inputs[shard]], core, options["frozen"]))
    samples = [job.finish() for job in frozen]
    found = {
        "adapted": learning.finish(),
        "frozen": {"parts": [part for sample in samples for part in sample["parts"]]},
    }
    decoding = statistics.fmean(job.processor_s - loading.processor_s for job in frozen)
    found["adapted"]["processor_s"] = learning.processor_s
    found["frozen"]["processor_s"] = loading.processor_s + decoding * len(inputs)
    texts = learning.texts()
    size = -(-len(texts) // len(inputs))
    pairs = zip(in_the_middle, frozen, strict=True)
    same = [
        one == other
        for shard, job in pairs
        for one, other in zip(texts[shard * size : (shard + 1) * size], job.texts(), strict=True)
    ]
    return {**found, "rows": len(texts), "rows_of_both": len(same), "same_texts": sum(same)}


def shift(given: argparse.Namespace, inputs: list[Path], cores: Sequence[int]) -> dict[str, Any]:
    """Learning against not learning."""
    common = ["--drafter", str(given.drafter), *given.options]
    options = {"adapted": [*common, "--adapt", given.aim], "frozen": [*common, "--adapt", "off"]}
    if given.beside is None:
        found = pair(given.out / f"shift-{cores[0]}", inputs, options, cores)
        measure = "seconds"
    else:
        found = beside(given.out / f"shift-{cores[0]}", inputs, options, given.beside)
        measure = "processor_s"
    found["time_ratio"] = found["adapted"][measure] / found["frozen"][measure]
    found["tau_ratio_last_quarter"] = _last_quarter(found["adapted"]) / _last_quarter(
        found["frozen"]
    )
    return found


def _last_quarter(job: dict[str, Any]) -> float:
    taus = [part["tau"] for part in job["parts"] if part["tau"] is not None]
    return statistics.fmean(taus[len(taus) * 3 // 4 :])


def memory(given: argparse.Namespace, inputs: list[Path], cores: Sequence[int]) -> dict[str, Any]:
    """Two jobs of one domain, one after the other, with one store."""
    out, half = given.out / f"memory-{cores[0]}", len(inputs) // 2
    common = ["--drafter-store", str(out / "store"), "--drafter", str(given.drafter)]
    common += [*given.options, "--adapt", "always"]
    halves = {"first": inputs[:half], "second": inputs[half:]}
    return {
        name: Job(out / name, shards, cores[0], common).finish() for name, shards in halves.items()
    }


def scratch(given: argparse.Namespace, inputs: list[Path], cores: Sequence[int]) -> dict[str, Any]:
    """A drafter of random weights against none."""
    folder = given.out / "random"
    if not folder.exists():
        config = checkpoint.inspect(given.drafter).config
        net = initialise(config, torch.Generator().manual_seed(0)).bfloat16()
        own = {"adaflash": dict(checkpoint.inspect(given.drafter).own)}
        words = (given.drafter / VOCABULARY).read_bytes()
        checkpoint.save(net, folder, own, {VOCABULARY: words})
    options = {
        "random": ["--drafter", str(folder), *given.options],
        "plain": ["--drafter", "none", *given.options],
    }
    found = pair(given.out / f"scratch-{cores[0]}", inputs, options, cores)
    found["time_ratio"] = found["random"]["seconds"] / found["plain"]["seconds"]
    return found


def main() -> None:
    """Read the command line, run, say and keep what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", choices=["shift", "memory", "scratch"])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the jobs' outputs")
    default = _ROOT / "data" / "drafters" / "smollm2-135m-instruct"
    parser.add_argument("--drafter", type=Path, default=default)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--aim", choices=["pays", "even", "always"], default="pays")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--swap", action="store_true")
    order.add_argument("--in-turn", type=int, metavar="CORE")
    order.add_argument("--beside", type=int, metavar="CORE")
    parser.add_argument("--json", type=Path)
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:place])
    given.options = words[place + 1 :]
    if given.beside is not None and given.study != "shift":
        parser.error("--beside is for shift")
    inputs = split(given.prompts, given.out / "shards", given.rows, given.shards)
    study = {"shift": shift, "memory": memory, "scratch": scratch}[given.study]
    alone = given.in_turn if given.in_turn is not None else given.beside
    orders = [(alone,) * 2] if alone is not None else [(0, 1)]
    turns = [study(given, inputs, cores) for cores in orders + [(1, 0)] * given.swap]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True
    ).stdout.strip()
    facts = {"command": sys.argv, "commit": commit, "machine": platform.processor() or "cpu"}
    result = {"study": given.study, **facts, "rows": given.rows, "turns": turns}
    print(json.dumps({key: result[key] for key in ("study", "rows")}))
    for turn in turns:
        print({key: value for key, value in turn.items() if not isinstance(value, dict)})
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
