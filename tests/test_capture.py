"""Captured states are those of a plain pass over the finished text, and cost no pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tiny import (
    ScriptedDrafter,
    always_wrong,
    as_requests,
    decode,
    guessing,
    random_prompts,
    replaying,
    texts,
    tiny_model,
)

from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import Trajectory
from adaflash_batch.request import Completion, Request, RowKey, Sampling

LAYERS = (0, 1)
GREEDY = Sampling(max_new_tokens=17)
DRAFTERS = {"none": None, "wrong": always_wrong, "guessing": guessing, "perfect": replaying}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "one at a time": {"max_running": 1},
    "pieces": {"token_budget": 7, "max_running": 3},
    "preemption": {"kv_tokens": 128, "max_running": 8},
}


def capturing(
    target: Target,
    requests: list[Request],
    drafter: ScriptedDrafter | None = None,
    *,
    layers: tuple[int, ...] = LAYERS,
    kv_tokens: int = 16384,
    ends: frozenset[int] = frozenset(),
    wanted: Callable[[], bool] = lambda: True,
    **options: Any,
) -> tuple[Decoder, dict[RowKey, Trajectory], dict[RowKey, Completion]]:
    build = None if drafter is None else lambda num_pages: drafter
    decoder = Decoder(target, drafter=build, kv_tokens=kv_tokens, end_token_ids=ends, **options)
    found: list[Trajectory] = []
    decoder.capture(layers, found.append, wanted)
    for request in requests:
        decoder.add(request)
    finished: list[Completion] = []
    while decoder.has_work:
        finished += decoder.step()
    assert len({t.key for t in found}) == len(found)
    return decoder, {t.key: t for t in found}, {c.key: c for c in finished}


@torch.no_grad()
def reference(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, last hidden states) of all positions, from one plain pass."""
    output = model(tokens.unsqueeze(0), output_hidden_states=True, use_cache=False)
    layers = [output.hidden_states[layer + 1][0] for layer in LAYERS]
    return torch.cat(layers, -1), output.hidden_states[-1][0]


def check(
    model: Any, found: Mapping[RowKey, Trajectory], done: Mapping[RowKey, Completion]
) -> None:
    assert found.keys() == {key for key, completion in done.items() if completion.error is None}
    for key, trajectory in found.items():
        length = len(trajectory.token_ids)
        tokens = trajectory.token_ids[trajectory.prompt_length :].tolist()
        assert tokens == done[key].token_ids
        features, hidden = reference(model, trajectory.token_ids)
        assert len(trajectory.features) in (length - 1, length)
        first = trajectory.first_hidden
        assert first == trajectory.prompt_length - 1
        assert trajectory.last_hidden is not None
        assert length - 1 <= first + len(trajectory.last_hidden) <= length
        assert_same(trajectory.features, features[: len(trajectory.features)])
        assert_same(trajectory.last_hidden, hidden[first : first + len(trajectory.last_hidden)])


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Up to rounding in float32, row by row; another position's row is about as large as it."""
    assert ours.shape == theirs.shape
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.max() < 1e-4


@pytest.mark.parametrize("drafting", DRAFTERS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_states_are_those_of_a_plain_pass(
    llama: Target, settings: dict[str, Any], drafting: str
) -> None:
    requests = as_requests(random_prompts(9), GREEDY)
    known = texts(decode(llama, requests))
    make = DRAFTERS[drafting]
    drafter = None if make is None else make(requests, known)
    decoder, found, done = capturing(llama, requests, drafter, **settings)
    assert (decoder.num_preemptions > 0) == ("kv_tokens" in settings)
    assert texts(done) == known
    check(tiny_model("llama"), found, done)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_only_what_is_wanted_is_recorded(llama: Target, settings: dict[str, Any]) -> None:
    """Rows that are and rows that are not, side by side in every step."""
    requests = as_requests(random_prompts(9), GREEDY)
    known, turns = texts(decode(llama, requests)), itertools.cycle((True, False, False))
    drafter = guessing(requests, known)
    _, found, done = capturing(llama, requests, drafter, wanted=lambda: next(turns), **settings)
    assert texts(done) == known
    assert [key.row for key in sorted(found)] == [0, 3, 6]
    check(tiny_model("llama"), found, {key: done[key] for key in found})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_that_end_by_themselves(llama: Target, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=30, temperature=temperature, seed=3)
    requests = as_requests(random_prompts(12), sampling)
    ends = frozenset(range(2, 12))
    known = texts(decode(llama, requests, ends=ends))
    assert len({len(text) for text in known.values()}) > 3
    drafter = replaying(requests, known)
    _, found, done = capturing(llama, requests, drafter, ends=ends)
    assert texts(done) == known
    check(tiny_model("llama"), found, done)
    lengths = {len(t.token_ids) - len(t.features) for t in found.values()}
    assert lengths == {0, 1}, "ends on an accepted draft and on a bonus token belong to this test"


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3", "qwen3"])
def test_other_architectures(architecture: str) -> None:
    target = Target.of(tiny_model(architecture), architecture)
    requests = as_requests(random_prompts(4), GREEDY)
    drafter = guessing(requests, texts(decode(target, requests)))
    _, found, done = capturing(target, requests, drafter, token_budget=24)
    check(tiny_model(architecture), found, done)


def test_capture_costs_no_target_pass(llama: Target) -> None:
    requests = as_requests(random_prompts(6), GREEDY)

    def tokens_forwarded(run: Any) -> int:
        before = llama.num_forward_tokens
        run(llama, requests)
        return llama.num_forward_tokens - before

    assert tokens_forwarded(capturing) == tokens_forwarded(decode) > 0


def test_requests_that_fail_leave_nothing(llama: Target) -> None:
    prompts = [[5, 6], [7] * 300, [8, 9]]
    _, found, done = capturing(llama, as_requests(prompts, GREEDY))
    assert sorted(key.row for key in found) == [0, 2]
    check(tiny_model("llama"), found, done)


def test_states_serve_a_trainer(llama: Target) -> None:
    """Tensors made in inference mode could not be saved for a backward pass."""
    _, found, _ = capturing(llama, as_requests([[5, 6]], GREEDY))
    (trajectory,) = found.values()
    assert trajectory.last_hidden is not None
    weight = torch.zeros(3, trajectory.features.shape[1], requires_grad=True)
    hidden = torch.zeros(3, trajectory.last_hidden.shape[1], requires_grad=True)
    loss = (trajectory.features @ weight.T).sum() + (trajectory.last_hidden @ hidden.T).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


def test_a_trajectory_holds_no_more_memory_than_it_says(llama: Target) -> None:
    """A text that ends early must not keep what was set aside for the longest one."""
    requests = as_requests(random_prompts(6), Sampling(max_new_tokens=60))
    _, found, done = capturing(llama, requests, ends=frozenset(range(2, 40)))
    assert min(len(completion.token_ids) for completion in done.values()) < 30
    for each in found.values():
        assert each.last_hidden is not None
        for tensor in (each.token_ids, each.features, each.last_hidden):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
