"""The view of a finished job."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from adaflash_batch.report.show import describe_summary, sample_rows, shorten, show
from adaflash_batch.spec import JobSpec


def finished_job(
    folder: Path,
    flags: dict[str, Any] | None = None,
    *,
    speed: float = 50.0,
    answer: str = "answer",
) -> Path:
    spec = JobSpec.from_sources(flags={"input.paths": ["x.parquet"], **(flags or {})})
    about = folder / "_adaflash"
    about.mkdir(parents=True)
    (about / "job.json").write_text(json.dumps(spec.to_json()))
    summary = {"rows": 8, "errors": 1, "output_tokens": 100, "tokens_per_s": speed}
    (about / "summary.json").write_text(json.dumps(summary))
    for part in range(2):
        numbers = range(4 * part, 4 * part + 4)
        table = pl.DataFrame(
            {
                "prompt": [f"question\n{number}" for number in numbers],
                "ours_completion": [
                    f"{answer if n else 'answer'} {n}" if n != 3 else None for n in numbers
                ],
            }
        )
        table.write_parquet(folder / f"part-00000-0000{part}.parquet")
    return folder


@pytest.mark.parametrize("named", [{}, {"input.prompt_column": "prompt"}])
def test_a_finished_job_is_shown(tmp_path: Path, named: dict[str, str]) -> None:
    lines = show(finished_job(tmp_path, {"output.prefix": "ours_", **named}))
    text = "\n".join(lines)
    assert [line for line in lines if line.startswith("completion")] == [
        "completion  answer 0",
        "completion  answer 2",
        "completion  answer 5",
    ]
    assert "prompt      question 0" in text
    assert f"output      {tmp_path}/part-*.parquet" in text
    assert text.endswith("8 rows, 1 with errors, 100 tokens, 50 tokens/s")


def test_the_gain_over_plain_decoding_is_shown(tmp_path: Path) -> None:
    ours = finished_job(tmp_path / "ours", {"output.prefix": "ours_"}, speed=75.0)
    plain = finished_job(tmp_path / "plain", {"output.prefix": "ours_"}, answer="reply")
    assert show(ours, plain)[-1] == (
        "speed-up    1.50 over the same engine without drafts (50.0 to 75.0 tokens/s), "
        "2 of 8 texts the same"  # the first, and the one that is an error in both
    )


def test_no_gain_is_told_where_nothing_was_decoded(tmp_path: Path) -> None:
    ours, plain = (
        finished_job(tmp_path / name, {"output.prefix": "ours_"}) for name in ("ours", "plain")
    )
    about = plain / "_adaflash" / "summary.json"
    about.write_text(json.dumps({"rows": 8, "tokens_per_s": None}))
    assert "not measured" in show(ours, plain)[-1]


def test_rows_with_errors_are_passed_over(tmp_path: Path) -> None:
    shown = sample_rows(finished_job(tmp_path), "prompt", "ours_")
    assert all(completion.startswith("answer") for _, completion in shown)


def test_what_was_not_measured_is_not_told() -> None:
    assert describe_summary({"rows": 1, "emitted_per_step": None}) == "1 rows"


def test_long_texts_are_cut() -> None:
    assert shorten("a  b\nc") == "a b c"
    assert shorten("word " * 100, 10) == "word word…"
    assert len(shorten("x" * 1000)) == 300
