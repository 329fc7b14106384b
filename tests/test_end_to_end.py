"""The installed command on the demo model: what a person types, and what lies there afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from adaflash_batch import models
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import initialise

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.parquet"
COMMAND = Path(sys.executable).with_name("adaflash-batch")
NUM_ROWS = 12
NEW = 12
GREEDY = ("--temperature", "0", "--max-new-tokens", str(NEW))


@pytest.fixture(scope="module")
def demo() -> Path:
    return models.locate(models.DEFAULT_MODEL, notify=print)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Path:
    """A directory with `prompts.parquet`, and the output of a job on it."""
    folder = tmp_path_factory.mktemp("a place ż")
    pl.read_parquet(PROMPTS).head(NUM_ROWS).write_parquet(folder / "prompts.parquet")
    return folder


def adaflash_batch(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), "run", *arguments],
        cwd=place,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def plain(place: Path) -> subprocess.CompletedProcess[str]:
    """One file, no name for model or output; in float32, so that texts can be compared."""
    arguments = ("prompts.parquet", *GREEDY, "--dtype", "float32", "--chunk-rows", "5")
    return adaflash_batch(place, *arguments)


def read(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "part-*.parquet")


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line on stdout; there is no other."""
    (line,) = done.stdout.splitlines()
    summary: dict[str, Any] = json.loads(line)
    return summary


def test_prompts_become_completions(place: Path, plain: subprocess.CompletedProcess[str]) -> None:
    assert plain.returncode == 0, plain.stderr
    summary = summary_of(plain)
    out = place / "prompts-completions"
    assert summary["output"] == out.name
    assert (summary["rows"], summary["errors"], summary["parts_written"]) == (NUM_ROWS, 0, 3)
    frame = read(out)
    source = pl.read_parquet(place / "prompts.parquet")
    assert frame.select(source.columns).equals(source)
    usage = frame.unnest("usage")
    assert usage["completion_tokens"].sum() == summary["output_tokens"] > 0
    assert usage["prompt_tokens"].sum() == summary["prompt_tokens"] > 10 * NUM_ROWS
    assert frame["error"].null_count() == NUM_ROWS
    assert set(frame["finish_reason"]) <= {"length", "stop"}
    assert frame["completion"].str.len_chars().min() > 0  # type: ignore[operator]
    timing = frame.unnest("timing")
    assert (timing["prefill_s"] > 0).all()


def test_stderr_says_what_is_done_in_plain_lines(plain: subprocess.CompletedProcess[str]) -> None:
    lines = plain.stderr.splitlines()
    assert f"loading {models.DEFAULT_MODEL}" in lines
    assert f"{NUM_ROWS} rows in 1 file, prompts from column 'prompt'" in lines
    assert any(line.startswith(f"{NUM_ROWS} rows in ") and "tok/s" in line for line in lines)
    assert lines[-1] == "output in prompts-completions"
    assert "it/s" not in plain.stderr, "a progress bar that is not ours"
    assert "Warning" not in plain.stderr


def test_the_job_and_its_summary_are_kept(
    place: Path, plain: subprocess.CompletedProcess[str]
) -> None:
    folder = place / "prompts-completions" / "_adaflash"
    job = json.loads((folder / "job.json").read_text())
    assert job["spec"]["sampling"]["max_new_tokens"] == NEW
    assert job["spec"]["model"] == {
        "name": models.DEFAULT_MODEL,
        "revision": None,
        "dtype": "float32",
        "trust_remote_code": False,
    }
    assert len(job["fingerprint"]) == 64
    assert json.loads((folder / "summary.json").read_text())["rows"] == NUM_ROWS


