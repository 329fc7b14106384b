"""The path of a device, on tensors of the CPU: the same texts as the path of the host."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import DFLASH, net_of
from knowing import ENDS, MEMBERS
from replaying import Capturers, ReplayingCapturer
from tiny import as_requests, decode, guessing, random_prompts, replaying, texts, tiny_model

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.engine import device_passes, placing
from adaflash_batch.engine.accept import Emission
from adaflash_batch.engine.assembly import DecoderPlan, build_decoder
from adaflash_batch.engine.buckets import MOST_TOKENS, Buckets, pages_of, tokens_of
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.device_drafting import DeviceDrafter
from adaflash_batch.engine.device_passes import DevicePasses
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.graphs import Graphs
from adaflash_batch.engine.packing import pack
from adaflash_batch.engine.sampling import decide
from adaflash_batch.engine.step_buffers import Bucket, StepBuffers, exact_bucket
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import DrafterWeights, Trajectory
from adaflash_batch.request import Completion, Request, RowKey, Sampling

GREEDY = Sampling(max_new_tokens=12)
SAMPLED = Sampling(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=7)
PENALISED = Sampling(max_new_tokens=12, repetition_penalty=1.3, min_new_tokens=5)
MIXED = [GREEDY, SAMPLED, PENALISED, Sampling(max_new_tokens=3), SAMPLED, GREEDY]


@pytest.fixture(scope="module")
def on_device() -> Target:
    return Target.of(tiny_model("llama"), "tiny llama on a device", kernels="torch")


@pytest.fixture
def capturers(monkeypatch: pytest.MonkeyPatch) -> Capturers:
    """Make graphs for decoders that are made from now on."""
    made = Capturers()
    monkeypatch.setattr(placing, "device_capturer", made)
    return made


def mixed_requests() -> list[Request]:
    return as_requests(random_prompts(6, seed=5), MIXED)


def run(
    target: Target, requests: list[Request], config: DrafterConfig, **options: Any
) -> tuple[Decoder, dict[RowKey, Completion]]:
    """With a real drafter, whose weights change once while it drafts."""
    decoder = Decoder(
        target,
        drafter=lambda num_pages: BlockDrafter(net_of(config, 0), target, num_pages),
        kv_tokens=4096,
        end_token_ids=ENDS,
        **options,
    )
    others = DrafterWeights(9, dict(net_of(config, 1).named_parameters()))
    coming = [None, None, None, others]
    decoder.follow(lambda: coming.pop(0) if coming else None)
    for request in requests:
        decoder.add(request)
    done: dict[RowKey, Completion] = {}
    while decoder.has_work:
        done |= {each.key: each for each in decoder.step()}
    return decoder, done


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_device_writes_the_same_texts(
    llama: Target, on_device: Target, capturers: Capturers, concurrency: int
) -> None:
    options: dict[str, Any] = {"ends": ENDS, "max_running": concurrency}
    plain = texts(decode(llama, mixed_requests(), **options))
    assert texts(decode(on_device, mixed_requests(), **options)) == plain
    drafter = guessing(mixed_requests(), plain)
    assert texts(decode(on_device, mixed_requests(), drafter=drafter, **options)) == plain
    assert drafter.num_calls > 0
    assert capturers.num_captured > 0


@pytest.mark.parametrize("member", MEMBERS)
def test_drafts_that_stay_on_the_device_are_the_same(
    llama: Target, on_device: Target, capturers: Capturers, member: str
) -> None:
    requests = mixed_requests()
    _, expected = run(llama, requests, MEMBERS[member], max_running=4)
    decoder, done = run(on_device, requests, MEMBERS[member], max_running=4)
    assert texts(done) == texts(expected)
    assert decoder.drafter_version == 9
    for key, completion in expected.items():
        assert done[key].counts.verified == completion.counts.verified
        assert done[key].counts.accepted == completion.counts.accepted
    drafter, passes = decoder._drafter, decoder._passes
    assert isinstance(drafter, DeviceDrafter)
    assert isinstance(passes, DevicePasses)
    assert drafter.graphs.num_replays > 0
    assert passes.graphs.num_replays > 0


class WatchesFor:
    """Says stop behind a token, as a stop string would."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def feed(self, token_id: int) -> bool:
        return token_id == self._token_id


def ending_requests(whole: dict[RowKey, list[int]]) -> list[Request]:
    """Of texts that are known: one ends by each rule, in the middle of a step."""
    greedy, sampled = Sampling(max_new_tokens=12), SAMPLED
    ways: list[tuple[Sampling, int | None]] = [
        (dataclasses.replace(greedy, stop_token_ids=(whole[RowKey(0, 0, 0)][6],)), None),
        (dataclasses.replace(greedy, stop_token_ids=tuple(range(40, 90))), None),
        (dataclasses.replace(greedy, max_new_tokens=7), None),
        (greedy, whole[RowKey(0, 3, 0)][6]),
        (dataclasses.replace(sampled, max_new_tokens=6), None),
        (dataclasses.replace(greedy, ignore_eos=True), whole[RowKey(0, 5, 0)][0]),
    ]
    requests = as_requests(random_prompts(6, seed=8), [sampling for sampling, _ in ways])
    return [
        request if stop is None else dataclasses.replace(request, stop_watch=WatchesFor(stop))
        for request, (_, stop) in zip(requests, ways, strict=True)
    ]


