"""Show a finished job: where its output is, a few completions, what it cost.

Usage: python -m adaflash_batch.report.show OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import polars as pl

NUM_SHOWN = 3
NUM_CHARACTERS = 300


def shorten(text: str, num_characters: int = NUM_CHARACTERS) -> str:
    """The text on one line, cut with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= num_characters else line[: num_characters - 1].rstrip() + "…"


def sample_rows(output: Path, prompt_column: str | None, prefix: str) -> list[tuple[str, str]]:
    """(prompt, completion) of a few rows, spread over the job."""
    if not any(output.glob("part-*.parquet")):  # an input without rows leaves none
        return []
    parts = pl.scan_parquet(output / "part-*.parquet")
    columns = parts.collect_schema().names()
    # Unless the job says, its prompts are in the column of that name, or else in the first.
    prompt_column = prompt_column or ("prompt" if "prompt" in columns else columns[0])
    rows = parts.select(prompt_column, f"{prefix}completion").drop_nulls().collect().rows()
    every = max(len(rows) // NUM_SHOWN, 1)
    return [(str(prompt), completion) for prompt, completion in rows[::every][:NUM_SHOWN]]


def describe_summary(summary: dict[str, Any]) -> str:
    """One line of what the job did, of the keys that are there."""
    labels = [
        ("rows", "{} rows"),
        ("errors", "{} with errors"),
        ("output_tokens", "{} tokens"),
        ("elapsed_s", "{:.1f} s"),
        ("tokens_per_s", "{:.0f} tokens/s"),
        ("emitted_per_step", "τ {:.2f} tokens a step"),
    ]
    return ", ".join(
        form.format(summary[key]) for key, form in labels if summary.get(key) is not None
    )


def show(output: Path) -> list[str]:
    """The lines to print about a finished job."""
    about = output / "_adaflash"
    summary = json.loads((about / "summary.json").read_text(encoding="utf-8"))
    job = json.loads((about / "job.json").read_text(encoding="utf-8"))
    # The resolved job stands either alone or beside its fingerprint.
    spec = job.get("spec", job)
    prompt_column = spec["input"]["prompt_column"] or spec["input"]["messages_column"]
    lines = []
    for prompt, completion in sample_rows(output, prompt_column, spec["output"]["prefix"]):
        lines += [f"prompt      {shorten(prompt)}", f"completion  {shorten(completion)}", ""]
    return ["", *lines, f"output      {output}/part-*.parquet", describe_summary(summary)]


if __name__ == "__main__":
    print("\n".join(show(Path(sys.argv[1]))))