def test_greedy_text_is_that_of_transformers(
    place: Path, demo: Path, plain: subprocess.CompletedProcess[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    for row in read(place / "prompts-completions").head(3).to_dicts():
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert row["completion"] == text


def test_the_same_command_again_does_nothing(
    place: Path, plain: subprocess.CompletedProcess[str]
) -> None:
    out = place / "prompts-completions"
    before = {part.name: part.stat().st_mtime_ns for part in out.glob("*.parquet")}
    again = adaflash_batch(place, *plain.args[2:])
    assert again.returncode == 0
    assert {part.name: part.stat().st_mtime_ns for part in out.glob("*.parquet")} == before
    assert summary_of(again)["resumed_rows"] == NUM_ROWS
    assert "nothing to do" in again.stderr
    assert "loading" not in again.stderr


def test_a_killed_run_goes_on_and_can_be_verified(
    place: Path, plain: subprocess.CompletedProcess[str]
) -> None:
    command = [str(COMMAND), "run", *plain.args[2:], "--out", "killed", "--concurrency", "2"]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    journals = place / "killed" / "_adaflash" / "journal"
    with subprocess.Popen(command, cwd=place, env=env, stderr=subprocess.DEVNULL) as process:
        # Its head and three rows.
        while not any(path.read_bytes().count(b"\n") > 3 for path in journals.glob("0*.jsonl")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    again = adaflash_batch(place, *plain.args[2:], "--out", "killed")
    assert again.returncode == 0, again.stderr
    assert 3 <= summary_of(again)["resumed_rows"] < NUM_ROWS
    frame, expected = read(place / "killed"), read(place / "prompts-completions")
    assert frame["completion"].equals(expected["completion"])
    verify = [str(COMMAND), "verify", "killed", "--audit", "2"]
    done = subprocess.run(verify, cwd=place, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 are the same, 0 differ by near-ties, 0 differ" in done.stdout


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Path:
    """A random drafter that fits the demo model."""
    config = json.loads((demo / "config.json").read_text())
    shape = DrafterConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        vocab_size=config["vocab_size"],
        block_size=4,
        mask_token_id=0,
        target_layer_ids=(1, 14, 28),
        num_target_layers=config["num_hidden_layers"],
    )
    folder = tmp_path_factory.mktemp("drafters") / "random"
    checkpoint.save(initialise(shape, torch.Generator().manual_seed(0)), folder)
    return folder


def test_a_drafter_changes_no_text(
    place: Path, drafter: Path, plain: subprocess.CompletedProcess[str]
) -> None:
    # In every step and whole blocks, so that it does not depend on how long steps take.
    always = ("--speculate", "always", "--widths", "fixed", "--no-lookup", "--out", "drafted")
    done = adaflash_batch(place, *plain.args[2:], "--drafter", str(drafter), *always)
    assert done.returncode == 0, done.stderr
    assert f"drafter {drafter}" in done.stderr
    frame, expected = read(place / "drafted"), read(place / "prompts-completions")
    assert frame["completion"].equals(expected["completion"])
    spec = frame.unnest("spec")
    assert (spec["drafted"] > 0).all()
    assert set(spec["drafter_first"]) == set(spec["drafter_last"]) == {0}
    # A random drafter cannot be right often; what matters is that it was asked and checked.
    assert summary_of(done)["acceptance_rate"] < 0.2


def test_a_job_file_in_the_models_own_precision_with_a_bad_row(place: Path, demo: Path) -> None:
    frame = pl.DataFrame({"question": ["What is the capital of France?", None], "id": [1, 2]})
    frame.write_parquet(place / "questions.parquet")
    (place / "job.toml").write_text(
        '[input]\npaths = ["questions.parquet"]\nprompt_column = "question"\n'
        "[output]\ndirectory = 'never'\n[sampling]\ntemperature = 0.0\nmax_new_tokens = 99\n"
    )
    done = adaflash_batch(
        place,
        *("--config", "job.toml", "--set", f"sampling.max_new_tokens={NEW}"),
        *("--set", "output.directory=from set", "--model", str(demo)),
    )
    assert done.returncode == 3, done.stderr
    assert "(bfloat16 on cpu" in done.stderr
    assert not (place / "never").exists()
    rows = read(place / "from set").to_dicts()
    assert "Paris" in rows[0]["completion"]
    assert 0 < rows[0]["usage"]["completion_tokens"] <= NEW
    assert rows[1]["completion"] is None
    assert rows[1]["error"] == {"kind": "null_prompt", "message": "the prompt is null"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["prompts.parquet", "--set", "engine.concurency=2"], 2, "engine.concurency"),
        (["cut.parquet"], 5, "cut.parquet"),
        (["nowhere.parquet"], 5, "nowhere.parquet"),
        (["prompts.parquet", "--prompt-column", "absent"], 2, "absent"),
        (["prompts.parquet", "--out", "."], 2, "output directory"),
    ],
)
def test_mistakes_end_in_one_line_and_their_code(
    place: Path, arguments: Sequence[str], code: int, said: str
) -> None:
    whole = (place / "prompts.parquet").read_bytes()
    (place / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    done = adaflash_batch(place, *arguments)
    assert done.returncode == code
    assert json.loads(done.stdout)["exit_code"] == code
    assert done.stderr.startswith("error: ")
    assert said in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
