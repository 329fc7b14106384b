"""Requests that begin alike: what they have in common is computed once, and no text changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import net_of
from folders import read_rows, tiny_model_folder, write_rows
from folders import run as run_job
from test_adoption import MEMBERS, weights_of
from tiny import (
    ARCHITECTURES,
    VOCABULARY,
    ScriptedDrafter,
    as_requests,
    guessing,
    random_prompts,
    texts,
    tiny_model,
)
from torch import Tensor

from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import BlockDrafter, Draft, DraftBatch, Drafter
from adaflash_batch.engine.late_context import LateContext
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.packing import PageTable
from adaflash_batch.engine.scheduler import Sequence
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import DrafterWeights, Trajectory, WeightsMailbox
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import PackedStep
from adaflash_batch.request import Completion, Request, RowKey, Sampling
from adaflash_batch.spec import JobSpec

ENDS = frozenset([2])
COMMON = [3 + (7 * at) % (VOCABULARY - 3) for at in range(100)]
SAMPLINGS = [
    Sampling(max_new_tokens=1),
    Sampling(max_new_tokens=24),
    Sampling(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=7),
    Sampling(max_new_tokens=24, temperature=1.0, repetition_penalty=1.2),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "pieces": {"token_budget": 24, "max_running": 4},
    "preemption": {"kv_tokens": 256, "max_running": 8},
}


def alike(count: int = 9) -> list[Request]:
    """Half of them begin with COMMON, others with a part of it; some end with a page."""
    tails = random_prompts(count, longest=30)
    cuts = (100, 100, 70, 96, 100, 0)
    prompts = [COMMON[: cuts[row % 6]] + tail for row, tail in enumerate(tails)]
    prompts[3] = COMMON[: 2 * PAGE]
    prompts.append(prompts[1])
    return as_requests(prompts, [SAMPLINGS[row % 4] for row in range(len(prompts))])


class Run:
    """Requests decoded to their end, and what could be seen of it."""

    def __init__(
        self,
        target: Target,
        requests: list[Request],
        drafter: Callable[[int], Drafter] | None = None,
        *,
        learns: bool = False,
        kv_tokens: int = 16384,
        newest: Callable[[], DrafterWeights | None] | None = None,
        **options: Any,
    ) -> None:
        self.decoder = Decoder(
            target, drafter=drafter, kv_tokens=kv_tokens, end_token_ids=ENDS, **options
        )
        self.found: dict[RowKey, Trajectory] = {}
        if learns:
            turns = iter(range(10**6))
            self.decoder.capture((0, 1), self._take, lambda: next(turns) % 4 != 1)
        if newest is not None:
            self.decoder.follow(newest)
        before = target.num_forward_tokens
        self.done: dict[RowKey, Completion] = {}
        self.add(requests)
        self.num_tokens = target.num_forward_tokens - before

    def add(self, requests: list[Request]) -> None:
        for request in requests:
            self.decoder.add(request)
        while self.decoder.has_work:
            self.done |= {each.key: each for each in self.decoder.step()}

    def _take(self, trajectory: Trajectory) -> None:
        self.found[trajectory.key] = trajectory

    @property
    def texts(self) -> dict[RowKey, list[int]]:
        return texts(self.done)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_text_changes(architecture: str, settings: dict[str, Any]) -> None:
    target = Target.of(tiny_model(architecture), architecture)
    requests = alike()
    plain = Run(target, requests, share_prefixes=False)
    assert plain.decoder.num_shared == 0
    shared = Run(target, requests, **settings)
    assert shared.texts == plain.texts
    assert shared.decoder.num_shared > 300
    assert (shared.decoder.num_preemptions > 0) == ("kv_tokens" in settings)
    drafting = Run(
        target,
        requests,
        lambda num_pages: guessing(requests, plain.texts),
        lookup=Lookup(max_tokens=1000),
        learns=True,
        **settings,
    )
    assert drafting.texts == plain.texts
    assert drafting.decoder.num_shared > 300


@pytest.mark.parametrize("new", [1, 5])
def test_a_common_beginning_is_computed_once(llama: Target, new: int) -> None:
    tails = random_prompts(8, longest=20)
    requests = as_requests([COMMON + tail for tail in tails], Sampling(max_new_tokens=new))
    run = Run(llama, requests)
    whole = len(COMMON) // PAGE * PAGE
    steps = sum(completion.counts.steps for completion in run.done.values())
    prompts = sum(len(request.token_ids) for request in requests)
    assert run.decoder.num_shared == 7 * whole
    assert run.num_tokens == prompts - 7 * whole + steps
    assert run.decoder.num_prefilled == prompts - 7 * whole
    # Whoever comes later finds it, too.
    run.add([dataclasses.replace(requests[0], key=RowKey(1, 0, 0))])
    assert run.decoder.num_shared == 8 * whole


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 3 * PAGE, 100])
def test_samples_of_a_prompt_compute_it_once(llama: Target, length: int) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=1.0, n=4)
    requests = [Request(RowKey(0, 0, n), COMMON[:length], sampling, 9) for n in range(4)]
    run = Run(llama, requests)
    # The last token's page is everyone's own: what follows it is to be known.
    shared = (length - 1) // PAGE * PAGE
    assert run.decoder.num_shared == 3 * shared
    assert run.decoder.num_prefilled == 4 * length - 3 * shared
    assert len({tuple(text) for text in run.texts.values()}) > 1
    assert run.texts == Run(llama, requests, share_prefixes=False).texts


class Noting:
    """A drafter that notes what it drafts where, with memory that nothing right is in before."""

    def __init__(self, inner: BlockDrafter) -> None:
        self.inner = inner
        self.version = inner.version
        self.block_size, self.tapped_layers = inner.block_size, inner.tapped_layers
        self.drafts: dict[tuple[RowKey, int], list[int]] = {}
        for kv in inner._kv:
            kv.k_pages.fill_(3.0)
            kv.v_pages.fill_(3.0)

    def draft(self, batch: DraftBatch) -> list[Draft]:
        drafts = self.inner.draft(batch)
        for key, position, draft in zip(batch.keys, batch.positions, drafts, strict=True):
            self.drafts[key, int(position)] = draft.token_ids
        return drafts

    def absorb(self, step: PackedStep, positions: Tensor, features: Tensor) -> None:
        self.inner.absorb(step, positions, features)

    def adopt(self, weights: DrafterWeights) -> None:
        self.inner.adopt(weights)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("member", MEMBERS)
def test_drafts_are_those_of_requests_that_share_nothing(
    llama: Target, member: str, settings: dict[str, Any]
) -> None:
    """What the drafter knows of a shared page is what it would know of one's own."""
    made: list[Noting] = []

    def build(num_pages: int) -> Noting:
        made.append(Noting(BlockDrafter(net_of(MEMBERS[member], 0), llama, num_pages)))
        return made[-1]

    requests = alike()
    apart = Run(llama, requests, build, share_prefixes=False)
    shared = Run(llama, requests, build, **settings)
    assert shared.decoder.num_shared > 300
    assert shared.texts == apart.texts
    ours, theirs = made[1].drafts, made[0].drafts
    if settings == {}:
        assert ours.keys() == theirs.keys()
    both = ours.keys() & theirs.keys()
    assert len(both) > 60
    assert {place: ours[place] for place in both} == {place: theirs[place] for place in both}


