"""Fixtures that several files share."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from adaflash_batch.engine.target import Target


@pytest.fixture(scope="session")
def llama() -> Target:
    """A tiny Llama, ready to decode."""
    return Target.of(tiny_model("llama"), "tiny llama")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from a second thread, and lose a lot where cores are shared."""
    torch.set_num_threads(1)
