"""Drafts begun behind a step that has not landed: what they are, who gets them, what they cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters import DFLASH, DSPARK, net_of
from knowing import ENDS, MEMBERS, Calls, Knowing, Said, count_calls, run
from replaying import Capturers
from test_device_passes import MIXED, WatchesFor
from test_speculation import Machine, known_cost
from tiny import VOCABULARY, as_requests, decode, random_prompts, texts, tiny_model

from adaflash_batch.engine import placing
from adaflash_batch.engine.acceptance import RequestRecord
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.device_context import staying
from adaflash_batch.engine.device_drafting import DeviceDrafter
from adaflash_batch.engine.device_passes import DevicePasses
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.packing import pack
from adaflash_batch.engine.pages import PagePool
from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.scheduler import Scheduler
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.engine.step_buffers import Bucket, StepBuffers
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import Trajectory
from adaflash_batch.kernels.accept import Emitted
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Completion, Request, RowKey, Sampling

GREEDY = Sampling(max_new_tokens=24)


@pytest.fixture(scope="module")
def on_device() -> Target:
    return Target.of(tiny_model("llama"), "tiny llama on a device", kernels="torch")


@pytest.fixture(autouse=True)
def capturers(monkeypatch: pytest.MonkeyPatch) -> Capturers:
    made = Capturers()
    monkeypatch.setattr(placing, "device_capturer", made)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return count_calls(monkeypatch)


def compare(
    host: dict[RowKey, Completion], device: dict[RowKey, Completion], said: list[Said]
) -> None:
    assert texts(device) == texts(host)
    for key, completion in host.items():
        assert device[key].finish_reason == completion.finish_reason
        assert device[key].counts == completion.counts
    # The device also drafts behind texts that have ended.
    for drafted, drafts in said[0].items():
        assert drafts <= said[1][drafted]


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("adopts_at", [(), (5, 6, 9)], ids=["constant", "adopted"])
def test_what_is_drafted_ahead_is_what_is_drafted_later(
    llama: Target,
    on_device: Target,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    member: str,
    adopts_at: tuple[int, ...],
) -> None:
    """Drafts depend on the anchor, its place and all that was absorbed, with its weights."""
    requests = as_requests(random_prompts(6, seed=5), GREEDY)
    whole = texts(decode(llama, requests, ends=ENDS))
    found, said, learnt = [], [], []
    for target in (llama, on_device):
        with monkeypatch.context() as patch:
            knowing = Knowing(requests, whole)
            knowing.put_in_place(patch)
            member_run = run(target, requests, MEMBERS[member], adopts_at=adopts_at, max_running=4)
            found.append(member_run[1])
            said.append(knowing.said)
            learnt.append(member_run[0].speculator.blocks.survival())
    compare(found[0], found[1], said)
    assert learnt[0] == learnt[1]
    assert {version for version, *_ in said[0]} == {0, *adopts_at}
    histograms = [each.counts.accepted_hist for each in found[0].values()]
    assert len({accepted for each in histograms for accepted, n in enumerate(each) if n}) > 3
    # A request's first block cannot be ahead, nor one with new weights.
    assert calls.now <= len(requests) + 4 * len(adopts_at)
    assert calls.ahead > 2 * calls.now


def test_states_that_are_kept_for_learning_are_the_target_s(
    llama: Target, on_device: Target, calls: Calls
) -> None:
    """The drafter has gone through the lm_head before they are taken."""
    found: list[dict[RowKey, Trajectory]] = []
    for target in (llama, on_device):
        kept: dict[RowKey, Trajectory] = {}
        decoder, _ = run(target, [], max_running=3)
        decoder.capture((0, 2), lambda each, kept=kept: kept.update({each.key: each}))  # type: ignore[misc]
        for request in as_requests(random_prompts(4, seed=5), GREEDY):
            decoder.add(request)
        while decoder.has_work:
            decoder.step()
        found.append(kept)
    assert calls.ahead > 0
    host, device = found
    for key, trajectory in host.items():
        assert trajectory.token_ids.tolist() == device[key].token_ids.tolist()
        for name in ("features", "last_hidden"):
            mine, theirs = getattr(device[key], name), getattr(trajectory, name)
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_the_next_draft_begins_before_the_host_knows_the_step(
    llama: Target, on_device: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = as_requests(random_prompts(2, seed=3), GREEDY)
    Knowing(requests, texts(decode(llama, requests, ends=ENDS))).put_in_place(monkeypatch)
    happened: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            happened.append(name)
            return call(*arguments, **options)

        return noted

    monkeypatch.setattr(DevicePasses, "begin", noting("verify", DevicePasses.begin))
    monkeypatch.setattr(Decoder, "_land", noting("land", Decoder._land))
    for name, method in (("draft", "draft"), ("ahead", "draft_ahead")):
        monkeypatch.setattr(DeviceDrafter, method, noting(name, getattr(DeviceDrafter, method)))
    run(on_device, requests)
    # Prefill, the first draft; then each step waits for nothing but the one before.
    assert happened[:8] == ["land", "verify", "land", "draft", "verify", "ahead", "land", "verify"]
    assert happened[8:11] == ["ahead", "land", "verify"]
    assert happened.count("draft") == 1


@pytest.mark.parametrize("member", ["dflash", "dspark"])
def test_preemption_and_every_kind_of_request_beside_it(
    llama: Target, on_device: Target, calls: Calls, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    """Requests that are sent back have other pages afterwards; those that the host decides for,
    or that it ends by a stop string, are not what the device thinks."""
    samplings = [dataclasses.replace(each, max_new_tokens=40) for each in MIXED]
    prompts = random_prompts(6, seed=5)
    whole = texts(decode(llama, as_requests(prompts, samplings), ends=ENDS))

    def requests() -> list[Request]:
        made = as_requests(prompts, samplings)
        stop = WatchesFor(whole[RowKey(0, 0, 0)][9])
        return [dataclasses.replace(made[0], stop_watch=stop), *made[1:]]

    expected = texts(decode(llama, requests(), ends=ENDS))
    assert len(expected[RowKey(0, 0, 0)]) <= 10
    Knowing(requests(), whole).put_in_place(monkeypatch)
    decoder, done = run(
        on_device, requests(), MEMBERS[member], max_running=5, kv_tokens=9 * PAGE, token_budget=48
    )
    assert texts(done) == expected
    assert decoder.num_preemptions > 0
    assert calls.ahead > 0


def test_what_was_drafted_for_nothing_makes_the_others_dearer(
    llama: Target, on_device: Target, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = as_requests(random_prompts(6, seed=5), GREEDY)
    Knowing(requests, texts(decode(llama, requests, ends=ENDS))).put_in_place(monkeypatch)
    observed: list[int] = []
    decoder, done = run(on_device, [], max_running=4)
    monkeypatch.setattr(
        decoder.cost, "observe_draft", lambda count, seconds: observed.append(count)
    )
    for request in requests:
        decoder.add(request)
    while decoder.has_work:
        done |= {each.key: each for each in decoder.step()}
    used = sum(taken for taken, _ in calls.used)
    assert used < sum(num_requests for _, num_requests in calls.used) == calls.ahead
    drafted = sum(each.counts.drafted for each in done.values())
    assert sum(observed) == calls.now + used == drafted // (DFLASH.block_size - 1)


def test_what_is_never_right_is_hardly_drafted_ahead(
    llama: Target, on_device: Target, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = as_requests(random_prompts(6, longest=12), Sampling(max_new_tokens=100))
    whole = texts(decode(llama, requests, ends=ENDS))
    wrong = {key: [(token + 1) % VOCABULARY for token in text] for key, text in whole.items()}
    Knowing(requests, wrong).put_in_place(monkeypatch)
    options: dict[str, Any] = {"cost": known_cost(), "clock": Machine(on_device)}
    pays = Policy("survival", only_if_it_pays=True)
    _, done = run(on_device, requests, policy=pays, max_running=4, **options)
    assert texts(done) == whole
    num_steps = sum(each.counts.steps for each in done.values())
    assert num_steps > 400
    assert calls.now + calls.ahead < 0.15 * num_steps


def test_a_probe_is_followed_by_no_draft(
    llama: Target, on_device: Target, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is drafted to see what it would be worth, and not verified."""
    requests = as_requests(random_prompts(3, longest=12), Sampling(max_new_tokens=60))
    whole = texts(decode(llama, requests, ends=ENDS))
    wrong = {key: [(token + 1) % VOCABULARY for token in text] for key, text in whole.items()}
    Knowing(requests, wrong).put_in_place(monkeypatch)
    cost = known_cost()
    monkeypatch.setattr(cost, "observe_draft", lambda count, seconds: None)
    pays = Policy("survival", only_if_it_pays=True)
    decoder, _ = run(on_device, [], policy=pays, cost=cost, clock=Machine(on_device))
    for _ in range(200):
        decoder.speculator.blocks.observe(RequestRecord(), 0, 4)
    monkeypatch.setattr(decoder.speculator, "_probes_s", 0.5)
    for request in requests:
        decoder.add(request)
    while decoder.has_work:
        decoder.step()
    assert calls.now > 0
    assert calls.ahead == 0


