"""The path of a device under everything at once: texts are those of plain decoding on the host."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from knowing import ENDS, MEMBERS, Knowing, count_calls, run
from replaying import Capturers
from test_device_passes import GREEDY, MIXED, WatchesFor
from test_speculation import Machine, known_cost
from tiny import as_requests, decode, random_prompts, texts, tiny_model

from adaflash_batch.engine import placing
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Request, Sampling

POLICIES = [
    Policy(),
    Policy("survival"),
    Policy("survival", only_if_it_pays=True),
    Policy("fixed", only_if_it_pays=True),
]


@pytest.fixture(scope="module")
def on_device() -> Target:
    return Target.of(tiny_model("llama"), "tiny llama on a device", kernels="torch")


def some_prompts(dice: random.Random) -> list[list[int]]:
    """Some of which begin alike."""
    prompts = random_prompts(dice.randint(4, 8), dice.randrange(99), dice.choice([10, 40, 90]))
    head = [dice.randrange(3, 96) for _ in range(dice.choice([PAGE, 70]))]
    return [(head + each)[:120] if dice.random() < 0.5 else each for each in prompts]


def some_sampling(dice: random.Random) -> Sampling:
    return dataclasses.replace(
        dice.choice([*MIXED, GREEDY, GREEDY]),
        max_new_tokens=dice.randint(6, 50),
        stop_token_ids=tuple(dice.sample(range(3, 96), dice.choice([0, 0, 1, 20]))),
    )


def some_options(dice: random.Random, target: Target, longest: int) -> dict[str, Any]:
    """Memory that the longest request just fits among them."""
    policy, needed = dice.choice(POLICIES), -(-(longest + 9) // PAGE)
    options: dict[str, Any] = {
        "policy": policy,
        "max_running": dice.randint(2, 6),
        "token_budget": dice.choice([8, 48, 256]),
        "share_prefixes": dice.random() < 0.6,
        "kv_tokens": PAGE * dice.choice([128, needed + dice.randint(0, 3)]),
        "adopts_at": tuple(step for step in range(60) if dice.random() < dice.choice([0, 0.3])),
        "lookup": Lookup(max_tokens=1000) if dice.random() < 0.3 else None,
    }
    if policy.only_if_it_pays:
        options |= {"cost": known_cost(), "clock": Machine(target)}
    return options


@pytest.mark.parametrize("seed", range(8))
def test_no_mix_changes_a_text(
    llama: Target, on_device: Target, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(placing, "device_capturer", Capturers())
    calls = count_calls(monkeypatch)
    dice = random.Random(seed)
    prompts = some_prompts(dice)
    samplings = [some_sampling(dice) for _ in prompts]
    stops = [dice.randrange(3, 96) if dice.random() < 0.3 else None for _ in prompts]

    def requests() -> list[Request]:
        """Watches have to begin anew."""
        return [
            each if stop is None else dataclasses.replace(each, stop_watch=WatchesFor(stop))
            for each, stop in zip(as_requests(prompts, samplings), stops, strict=True)
        ]

    plain = texts(decode(llama, requests(), ends=ENDS, share_prefixes=False))
    Knowing(requests(), plain).put_in_place(monkeypatch)
    pairs = zip(prompts, samplings, strict=True)
    longest = max(len(prompt) + sampling.max_new_tokens for prompt, sampling in pairs)
    member = MEMBERS[dice.choice(list(MEMBERS))]
    _, done = run(on_device, requests(), member, **some_options(dice, on_device, longest))
    assert texts(done) == plain
    assert calls.ahead > 0
    assert all(c.counts.accepted <= c.counts.verified <= c.counts.drafted for c in done.values())
