"""The path of a device, on tensors of the CPU: the same texts as the path of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import random_drafter
from tiny import (
    as_requests,
    decode,
    guessing,
    random_prompts,
    texts,
    tiny_model,
)

from adaflash_batch.engine.target import Target
from adaflash_batch.request import Sampling

GREEDY = Sampling(max_new_tokens=12)
SAMPLED = Sampling(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=7)
PENALISED = Sampling(max_new_tokens=12, repetition_penalty=1.3, min_new_tokens=5)
MIXED = [GREEDY, SAMPLED, PENALISED, Sampling(max_new_tokens=3), SAMPLED, GREEDY]


@pytest.fixture(scope="module")
def on_device() -> Target:
    return Target.of(tiny_model("llama"), "tiny llama on a device", kernels="torch")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_device_writes_the_same_texts(
    llama: Target, on_device: Target, concurrency: int
) -> None:
    requests = as_requests(random_prompts(6, seed=5), MIXED)
    options: dict[str, Any] = {"ends": frozenset([2]), "max_running": concurrency}
    plain = texts(decode(llama, requests, **options))
    assert texts(decode(on_device, requests, **options)) == plain
    drafter = guessing(requests, plain)
    assert texts(decode(on_device, requests, drafter=drafter, **options)) == plain
    assert drafter.num_calls > 0
