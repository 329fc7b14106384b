"""Everything that is to be known of a GPU, in one run of at most eight minutes; downloads nothing.

Usage: python benchmarks/gpu.py [--out FILE] [--budget SECONDS] [--model DIR] [--device cpu --tiny]

Sections, each in a process of its own with a share of the time, so that the run always ends:

    tests      the losslessness tests on the device (pytest -m gpu)
    kernels    each kernel against its floor and against PyTorch
    demo       decoding with the demo model's shape and the shipped drafter
    qwen3-8b   decoding with random weights of Qwen3-8B's shape

A section writes after every figure, so what was measured before its time was up is kept. The last
line on stdout is the JSON, which is also in FILE. `--device cpu --tiny` runs all of it on a CPU
with tiny sizes and interpreted kernels: whether it runs, not how fast.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 450.0
"""Half a minute less than the eight minutes that a run may take."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run.

    share: of the whole time, at the most; what earlier sections leave is the later ones'.
    """

    name: str
    share: float


SECTIONS = (
    Section("tests", 0.3),
    Section("kernels", 0.25),
    Section("demo", 0.2),
    Section("qwen3-8b", 0.25),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a section is told."""

    device: str
    is_tiny: bool
    model: str | None

    @property
    def flags(self) -> list[str]:
        """As they are given to its process."""
        flags = ["--device", self.device]
        flags += ["--tiny"] if self.is_tiny else []
        return flags + (["--model", self.model] if self.model is not None else [])


def budgets(sections: Sequence[Section], left: float) -> list[float]:
    """Seconds that each of these may take of what is left, in order, if all take their share."""
    whole = sum(section.share for section in sections)
    return [left * section.share / whole for section in sections]


def run_section(section: Section, settings: Settings, seconds: float, folder: Path) -> Any:
    """Its figures and what became of it; never more than `seconds`."""
    out, began = folder / f"{section.name}.json", time.monotonic()
    command = [sys.executable, __file__, "--section", section.name, *settings.flags]
    command += ["--out", str(out), "--budget", f"{seconds * 0.9 - 2:.1f}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment["TRITON_INTERPRET"] = "1" if settings.device == "cpu" else "0"
    with (folder / f"{section.name}.log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            status = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = "out of time"
            os.killpg(process.pid, 9)
            process.wait()
        log.seek(0)
        tail = log.read().strip().splitlines()[-15:]
    figures = json.loads(out.read_text()) if out.exists() else {}
    result = {"status": status, "seconds": round(time.monotonic() - began, 1), "figures": figures}
    return result if status == "done" else result | {"log": tail}


def environment(device: str) -> dict[str, Any]:
    """What it ran on."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        facts |= {"device": found.name, "memory": found.total_memory, "sm": found.major * 10}
        facts["multiprocessors"] = found.multi_processor_count
    commit = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=False)
    return facts | {"commit": done.stdout.strip() or None}


def run_all(settings: Settings, budget: float, out: Path) -> dict[str, Any]:
    """All sections; the file is written after each."""
    began = time.monotonic()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result: dict[str, Any] = {"date": date, "budget_s": budget, "is_tiny": settings.is_tiny}
    result |= {"environment": environment(settings.device), "sections": {}}
    with tempfile.TemporaryDirectory() as folder:
        for index, section in enumerate(SECTIONS):
            left = budget - (time.monotonic() - began)
            seconds = budgets(SECTIONS[index:], max(left, 1.0))[0]
            print(f"{section.name}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
            result["sections"][section.name] = run_section(section, settings, seconds, Path(folder))
            result["seconds"] = round(time.monotonic() - began, 1)
            out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure(section: str, settings: Settings, budget: float, out: Path) -> int:
    """A section, in its own process; its exit code."""
    import gpu_decode
    import gpu_kernels
    from gpu_notes import Notes

    notes = Notes(out, budget)
    if section == "tests":
        return run_tests(notes, settings)
    if section == "kernels":
        gpu_kernels.run(notes, settings.device, is_tiny=settings.is_tiny)
    elif section == "demo":
        gpu_decode.run_demo(notes, settings.device, settings.model, is_tiny=settings.is_tiny)
    else:
        gpu_decode.run_large(notes, settings.device, is_tiny=settings.is_tiny)
    return 0


def run_tests(notes: Any, settings: Settings) -> int:
    """The tests that are marked gpu; on a CPU they are skipped and say why."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "-rs", "-p"]
    done = subprocess.run(
        [*command, "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    notes.put("summary", lines[-1:] or done.stderr.strip().splitlines()[-1:])
    if done.returncode != 0:
        notes.put("failures", lines[-60:])
    return done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--budget", type=float, default=BUDGET_S)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", help="folder of the demo model; random weights without it")
    parser.add_argument("--section", choices=[section.name for section in SECTIONS])
    options = parser.parse_args()
    settings = Settings(options.device, options.tiny, options.model)
    if options.section is not None:
        sys.exit(measure(options.section, settings, options.budget, options.out))
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit(f"error: PyTorch {torch.__version__} finds no GPU that it can use")
    result = run_all(settings, options.budget, options.out)
    print(json.dumps(result))
    statuses = [section["status"] for section in result["sections"].values()]
    sys.exit(any(status.startswith("failed") for status in statuses))


if __name__ == "__main__":
    main()
