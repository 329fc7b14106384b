"""Show a finished job: where its output is, a few completions, what it cost.

Usage: python -m adaflash_batch.report.show OUT [PLAIN]

PLAIN is the output of the same job without drafts: what speculation gained is shown, too.
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
    parts = _parts(output)
    if parts is None:
        return []
    columns = parts.collect_schema().names()
    # Unless the job says, its prompts are in the column of that name, or else in the first.
    prompt_column = prompt_column or ("prompt" if "prompt" in columns else columns[0])
    rows = parts.select(prompt_column, f"{prefix}completion").drop_nulls().collect().rows()
    every = max(len(rows) // NUM_SHOWN, 1)
    return [(str(prompt), completion) for prompt, completion in rows[::every][:NUM_SHOWN]]


def _parts(output: Path) -> pl.LazyFrame | None:
    if not any(output.glob("part-*.parquet")):  # an input without rows leaves none
        return None
    return pl.scan_parquet(output / "part-*.parquet")


def describe_summary(summary: dict[str, Any]) -> str:
    """One line of what the job did, of the keys that are there."""
    labels = [
        ("rows", "{} rows"),
        ("errors", "{} with errors"),
        ("output_tokens", "{} tokens"),
        ("elapsed_s", "{:.1f} s"),
        ("tokens_per_s", "{:.0f} tokens/s"),
        ("emitted_per_drafting_step", "τ {:.2f} tokens a step with drafts"),
    ]
    return ", ".join(
        form.format(summary[key]) for key, form in labels if summary.get(key) is not None
    )


def describe_gain(output: Path, plain: Path, prefix: str) -> str:
    """One line of what a job gained over the same one without a drafter."""
    ours, theirs = (_read(folder, "summary")["tokens_per_s"] for folder in (output, plain))
    parts, plain_parts = _parts(output), _parts(plain)
    if ours is None or theirs is None or parts is None or plain_parts is None:
        return "speed-up    not measured: a job decoded nothing"
    column = f"{prefix}completion"
    left, right = (each.select(column).collect()[column] for each in (parts, plain_parts))
    num_same = left.eq_missing(right).sum()
    return (
        f"speed-up    {ours / theirs:.2f} over the same engine without drafts "
        f"({theirs:.1f} to {ours:.1f} tokens/s), {num_same} of {len(left)} texts the same"
    )


def show(output: Path, plain: Path | None = None) -> list[str]:
    """The lines to print about a finished job.

    Args:
        output: its folder.
        plain: the folder of the same job without a drafter.
    """
    summary, job = _read(output, "summary"), _read(output, "job")
    # The resolved job stands either alone or beside its fingerprint.
    spec = job.get("spec", job)
    prompt_column = spec["input"]["prompt_column"] or spec["input"]["messages_column"]
    lines = []
    for prompt, completion in sample_rows(output, prompt_column, spec["output"]["prefix"]):
        lines += [f"prompt      {shorten(prompt)}", f"completion  {shorten(completion)}", ""]
    lines = ["", *lines, f"output      {output}/part-*.parquet", describe_summary(summary)]
    if plain is not None:
        lines.append(describe_gain(output, plain, spec["output"]["prefix"]))
    return lines


def _read(output: Path, name: str) -> dict[str, Any]:
    path = output / "_adaflash" / f"{name}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    print("\n".join(show(*map(Path, sys.argv[1:]))))