class Absorbing(ScriptedDrafter):
    """Notes the positions that it takes in."""

    def __init__(self) -> None:
        super().__init__(lambda key, position: [])
        self.positions: list[int] = []

    def absorb(self, step: PackedStep, positions: Tensor, features: Tensor) -> None:
        super().absorb(step, positions, features)
        self.positions += positions.tolist()


@pytest.mark.parametrize("comes_on", [True, False])
def test_what_waits_of_a_preempted_request_is_not_written_to_its_new_pages(comes_on: bool) -> None:
    """They may be shared by now, and hold what another request computed."""
    drafter, sequence = Absorbing(), Sequence(known=150, limit=200, pages=[5, 6, 7, 8, 9], slot=0)
    late = LateContext(drafter, PageTable(1, 200))
    late.add([sequence], [60], [36], torch.zeros(36, 64))
    sequence.num_preemptions += 1
    sequence.pages, sequence.computed = [0, 1, 2, 3, 4], 3 * PAGE
    if comes_on:
        late.add([sequence], [3 * PAGE], [4], torch.zeros(4, 64))
    late.hand_over()
    assert drafter.positions == (list(range(96, 100)) if comes_on else [])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_trajectories_are_whole(llama: Target, settings: dict[str, Any]) -> None:
    """Also of those whose beginning another computed that nobody recorded."""
    requests = alike()
    apart = Run(llama, requests, learns=True, share_prefixes=False)
    shared = Run(llama, requests, learns=True, **settings)
    assert shared.decoder.num_shared > 300
    assert shared.found.keys() == apart.found.keys()
    assert len(shared.found) == 7
    for key, ours in shared.found.items():
        theirs = apart.found[key]
        assert ours.prompt_length == theirs.prompt_length
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.last_hidden, theirs.last_hidden, rtol=1e-4, atol=1e-4)


