"""What is sampled follows the target's filtered distribution, and nothing but its own key."""

from __future__ import annotations

from collections import Counter

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import always_wrong, as_requests, decode, guessing, random_prompts, texts
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from adaflash_batch.engine.accept import accepted_length, emitted_tokens
from adaflash_batch.engine.sampling import (
    ChoiceBlock,
    TokenHistory,
    choose,
    reshape_logits,
)
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.sampling import sample, uniform
from adaflash_batch.request import Request, RowKey, Sampling

TINY = 12  # vocabulary of the distribution tests


def transformers_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The filtered distribution as transformers' own warpers make it."""
    warpers = LogitsProcessorList([logits_process.TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(logits_process.MinPLogitsWarper(sampling.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), logits.unsqueeze(0))
    return torch.softmax(scores[0].double(), -1)


SETTINGS = [
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.0),
    Sampling(temperature=1.5, top_k=4),
    Sampling(temperature=0.7, min_p=0.2),
    Sampling(temperature=1.2, top_k=9, top_p=0.7, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_empirical_distribution_is_the_targets(sampling: Sampling) -> None:
    logits = torch.randn(TINY, generator=torch.Generator().manual_seed(4))
    expected = transformers_probabilities(logits, sampling)
    num_draws = 20_000
    uniforms = [uniform(11, row, 0, 5) for row in range(num_draws)]
    drawn = Counter(sample(logits.expand(num_draws, -1), sampling, uniforms))
    kept = [token for token in range(TINY) if expected[token] > 0]
    assert set(drawn) <= set(kept)
    observed = [drawn[token] for token in kept]
    frequencies = [float(expected[token]) * num_draws for token in kept]
    assert scipy.stats.chisquare(observed, frequencies).pvalue > 1e-4


def test_speculation_keeps_the_distribution(llama: Target) -> None:
    """Through the whole decoder: the second token's distribution, with and without drafts."""
    sampling = [Sampling(max_new_tokens=3, temperature=3.0, top_k=6, seed=s) for s in range(1500)]
    requests = as_requests([[7, 8, 9]] * 1500, sampling)
    plain = texts(decode(llama, requests))
    drafted = decode(llama, requests, drafter=guessing(requests, plain, right=0.5))
    assert texts(drafted) == plain
    assert sum(c.counts.accepted for c in drafted.values()) > 0
    first = Counter(tokens[0] for tokens in plain.values())
    logits = _next_logits(llama, [7, 8, 9])
    expected = transformers_probabilities(logits, sampling[0])
    kept = [t for t in range(len(expected)) if expected[t] > 0]
    frequencies = [float(expected[t]) * 1500 for t in kept]
    assert scipy.stats.chisquare([first[t] for t in kept], frequencies).pvalue > 1e-4


def _next_logits(target: Target, ids: list[int]) -> torch.Tensor:
    from adaflash_batch.engine.packing import pack
    from adaflash_batch.kernels.paged_attention import PackedStep

    packed = pack([ids], [0], [1])
    table = packed.start.reshape(1, 1).copy()
    step = PackedStep(packed.start, packed.length, packed.context, table)
    tensors = (torch.from_numpy(packed.token_ids), torch.from_numpy(packed.positions))
    rows = torch.from_numpy(packed.rows)
    return target.forward(*tensors, step, target.new_kv(1), rows)[0].detach()


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.integers(0, 40),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    temperature=st.floats(0.05, 4.0),
    seed=st.integers(0, 99),
)
def test_filters_keep_what_transformers_keeps(
    top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    """Also past the first 256 candidates: 600 tokens, nearly flat at high temperatures."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(600, generator=torch.Generator().manual_seed(seed))
    expected = transformers_probabilities(logits, sampling)
    grid = [(i + 0.5) / 200 for i in range(200)]
    drawn = sample(logits.expand(200, -1), sampling, grid)
    cumulative = expected.cumsum(-1)
    for u, token in zip(grid, drawn, strict=True):
        # The token whose stretch of the CDF holds u; one whose border is at u may round over.
        assert cumulative[token] - expected[token] - 1e-5 <= u <= cumulative[token] + 1e-5


def test_ties_at_the_border_are_kept_whatever_their_order() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0, 0.0])
    sampling = Sampling(temperature=1.0, top_k=3)
    grid = [(i + 0.5) / 50 for i in range(50)]
    assert set(sample(logits.expand(50, -1), sampling, grid)) == {0, 1, 2, 3, 4}
    flat = torch.zeros(1000)
    assert len(set(sample(flat.expand(50, -1), Sampling(temperature=1.0, top_k=2), grid))) == 50


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_uniforms_are_inside_the_open_interval(seed: int, identity: int, position: int) -> None:
    assert 0.0 < uniform(seed, identity, 0, position) < 1.0


def test_uniforms_depend_on_every_part_of_the_key() -> None:
    base = (5, 77, 0, 12)
    values = {uniform(*base)}
    for index in range(4):
        for amount in (1, 2, 1 << 33):
            key = list(base)
            key[index] += amount
            values.add(uniform(*key))
    assert len(values) == 13
    draws = [
        uniform(seed, row, 1, at) for seed in range(5) for row in range(40) for at in range(50)
    ]
    assert scipy.stats.kstest(draws, "uniform").pvalue > 1e-3


def test_samples_of_one_row_differ_and_repeat(llama: Target) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=1.5, n=4, seed=3)
    requests = [Request(RowKey(0, 0, s), [4, 5, 6], sampling, identity=9) for s in range(4)]
    together = texts(decode(llama, requests))
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    backwards = texts(decode(llama, requests[::-1], max_running=2))
    assert backwards == together


def block_of(sampling: Sampling, history: TokenHistory, drafts: list[int]) -> ChoiceBlock:
    return ChoiceBlock(sampling, history, drafts, (1, 0), 10, frozenset([2]))


def test_penalties_follow_the_accepted_prefix_exactly() -> None:
    """Row i of a block equals what a step without drafts computes behind the same prefix."""
    sampling = Sampling(
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_new_tokens=4,
        logit_bias=((3, 2.0),),
    )
    drafts = [5, 5, 7]
    logits = torch.randn(4, TINY, generator=torch.Generator().manual_seed(0))
    history = TokenHistory(frozenset([1, 4]), Counter({6: 2}), 2)
    block = reshape_logits(logits, block_of(sampling, history, drafts))
    for row in range(4):
        longer = TokenHistory(history.prompt, Counter(history.generated), history.num_generated)
        longer.extend(drafts[:row])
        single = reshape_logits(logits[row : row + 1], block_of(sampling, longer, []))
        assert torch.equal(block[row], single[0])
    assert history.generated == Counter({6: 2}), "the history was written to"


def test_penalties_equal_transformers_and_the_openai_formula() -> None:
    logits = torch.randn(1, TINY, generator=torch.Generator().manual_seed(0))
    prompt, generated = [1, 4], [6, 6, 8]
    history = TokenHistory(frozenset(prompt), Counter(generated), 3)
    ours = reshape_logits(logits, block_of(Sampling(repetition_penalty=1.7), history, []))
    theirs = logits_process.RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([prompt + generated]), logits.clone()
    )
    assert torch.equal(ours, theirs)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    ours = reshape_logits(logits, block_of(sampling, history, []))
    expected = logits.clone()
    expected[0, 6] -= 0.5 + 2 * 0.25
    expected[0, 8] -= 0.5 + 0.25
    assert torch.equal(ours, expected)


def test_logits_are_never_written_to() -> None:
    logits = torch.randn(2, TINY)
    before = logits.clone()
    sampling = Sampling(temperature=0.5, top_p=0.5, repetition_penalty=2.0, min_new_tokens=3)
    choose(logits, [block_of(sampling, TokenHistory(frozenset([1]), Counter([2]), 1), [4])])
    assert torch.equal(logits, before)


def test_unsound_rows_are_told_apart() -> None:
    logits = torch.zeros(3, TINY)
    logits[1, 5] = float("nan")
    logits[2] = float("-inf")
    greedy = ChoiceBlock(Sampling(), None, [], (1, 0), 10)
    assert choose(logits, [greedy] * 3)[1] == [True, False, False]


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_acceptance_is_the_longest_common_prefix(drafts: list[int], choices: list[int]) -> None:
    choices = choices[: len(drafts) + 1]
    kept = accepted_length(drafts, choices)
    assert drafts[:kept] == choices[:kept]
    assert kept == len(drafts) or drafts[kept] != choices[kept]
    assert emitted_tokens(drafts, choices) == [*drafts[:kept], choices[kept]]


def test_penalised_text_is_the_same_with_a_wrong_drafter(llama: Target) -> None:
    sampling = Sampling(max_new_tokens=30, repetition_penalty=1.5, frequency_penalty=0.7)
    requests = as_requests(random_prompts(5), sampling)
    plain = texts(decode(llama, requests))
    assert texts(decode(llama, requests, drafter=always_wrong(requests, plain))) == plain
    without = texts(decode(llama, as_requests(random_prompts(5), Sampling(max_new_tokens=30))))
    assert without != plain, "the penalties change nothing: the test proves nothing"