def test_texts_end_where_the_host_ends_them(
    llama: Target, on_device: Target, capturers: Capturers
) -> None:
    prompts = as_requests(random_prompts(6, seed=8), GREEDY)
    whole = texts(decode(llama, prompts))
    found = []
    for target in (llama, on_device):
        perfect = replaying(prompts, {key: [*text, *text] for key, text in whole.items()})
        found.append(decode(target, ending_requests(whole), drafter=perfect, ends=ENDS))
    host, device = found
    assert texts(device) == texts(host)
    assert {each.finish_reason for each in host.values()} == {"stop", "length"}
    for key, completion in host.items():
        assert device[key].finish_reason == completion.finish_reason
        assert device[key].counts == completion.counts
    assert max(len(each.counts.accepted_hist) for each in host.values()) > 3


def test_the_host_reads_no_logits_where_it_need_not(
    llama: Target, on_device: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does where they depend on the text, and where very many tokens end it."""
    many_ends = dataclasses.replace(GREEDY, stop_token_ids=tuple(range(50, 97)))
    requests = as_requests(random_prompts(7, seed=5), [*MIXED, many_ends])
    expected = texts(decode(llama, requests, ends=ENDS))
    read: list[Sampling] = []

    def reads(logits: torch.Tensor, blocks: Any) -> list[Emission]:
        read.extend(block.sampling for block in blocks)
        return decide(logits, blocks)

    monkeypatch.setattr(device_passes, "decide", reads)
    assert texts(decode(on_device, requests, ends=ENDS)) == expected
    assert set(read) == {PENALISED, many_ends}


def test_what_is_kept_for_learning_is_the_same(
    llama: Target, on_device: Target, capturers: Capturers
) -> None:
    found: list[dict[RowKey, Trajectory]] = []
    for target in (llama, on_device):
        kept: dict[RowKey, Trajectory] = {}
        decoder = Decoder(target, kv_tokens=4096, end_token_ids=ENDS, max_running=3)
        decoder.capture((0, 2), lambda each, kept=kept: kept.update({each.key: each}))  # type: ignore[misc]
        for request in mixed_requests():
            decoder.add(request)
        while decoder.has_work:
            decoder.step()
        found.append(kept)
    host, device = found
    assert host.keys() == device.keys()
    for key, trajectory in host.items():
        assert trajectory.token_ids.tolist() == device[key].token_ids.tolist()
        # Attention is summed up in another order.
        for name in ("features", "last_hidden"):
            mine, theirs = getattr(device[key], name), getattr(trajectory, name)
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    assert capturers.num_captured > 0


def test_a_step_is_still_under_way_when_the_call_returns(on_device: Target) -> None:
    decoder = Decoder(on_device, kv_tokens=4096)
    decoder.add(as_requests([[5, 6]], Sampling(max_new_tokens=1))[0])
    assert decoder.step() == []
    assert decoder.num_generated == 0
    # What comes meanwhile is not in it.
    decoder.add(as_requests([[5, 6], [7]], Sampling(max_new_tokens=1))[1])
    assert [len(each.token_ids) for each in decoder.step()] == [1]
    assert decoder.has_work


def test_rows_of_a_step_that_is_not_finite_are_errors() -> None:
    model = tiny_model("llama")
    target = Target.of(model, "poisoned", kernels="torch")
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    done = decode(target, as_requests([[5, 6], [7, 50, 8], [9]], GREEDY))
    errors = [done[RowKey(0, row, 0)].error for row in range(3)]
    assert [None if error is None else error.kind for error in errors] == [
        None,
        "bad_logits",
        None,
    ]


def test_a_bucket_holds_its_step_and_padding_belongs_to_nobody() -> None:
    packed = pack([[5, 6, 7], [8]], [40, 2], [3, 1])
    table = np.array([[3, 1], [2, 0]], dtype=np.int32)
    bucket = Bucket(num_tokens=8, num_rows=8, num_segments=4, max_length=4, num_pages=3)
    buffers = StepBuffers(torch.device("cpu"), bucket)
    sources = np.array([-1, 4, 5, -1], dtype=np.int32)
    buffers.fill(bucket, pack([[9] * 8], [0], [8]), np.full((1, 3), 7, dtype=np.int32))
    inputs = buffers.fill(bucket, packed, table, sources)
    assert inputs.token_ids.tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [40, 41, 42, 2, 0, 0, 0, 0]
    assert inputs.sources.tolist() == [-1, 4, 5, -1, -1, -1, -1, -1]
    assert inputs.rows.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    step = inputs.step
    assert step.segment_of.tolist() == [0, 0, 0, 1, -1, -1, -1, -1]
    assert step.length.tolist() == [3, 1, 0, 0]
    assert (step.start.tolist()[:2], step.context.tolist()[:2]) == ([0, 3], [40, 2])
    assert step.table.tolist() == [[3, 1, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert inputs is buffers.fill(bucket, packed, table, sources)


def test_few_buckets_serve_all_steps_without_prefill() -> None:
    buckets, found = Buckets(max_running=64, max_pages=100, widest=8), set()
    for num_requests in range(1, 65):
        for width in range(8):
            pieces = [[1] * (width + 1)] * num_requests
            packed = pack(pieces, [0] * num_requests, [width + 1] * num_requests)
            bucket, comes_again = buckets.of(packed, np.zeros((num_requests, 3), dtype=np.int32))
            assert comes_again
            assert bucket.num_tokens >= len(packed.token_ids)
            assert bucket.num_segments >= num_requests
            assert bucket.max_length >= width + 1
            found.add(bucket)
    assert len(found) < 45
    assert tokens_of(MOST_TOKENS) == MOST_TOKENS
    assert tokens_of(MOST_TOKENS + 1) == MOST_TOKENS + 1
    assert [pages_of(count, 100) for count in (1, 32, 33, 100)] == [32, 32, 100, 100]


def test_prefill_and_large_steps_come_in_their_own_size() -> None:
    buckets = Buckets(max_running=2048, max_pages=8, widest=8)
    table = np.zeros((1, 1), dtype=np.int32)
    for packed in (
        pack([[1] * 9], [0], [1]),
        pack([[1] * 9], [0], [9]),
        pack([[1]] * (MOST_TOKENS + 1), [0] * (MOST_TOKENS + 1), [1] * (MOST_TOKENS + 1)),
    ):
        assert buckets.of(packed, table) == (exact_bucket(packed, 1), False)


def test_graphs_are_made_the_second_time_and_not_without_room() -> None:
    capturer, runs = ReplayingCapturer(), []
    graphs: Graphs[tuple[torch.Tensor]] = Graphs("passes", capturer, most=2, max_bytes=100)

    def work() -> tuple[torch.Tensor]:
        runs.append(1)
        return (torch.ones(1),)

    for _ in range(3):
        assert graphs.run("a", work)[0].item() == 1.0
    assert (capturer.num_captured, graphs.num_replays) == (1, 2)
    for key in ("b", "b", "c", "c"):
        graphs.run(key, work)
    assert (len(graphs), capturer.num_captured) == (2, 2)


class RefusingCapturer:
    def capture(self, work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_what_cannot_be_captured_runs_as_it_is(
    llama: Target, on_device: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "device_capturer", lambda device: RefusingCapturer())
    monkeypatch.setattr(Target, "load", lambda *folder, **options: on_device)
    said: list[str] = []
    plan = DecoderPlan(Path("model"), "model", kv_bytes=2**22, context=64)
    decoder = build_decoder(plan, notify=said.append)
    decoder.end_token_ids = ENDS
    for request in mixed_requests():
        decoder.add(request)
    done: dict[RowKey, Completion] = {}
    while decoder.has_work:
        done |= {each.key: each for each in decoder.step()}
    assert texts(done) == texts(decode(llama, mixed_requests(), ends=ENDS))
    passes = decoder._passes
    assert isinstance(passes, DevicePasses)
    assert passes.graphs.failure == "operation not permitted when stream is capturing"
    (line,) = [line for line in said if "CUDA graphs" in line]
    assert line.startswith("the target's passes run slower")
    assert line.endswith(passes.graphs.failure)


def test_a_drafter_whose_passes_cannot_be_captured_says_so(
    on_device: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "device_capturer", lambda device: RefusingCapturer())
    decoder, _ = run(on_device, [], DFLASH)
    said: list[str] = []
    decoder.tell_of_trouble(said.append)
    for request in mixed_requests():
        decoder.add(request)
    while decoder.has_work:
        decoder.step()
    assert sorted(line.partition(" run")[0] for line in said) == [
        "the drafter's passes",
        "the target's passes",
    ]


def test_states_that_are_wanted_late_are_in_no_graph_of_before(
    on_device: Target, capturers: Capturers
) -> None:
    target = Target.of(tiny_model("llama"), "watched later", kernels="torch")
    decoder, kept = Decoder(target, kv_tokens=4096, max_running=2), list[Trajectory]()
    for emit in (None, kept.append):
        if emit is not None:
            assert capturers.num_captured > 0
            decoder.capture((1,), emit)
        for request in as_requests(random_prompts(2), GREEDY):
            decoder.add(request)
        while decoder.has_work:
            decoder.step()
    assert len(kept) == 2
    assert all(each.features.isfinite().all() for each in kept)