def test_pages_are_not_kept_beyond_what_they_hold(llama: Target) -> None:
    """Neither context of an older drafter, nor states that nobody kept, nor what was profiled."""
    drafters: list[Noting] = []

    def build(num_pages: int) -> Noting:
        drafters.append(Noting(BlockDrafter(net_of(MEMBERS["dflash"], 0), llama, num_pages)))
        return drafters[-1]

    request = as_requests([COMMON], Sampling(max_new_tokens=9))[0]
    again = [dataclasses.replace(request, key=RowKey(1, 0, 0))]
    mailbox = WeightsMailbox()
    run = Run(llama, [request], build, newest=mailbox.take)
    new = weights_of(net_of(MEMBERS["dflash"], 1))
    for number, happens in enumerate(
        (
            lambda: mailbox.put(DrafterWeights(4, new)),
            lambda: run.decoder.capture((0, 1), lambda trajectory: None),
            run.decoder.profile,
        )
    ):
        happens()
        run.add(again)
        assert run.decoder.num_shared == 96 * number
        run.add(again)
        assert run.decoder.num_shared == 96 * (number + 1)
    assert run.done[again[0].key].token_ids == run.done[request.key].token_ids


def test_kv_memory_covers_the_states_of_shared_pages(llama: Target) -> None:
    config, numbers = MEMBERS["dspark"], BlockDrafter.numbers_per_token
    num_states = len(config.target_layer_ids) * llama.hidden_size
    assert numbers(config, keeps_states=True) - numbers(config) == num_states
    learning = JobSpec.from_sources(flags={"input.paths": ["x.parquet"]})
    assert learning.shares_states
    for override in ("adapt.when=off", "engine.share_prefixes=false"):
        spec = JobSpec.from_sources(None, [override], {"input.paths": ["x.parquet"]})
        assert not spec.shares_states


def test_a_job_says_what_was_shared(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    shard = write_rows(tmp_path / "in.parquet", ["y" * 70 + tail for tail in ("one", "two", "ten")])
    keys: dict[str, object] = {"sampling.n": 2, "sampling.temperature": 1.0}
    shared = run_job(shard, model, tmp_path / "on", keys).fields
    assert shared["prompt_tokens"] == 6 * 73
    assert shared["shared_prompt_tokens"] == 5 * 2 * PAGE
    assert shared["shared_prompt_share"] == round(5 * 2 * PAGE / (6 * 73), 4)
    apart = run_job(shard, model, tmp_path / "off", keys | {"engine.share_prefixes": False}).fields
    assert (apart["shared_prompt_tokens"], apart["shared_prompt_share"]) == (0, 0.0)
    assert read_rows(tmp_path / "on") == read_rows(tmp_path / "off")
