"""Drafts that users of other systems ran into: no text changes, no plain step is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import byte_tokenizer, tiny_drafter_folder, tiny_model_folder, write_rows
from folders import run as run_job
from learning_jobs import QUICK
from test_speculation import PAYS, Machine
from tiny import (
    BLOCK,
    VOCABULARY,
    ScriptedDrafter,
    always_wrong,
    as_requests,
    decode,
    random_prompts,
    replaying,
    texts,
    tiny_llama,
)

from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.target import Target
from adaflash_batch.request import Completion, Request, RowKey, Sampling
from adaflash_batch.text import TextCodec

GREEDY = Sampling(max_new_tokens=24)
Texts = dict[RowKey, list[int]]


def constant(requests: Sequence[Request], known: Texts) -> ScriptedDrafter:
    """One token for ever: the first of the first text, so that it is right now and then."""
    token = known[requests[0].key][0]
    return ScriptedDrafter(lambda key, at: [token] * (BLOCK - 1))


def thrown(requests: Sequence[Request], known: Texts) -> ScriptedDrafter:
    """Whatever the dice say."""
    dice = random.Random(5)
    return ScriptedDrafter(lambda key, at: [dice.randrange(VOCABULARY) for _ in range(BLOCK - 1)])


DRAFTERS = [always_wrong, constant, thrown]


class TimedMachine(Machine):
    """A machine on which a draft takes a quarter of the shortest step, too."""

    drafter: ScriptedDrafter | None = None
    num_drafted = 0

    def __call__(self) -> float:
        calls = 0 if self.drafter is None else self.drafter.num_calls
        self._now += 0.005 * (calls - self.num_drafted)
        self.num_drafted = calls
        return super().__call__()


def timed(
    llama: Target, requests: Sequence[Request], drafter: ScriptedDrafter | None, running: int
) -> tuple[Texts, float]:
    """The texts, and what the machine took for them."""
    clock, cost = TimedMachine(llama), StepCost()
    clock.drafter = drafter
    for tokens in (1, 2, 4, 8, 16, 32, 64) * 6:
        cost.observe_target(tokens, tokens, 20 * tokens, 0.02 + 0.001 * tokens)
        cost.observe_draft(tokens, 0.005)
        cost.observe_rest(tokens, 0.0)
    options: dict[str, Any] = {"policy": PAYS, "clock": clock, "max_running": running}
    done = decode(llama, requests, drafter=drafter, cost=cost, **options)
    return texts(done), clock()


@pytest.mark.parametrize("make", DRAFTERS)
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_useless_drafter_costs_a_few_per_cent_at_most(
    llama: Target,
    make: Callable[[Sequence[Request], Texts], ScriptedDrafter],
    concurrency: int,
) -> None:
    prompts = random_prompts(max(6, 2 * concurrency), longest=12)
    requests = as_requests(prompts, Sampling(max_new_tokens=120))
    plain, plain_s = timed(llama, requests, None, concurrency)
    drafter = make(requests, plain)
    drafted, drafted_s = timed(llama, requests, drafter, concurrency)
    assert drafted == plain
    assert drafter.num_calls > 0, "it was never tried: the test proves nothing"
    assert drafted_s < 1.05 * plain_s


@pytest.mark.parametrize("concurrency", [3, 6])
def test_rows_that_accept_none_some_and_all_in_one_step(llama: Target, concurrency: int) -> None:
    requests = as_requests(random_prompts(6, seed=4), GREEDY)
    alone = {r.key: decode(llama, [r])[r.key].token_ids for r in requests}
    right, wrong = replaying(requests, alone), always_wrong(requests, alone)

    def mixed(key: RowKey, at: int) -> list[int]:
        kept = (0, 2, BLOCK - 1)[key.row % 3]
        return [*right.propose(key, at)[:kept], *wrong.propose(key, at)[kept:]]

    done = decode(llama, requests, drafter=ScriptedDrafter(mixed), max_running=concurrency)
    assert texts(done) == alone
    for key, completion in done.items():
        most = (0, 2, BLOCK - 1)[key.row % 3]
        assert len(completion.counts.accepted_hist) == most + 1
        assert completion.counts.accepted_hist[most] >= completion.counts.steps - 1


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(template=None).save_pretrained(folder)
    return TextCodec.load(folder, context=256)


@pytest.fixture(scope="module")
def spoken(codec: TextCodec) -> tuple[Target, list[Request], Texts]:
    """A model that says letters alone, its requests, and its texts without stop strings."""
    target = Target.of(tiny_llama(3, vocab_size=codec.tokenizer_vocab_size), "letters")
    tokens = [codec._tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"]
    sampling = Sampling(
        max_new_tokens=3 * BLOCK, logit_bias=tuple((token, 100.0) for token in sorted(tokens))
    )
    requests = as_requests(random_prompts(3, seed=2), sampling)
    return target, requests, texts(decode(target, requests))


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("place", range(2 * BLOCK + 1))
def test_a_stop_string_anywhere_in_accepted_blocks(
    codec: TextCodec, spoken: tuple[Target, list[Request], Texts], place: int, length: int
) -> None:
    """One token a letter: the string may begin at any slot and go over into the next block."""
    target, plain, known = spoken
    stops, requests = {}, []
    for request in plain:
        whole = codec.decode(known[request.key], stop=(), end_ids=frozenset())
        own = whole[place : place + length]
        # Another that overlaps it and ends later, and one that never comes.
        stop = (own, whole[place + 1 : place + length + 2], "never")
        stops[request.key] = (whole, stop)
        sampling = Sampling(
            max_new_tokens=request.sampling.max_new_tokens,
            logit_bias=request.sampling.logit_bias,
            stop=stop,
        )
        requests.append(
            Request(
                request.key, request.token_ids, sampling, request.identity, codec.watch(sampling)
            )
        )
    done = decode(target, requests, drafter=replaying(requests, known))
    for key, (whole, stop) in stops.items():
        _check_stopped(codec, done[key], whole, stop)


def _check_stopped(
    codec: TextCodec, completion: Completion, whole: str, stop: tuple[str, ...]
) -> None:
    """As long as what it takes to complete the first of the strings, and cut before it."""
    ends = [end for end in range(len(whole) + 1) if any(s in whole[:end] for s in stop)]
    end = ends[0]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) == end
    text = codec.decode(completion.token_ids, stop=stop, end_ids=frozenset())
    assert text == whole[: min(whole.find(s) for s in stop if s in whole[:end])]
    counts = completion.counts
    assert counts.accepted <= counts.verified
    assert counts.accepted + counts.steps in (end - 1, end)


def test_two_files_with_updates_between_leak_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are those of each file alone, and the model is as it was before it was learnt from."""
    model = tiny_model_folder(tmp_path / "model")
    drafter = tiny_drafter_folder(tmp_path / "drafter")
    shards = [
        write_rows(tmp_path / f"{name}.parquet", [f"{name} {row % 5}" for row in range(24)])
        for name in ("first", "second")
    ]
    keys: dict[str, object] = {
        **QUICK,
        "speculation.drafter": str(drafter),
        "output.chunk_rows": 6,
        "engine.concurrency": 4,
        "sampling.max_new_tokens": 12,
    }
    targets: list[Target] = []
    load = Target.load

    def noted(*arguments: Any, **named: Any) -> Target:
        targets.append(load(*arguments, **named))
        return targets[-1]

    monkeypatch.setattr(Target, "load", noted)
    summary = run_job(shards, model, tmp_path / "both", keys)
    assert summary.fields["updates"]
    for place, shard in enumerate(shards):
        alone = tmp_path / f"alone{place}"
        run_job(shard, model, alone, {"sampling.max_new_tokens": 12})
        assert _texts(tmp_path / "both", place) == _texts(alone, 0)
    learnt, fresh = targets[0]._model, targets[-1]._model
    assert learnt.config._attn_implementation == fresh.config._attn_implementation
    assert not learnt.training
    assert not any(p.requires_grad or p.grad is not None for p in learnt.parameters())
    pairs = zip(learnt.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def _texts(out: Path, shard: int) -> list[str | None]:
    import pyarrow.parquet as pq

    found = sorted(out.glob(f"part-{shard:05d}-*.parquet"))
    return [text for part in found for text in pq.read_table(part)["completion"].to_pylist()]
