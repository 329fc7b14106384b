"""Every job file in jobs/ is one, and does what the recipes rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduled import ROOT

from adaflash_batch.spec import JobSpec

JOBS = sorted((ROOT / "jobs").glob("*.toml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_job_file_is_a_job(path: Path) -> None:
    spec = JobSpec.from_sources(path)
    assert spec.output.directory
    assert spec.sampling.max_new_tokens is not None


def test_there_is_a_job_to_try_one_for_every_night_and_one_to_sweep() -> None:
    assert [path.name for path in JOBS] == ["evaluation.toml", "nightly.toml", "smoke.toml"]


def test_what_a_night_learns_is_kept_outside_its_output() -> None:
    spec = JobSpec.from_sources(ROOT / "jobs" / "nightly.toml")
    store, output = Path(spec.speculation.drafter_store or ""), Path(spec.output.directory)
    assert spec.speculation.drafter_store
    assert not store.is_relative_to(output)
    assert spec.adapt.when == "even"
    assert spec.run.max_errors


def test_an_evaluation_can_be_repeated() -> None:
    spec = JobSpec.from_sources(ROOT / "jobs" / "evaluation.toml")
    assert spec.sampling.temperature == 0
    assert spec.sampling.seed is not None
    assert spec.adapt.when == "off"
