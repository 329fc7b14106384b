"""A whole night: cron's wrapper, the series, the runner; then calls that find nothing new."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import parts, tiny_model_folder, write_rows
from scheduled import RECIPES, ROOT, Stage

JOBS = ROOT / "jobs"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a tiny model."""
    model = tiny_model_folder(tmp_path_factory.mktemp("model"))
    words = f"--model {model} --drafter none --dtype float32 --max-new-tokens 4 --threads 1"
    return words.split()


@pytest.fixture
def night(small: list[str]) -> list[str]:
    """The command of the crontab."""
    cron = [str(RECIPES / "cron" / "cron-run.sh"), "logs/nightly.log"]
    series = ["python", str(JOBS / "run_series.py"), str(JOBS / "nightly.toml")]
    folders = ["--out", "completions", "--each-folder", "prompts"]
    return [*cron, *series, *folders, "--", *small]


def write_prompts(folder: Path, rows: int) -> None:
    turns = [[{"role": "user", "content": f"say {row}"}] for row in range(rows)]
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    write_rows(folder / "a.parquet", {"messages": pa.array(turns, kind)})


def test_a_night_is_done_once_and_a_new_one_alone_is_done_next(
    tmp_path: Path, night: list[str]
) -> None:
    stage = Stage(tmp_path)
    write_prompts(tmp_path / "prompts" / "2026-11-29", 2)
    first = stage.run(night)
    assert (first.returncode, first.stdout) == (0, "")
    (part,) = parts(tmp_path / "completions" / "2026-11-29")
    assert pq.read_metadata(part).num_rows == 2 * 4  # four samples of each
    before = part.stat()

    again = stage.run(night)
    assert (again.returncode, again.stdout) == (0, "")
    assert part.stat() == before
    log = (tmp_path / "logs" / "nightly.log").read_text("utf-8")
    assert log.count("nothing to do") == 1

    write_prompts(tmp_path / "prompts" / "2026-11-30", 3)
    assert stage.run(night).returncode == 0
    assert part.stat() == before
    (new,) = parts(tmp_path / "completions" / "2026-11-30")
    assert pq.read_metadata(new).num_rows == 3 * 4
    lines = (tmp_path / "completions" / "series.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["summary"]["rows"] for line in lines] == [2, 3]


def test_the_tasks_of_a_slurm_array_share_a_job_out(tmp_path: Path, small: list[str]) -> None:
    write_prompts(tmp_path / "prompts", 5)
    script = [str(RECIPES / "slurm" / "array.sbatch"), "prompts", "--out", "out"]
    job = ["--config", str(JOBS / "nightly.toml"), "--chunk-rows", "2", *small]
    for task in ("1", "0"):
        names = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": "2"}
        done = Stage(tmp_path, names).run([*script, *job])
        assert done.returncode == 0, done.stderr
    rows = [pq.read_metadata(part).num_rows for part in parts(tmp_path / "out")]
    assert rows == [8, 8, 4]
