"""Fixtures that several files share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from reviewed_jobs import Job, copied, make_job
from tiny import tiny_model

from adaflash_batch.engine.target import Target

# Kernels are interpreted on CPUs; for tests on a GPU it is set to 0. Triton looks at it while it is
# imported itself, so this comes first.
assert "triton" not in sys.modules
os.environ.setdefault("TRITON_INTERPRET", "1")

# No test fails for being slow: the machine may be busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For a hunt: pytest tests/test_fuzz_inputs.py --hypothesis-profile hunt --hypothesis-seed random
settings.register_profile(
    "hunt", settings.get_profile("patient"), max_examples=5000, phases=[Phase.generate]
)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def llama() -> Target:
    """A tiny Llama, ready to decode."""
    return Target.of(tiny_model("llama"), "tiny llama")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from a second thread, and lose a lot where cores are shared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The output of a job that came to its end, which nobody changes."""
    return make_job(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def job(tmp_path: Path, finished: Job) -> Job:
    """A copy of it, to do with as one likes."""
    return copied(finished, tmp_path)
