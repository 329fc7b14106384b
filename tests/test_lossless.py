"""Promise 1: text never depends on the drafter, the width, the concurrency or the neighbours."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny import (
    ARCHITECTURES,
    BLOCK,
    VOCABULARY,
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

from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.target import Target
from adaflash_batch.request import Request, RowKey, Sampling

TINY_KV = 160  # tokens: two or three of the longest requests
GREEDY = Sampling(max_new_tokens=24)
SAMPLED = Sampling(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=7)
PENALISED = Sampling(
    max_new_tokens=24,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    min_new_tokens=9,
    stop_token_ids=(5, 6, 7, 8, 9, 10, 11, 12),
    logit_bias=((20, 1.5), (21, -3.0)),
)
MIXED = [
    SAMPLED,
    GREEDY,
    Sampling(max_new_tokens=3, temperature=1.3, top_k=5),
    PENALISED,
    Sampling(max_new_tokens=17, temperature=0.6, min_p=0.1, repetition_penalty=1.2, seed=3),
    Sampling(max_new_tokens=30, temperature=1.0),
    Sampling(max_new_tokens=1),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_equals_generate(architecture: str) -> None:
    prompts = random_prompts(5, seed=3)
    model = tiny_model(architecture)
    expected = {RowKey(0, row, 0): _generate(model, ids) for row, ids in enumerate(prompts)}
    target = Target.of(tiny_model(architecture), architecture)
    requests = as_requests(prompts, GREEDY)
    ends = frozenset([2])
    for request in requests:
        assert texts(decode(target, [request], ends=ends)) == {request.key: expected[request.key]}
    assert texts(decode(target, requests, ends=ends, token_budget=16)) == expected
    drafter = guessing(requests, expected)
    target_again = Target.of(tiny_model(architecture), architecture)
    assert texts(decode(target_again, requests, ends=ends, drafter=drafter)) == expected


def _generate(model: Any, ids: list[int]) -> list[int]:
    inputs = torch.tensor([ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=GREEDY.max_new_tokens,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("kv_tokens", [16384, TINY_KV])
@pytest.mark.parametrize("concurrency", [1, 3, 8, 32])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "pen"])
def test_every_drafter_gives_the_same_text(
    llama: Target, sampling: Sampling, concurrency: int, kv_tokens: int
) -> None:
    requests = as_requests(random_prompts(12), sampling)
    plain = texts(decode(llama, requests, ends=frozenset([2])))
    options: dict[str, Any] = {"max_running": concurrency, "kv_tokens": kv_tokens}
    options |= {"ends": frozenset([2]), "token_budget": 64}
    assert texts(decode(llama, requests, **options)) == plain
    for make in (replaying, always_wrong, guessing):
        drafter = make(requests, plain)
        assert texts(decode(llama, requests, drafter=drafter, **options)) == plain
        assert drafter.num_calls > 0


@pytest.mark.parametrize("concurrency", [1, 4, 7])
def test_rows_with_different_sampling_keep_their_own(llama: Target, concurrency: int) -> None:
    requests = as_requests(random_prompts(len(MIXED), seed=5), MIXED)
    ends = frozenset([2])
    alone = {r.key: decode(llama, [r], ends=ends)[r.key].token_ids for r in requests}
    drafter = guessing(requests, alone)
    together = decode(llama, requests, drafter=drafter, ends=ends, max_running=concurrency)
    assert texts(together) == alone
    reversed_order = decode(llama, requests[::-1], ends=ends, max_running=concurrency)
    assert texts(reversed_order) == alone


def test_tiny_kv_memory_forces_preemption(llama: Target) -> None:
    from adaflash_batch.engine.decoder import Decoder

    decoder = Decoder(llama, kv_tokens=TINY_KV, max_running=8)
    requests = as_requests(random_prompts(8, longest=30), Sampling(max_new_tokens=60))
    for request in requests:
        decoder.add(request)
    done = []
    while decoder.has_work:
        done += decoder.step()
    assert decoder.num_preemptions > 0
    assert texts({c.key: c for c in done}) == texts(decode(llama, requests))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_perfect_drafter_reaches_its_full_width(llama: Target, sampling: Sampling) -> None:
    requests = as_requests(random_prompts(6), sampling)
    plain = texts(decode(llama, requests))
    done = decode(llama, requests, drafter=replaying(requests, plain))
    for completion in done.values():
        counts = completion.counts
        # One token comes from the prefill; the rest in full blocks, the last one cut by the limit.
        rest = sampling.max_new_tokens - 1
        assert counts.steps == -(-rest // BLOCK)
        assert counts.accepted == counts.verified == rest - counts.steps
        assert counts.accepted_hist[BLOCK - 1] >= counts.steps - 1
        assert counts.emitted_per_step == rest / counts.steps
        assert (counts.drafter_first, counts.drafter_last) == (3, 3)


def test_the_wrong_drafter_is_never_accepted(llama: Target) -> None:
    requests = as_requests(random_prompts(6), GREEDY)
    plain = texts(decode(llama, requests))
    done = decode(llama, requests, drafter=always_wrong(requests, plain))
    for completion in done.values():
        assert completion.counts.accepted == 0
        assert completion.counts.accepted_hist == [completion.counts.steps]
        assert completion.counts.acceptance_rate == 0.0


@pytest.mark.parametrize("length", range(1, 2 * BLOCK + 2))
def test_exactly_max_new_tokens(llama: Target, length: int) -> None:
    requests = as_requests(random_prompts(4), Sampling(max_new_tokens=length))
    plain = texts(decode(llama, requests))
    done = decode(llama, requests, drafter=replaying(requests, plain))
    assert texts(done) == plain
    assert {len(tokens) for tokens in plain.values()} == {length}
    assert {completion.finish_reason for completion in done.values()} == {"length"}


def test_an_end_inside_an_accepted_block_ends_the_text(llama: Target) -> None:
    requests = as_requests(random_prompts(6), GREEDY)
    plain = texts(decode(llama, requests))
    for at in range(1, 2 * BLOCK):
        ends = frozenset(tokens[at] for tokens in plain.values())
        done = decode(llama, requests, drafter=replaying(requests, plain), ends=ends)
        for key, completion in done.items():
            first = next(i for i, token in enumerate(plain[key]) if token in ends)
            assert completion.token_ids == plain[key][: first + 1]
            assert completion.finish_reason == "stop"
            # The first token comes from the prefill; every other one from a step.
            counts = completion.counts
            assert counts.accepted <= first
            assert counts.accepted + counts.steps >= first
            assert counts.accepted <= counts.verified <= counts.drafted


def test_an_end_token_in_the_prompt_ends_nothing(llama: Target) -> None:
    prompts = [[2, 5, 2, 2, 9], [2], [7, 2]]
    requests = as_requests(prompts, Sampling(max_new_tokens=5))
    free = texts(decode(llama, requests))
    ended = texts(decode(llama, requests, ends=frozenset([2])))
    for key, tokens in free.items():
        stop = tokens.index(2) + 1 if 2 in tokens else len(tokens)
        assert ended[key] == tokens[:stop]


@dataclass(slots=True)
class CountingWatch:
    """Says stop at the token of a given number, as a stop string that ends there would."""

    stop_at: int
    seen: list[int] = field(default_factory=list)

    def feed(self, token_id: int) -> bool:
        self.seen.append(token_id)
        return len(self.seen) == self.stop_at


@pytest.mark.parametrize("stop_at", range(1, 2 * BLOCK + 2))
def test_a_stop_string_at_every_offset_of_a_block(llama: Target, stop_at: int) -> None:
    plain = texts(decode(llama, as_requests(random_prompts(3), GREEDY)))
    watched = [
        dataclasses.replace(request, stop_watch=CountingWatch(stop_at))
        for request in as_requests(random_prompts(3), GREEDY)
    ]
    # Tiny memory as well: a preempted request must not show its tokens to the watch again.
    for kv_tokens in (16384, 96):
        for request in watched:
            assert isinstance(request.stop_watch, CountingWatch)
            request.stop_watch.seen.clear()
        done = decode(llama, watched, drafter=replaying(watched, plain), kv_tokens=kv_tokens)
        for request in watched:
            completion, watch = done[request.key], request.stop_watch
            assert isinstance(watch, CountingWatch)
            assert completion.token_ids == watch.seen == plain[request.key][:stop_at]
            assert completion.finish_reason == "stop"
            counts = completion.counts
            assert counts.accepted <= counts.verified
            # The first token comes from the prefill, as does one after each preemption.
            if kv_tokens == 16384:
                assert counts.accepted + counts.steps in (stop_at - 1, stop_at)


def test_a_real_token_equal_to_the_mask_id_is_kept(llama: Target) -> None:
    requests = as_requests(random_prompts(3), GREEDY)
    plain = texts(decode(llama, requests))
    # Every token of a text is the mask id of some drafter: a drafter that proposes it must have
    # it accepted where the target chooses it.
    for token in sorted(set(plain[requests[0].key])):
        drafter = ScriptedDrafter(lambda key, at, token=token: [token] * (BLOCK - 1))  # type: ignore[misc]
        assert texts(decode(llama, requests, drafter=drafter)) == plain


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16, 64])
def test_acceptance_is_flat_over_concurrency(llama: Target, concurrency: int) -> None:
    requests = as_requests(random_prompts(64), GREEDY)
    plain = texts(decode(llama, requests))
    whole = {r.key: [*r.token_ids, *plain[r.key], *([0] * BLOCK)] for r in requests}

    def two_right(key: RowKey, at: int) -> list[int]:
        first, second, third, fourth = whole[key][at + 1 : at + BLOCK]
        return [first, second, (third + 1) % VOCABULARY, fourth]

    drafter = ScriptedDrafter(two_right)
    done = decode(llama, requests, drafter=drafter, max_running=concurrency)
    assert {c.counts.accepted for c in done.values()} == {2 * 7 + 1}  # 23 tokens: 7 x 3 + 2


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_fixed_width_verifies_no_more(llama: Target, width: int) -> None:
    requests = as_requests(random_prompts(5), GREEDY)
    plain = texts(decode(llama, requests))
    done = decode(llama, requests, drafter=replaying(requests, plain), policy=Policy(most=width))
    assert texts(done) == plain
    for completion in done.values():
        counts = completion.counts
        assert counts.verified <= width * counts.steps
        assert counts.drafted >= counts.verified


def test_verification_is_ragged(llama: Target) -> None:
    """No padding to the widest row: the target sees exactly the tokens that were asked for."""
    settings = [Sampling(max_new_tokens=length) for length in (2, 3, 9, 20)]
    requests = as_requests(random_prompts(4), settings)
    plain = texts(decode(llama, requests))
    before = llama.num_forward_tokens
    done = decode(llama, requests, drafter=replaying(requests, plain))
    expected = sum(
        len(r.token_ids) + done[r.key].counts.steps + done[r.key].counts.verified for r in requests
    )
    assert llama.num_forward_tokens - before == expected


def test_a_request_that_can_never_fit_is_an_error_and_harms_nobody(llama: Target) -> None:
    short, long = [5, 6, 7], [5] * 200
    requests = as_requests([short, long, short], Sampling(max_new_tokens=10))
    done = decode(llama, requests, kv_tokens=96)
    assert done[RowKey(0, 1, 0)].error is not None
    assert done[RowKey(0, 1, 0)].error.kind == "kv_memory_too_small"  # type: ignore[union-attr]
    beyond = as_requests([short, [5] * 250, short], Sampling(max_new_tokens=10))
    done = decode(llama, beyond)
    assert done[RowKey(0, 1, 0)].error.kind == "prompt_too_long"  # type: ignore[union-attr]
    assert [len(done[RowKey(0, row, 0)].token_ids) for row in (0, 1, 2)] == [10, 0, 10]


def test_nan_logits_are_a_row_error() -> None:
    model = tiny_model("llama")
    target = Target.of(model, "poisoned")
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    # The output layer has weights of its own here, so only the row that holds token 50 breaks.
    requests = as_requests([[5, 6], [7, 50, 8], [9]], GREEDY)
    done = decode(target, requests)
    assert done[RowKey(0, 1, 0)].error.kind == "bad_logits"  # type: ignore[union-attr]
    clean = decode(Target.of(tiny_model("llama"), "clean"), [requests[0], requests[2]])
    for key, completion in clean.items():
        assert done[key].token_ids == completion.token_ids


def test_timings_and_counts_are_complete(llama: Target) -> None:
    ticks = iter(range(10**6))
    request = Request(RowKey(2, 3, 1), [4, 5, 6], Sampling(max_new_tokens=4), 9, None, 11)
    done = decode(llama, [request], clock=lambda: float(next(ticks)))[request.key]
    assert done.prompt_tokens == 3
    assert done.truncated_tokens == 11
    assert done.counts.steps == 3
    assert min(done.timing.queued_s, done.timing.prefill_s, done.timing.decode_s) > 0
