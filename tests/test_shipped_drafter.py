"""The drafter that the demo runs with: as small, as documented and as good as it is said to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from adaflash_batch import model_files, models
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.vocabulary import load_vocabulary

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "data" / "drafters" / "smollm2-135m-instruct"
COMMAND = Path(sys.executable).with_name("adaflash-batch")
NUM_ROWS = 10
REPORTED = ("gsm8k", "humaneval", "mtbench", "ifeval", "gsm_symbolic")


def test_it_is_small_and_whole() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16 * 2**20
    view = checkpoint.inspect(FOLDER)
    tokens = load_vocabulary(FOLDER, view.config)
    assert tokens is not None
    assert len(tokens) < view.config.vocab_size


def test_its_card_says_where_it_comes_from() -> None:
    summary = checkpoint.inspect(FOLDER).own["summary"]
    assert summary["tokens"] >= 1_000_000
    assert summary["dropped_updates"] == 0
    card = (FOLDER / "README.md").read_text("utf-8")
    for said in ("adaflash-batch drafter train", str(summary["tokens"]), str(summary["updates"])):
        assert said in card
    for name in REPORTED:
        assert f"| {name} |" in card


def test_it_was_made_for_the_demo_model() -> None:
    own = checkpoint.inspect(FOLDER).own
    model = models.locate(models.DEFAULT_MODEL, notify=print)
    assert own["target"] == models.DEFAULT_MODEL
    assert own["tokenizer_sha256"] == model_files.tokenizer_digest(model)


def test_the_demo_runs_with_it() -> None:
    job = tomllib.loads((ROOT / "jobs" / "smoke.toml").read_text("utf-8"))
    assert ROOT / job["speculation"]["drafter"] == FOLDER
    assert "--config jobs/smoke.toml" in (ROOT / "Makefile").read_text("utf-8")


def run(place: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [str(COMMAND), "run", "prompts.parquet", *arguments],
        cwd=place,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.parametrize("sampling", [("0",), ("0.7", "--top-p", "0.9")], ids=["greedy", "sampled"])
def test_it_changes_no_text_and_is_often_right(tmp_path: Path, sampling: tuple[str, ...]) -> None:
    frame = pl.read_parquet(ROOT / "data" / "prompts.parquet")
    frame.gather_every(len(frame) // NUM_ROWS).head(NUM_ROWS).write_parquet(
        tmp_path / "prompts.parquet"
    )
    common = ("--temperature", *sampling, "--max-new-tokens", "32", "--dtype", "float32")
    run(tmp_path, *common, "--out", "plain")
    summary = run(tmp_path, *common, "--out", "drafted", "--drafter", str(FOLDER))
    plain, drafted = (
        pl.scan_parquet(tmp_path / name / "part-*.parquet").collect()
        for name in ("plain", "drafted")
    )
    assert drafted["completion"].equals(plain["completion"])
    # Of a drafter read in a wrong way, or trained on something else, next to nothing is accepted.
    assert summary["emitted_per_drafting_step"] > (1.5 if sampling == ("0",) else 1.3)