def test_numbers_on_their_way_to_the_drafter_are_not_written_over(
    llama: Target, on_device: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was begun behind a step has been read when the step after that has landed."""
    requests = as_requests(random_prompts(8, seed=5), GREEDY)
    Knowing(requests, texts(decode(llama, requests, ends=ENDS))).put_in_place(monkeypatch)
    filled: dict[int, list[int]] = {}
    fill, land, landed = StepBuffers.fill, Decoder._land, [0]

    def fills(self: StepBuffers, bucket: Bucket, *arguments: Any) -> Any:
        inputs = fill(self, bucket, *arguments)
        if not bucket.num_deciding:  # the drafter's
            filled.setdefault(self._turn, []).append(landed[0])
        return inputs

    def lands(self: Decoder) -> None:
        land(self)
        landed[0] += 1

    monkeypatch.setattr(StepBuffers, "fill", fills)
    monkeypatch.setattr(Decoder, "_land", lands)
    run(on_device, requests, max_running=2)
    assert sum(map(len, filled.values())) > 20
    for uses in filled.values():
        assert all(later - first >= 2 for first, later in itertools.pairwise(uses))


def test_tokens_that_stay_are_told_in_two_ways_that_agree() -> None:
    """Kernels read to whom a token belongs, the reference where those of a request are."""
    packed = pack([[1] * 3, [1] * 4, [1] * 2, [1]], [9, 40, 7, 0], [3, 4, 2, 1])
    bucket = Bucket(num_tokens=16, num_rows=16, num_segments=6, max_length=4, num_pages=2)
    table = torch.zeros(4, 2, dtype=torch.int32).numpy()
    inputs = StepBuffers(torch.device("cpu"), bucket).fill(bucket, packed, table)
    numbers = torch.full((6, 8), 5, dtype=torch.int32)
    numbers[:, 1] = torch.tensor([2, 1, 0, 0, 9, 9])
    whose = torch.tensor([0, 1, 2], dtype=torch.int32)
    step = staying(inputs.step, whose, Emitted(numbers), num_tokens=9)
    assert step.length.tolist() == [3, 2, 1, 0, 0, 0]
    assert step.segment_of.tolist() == [0, 0, 0, 1, 1, -1, -1, 2, -1]
    for segment, (start, length) in enumerate(zip(step.start, step.length, strict=True)):
        own = torch.nonzero(step.segment_of == segment).flatten().tolist()
        assert own == list(range(int(start), int(start) + int(length)))


def test_segments_without_tokens_leave_no_state(on_device: Target) -> None:
    drafter = BlockDrafter(net_of(DSPARK, 0), on_device, num_pages=4)
    assert drafter._states is not None
    packed = pack([[1, 1], [1, 1]], [PAGE, 5], [0, 0])
    bucket = Bucket(num_tokens=4, num_rows=0, num_segments=3, max_length=2, num_pages=2)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).numpy()
    inputs = StepBuffers(torch.device("cpu"), bucket).fill(bucket, packed, table)
    numbers = torch.zeros(3, 8, dtype=torch.int32)
    step = staying(inputs.step, torch.zeros(1, dtype=torch.int32), Emitted(numbers), 4)
    drafter.absorb(step, inputs.positions.long(), torch.ones(4, 64))
    assert drafter._states[:4].abs().sum(1).ne(0).tolist() == [False, True, False, False]


@pytest.mark.parametrize("accepted", [0, 7])
def test_pages_hold_the_next_block_wherever_it_begins(accepted: int) -> None:
    reserve = 8
    scheduler = Scheduler(
        PagePool(20), max_running=1, token_budget=64, reserve=reserve, ahead=reserve
    )
    sequence = ScheduledSequence(known=2, limit=3 * PAGE)
    scheduler.add(sequence)
    scheduler.plan_prefill(0)
    sequence.computed, sequence.known = 2, 3
    while sequence.known + 2 < sequence.limit:
        ((_, _, width),) = scheduler.plan_decoding(reserve - 1)
        anchor = sequence.known + min(accepted, width)
        assert len(sequence.pages) * PAGE >= anchor + reserve
        sequence.computed, sequence.known = anchor, anchor + 1
    assert len(sequence.pages) <= scheduler.pages_for(sequence)
