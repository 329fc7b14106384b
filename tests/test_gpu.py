"""Promise 1 on a GPU: the tests of test_lossless.py where kernels, graphs and copies are real.

Run with -m gpu and TRITON_INTERPRET=0; .ci/gpu.sh does.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from drafters import DFLASH, DFLASH2, DSPARK, net_of
from knowing import count_calls
from test_lossless import MIXED, PENALISED, SAMPLED
from tiny import ARCHITECTURES, as_requests, decode, guessing, random_prompts, texts, tiny_model

from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.device_drafting import DeviceDrafter
from adaflash_batch.engine.device_passes import DevicePasses
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import DrafterWeights, Trajectory
from adaflash_batch.request import Completion, Request, RowKey, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU here"),
]
GREEDY = Sampling(max_new_tokens=24)
ENDS = frozenset([2])
HAZARD = dataclasses.replace(DFLASH, length_head="hazard", length_head_width=8)


def on_gpu(architecture: str, dtype: torch.dtype = torch.float32) -> Target:
    model = tiny_model(architecture).to("cuda", dtype)
    return Target.of(model, f"{architecture} on the GPU")


@pytest.fixture(scope="module")
def gpu_llama() -> Target:
    return on_gpu("llama")


def test_the_fast_kernels_run(gpu_llama: Target) -> None:
    assert gpu_llama.kernels.kind == "triton"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_are_those_of_the_cpu(architecture: str) -> None:
    requests = as_requests(random_prompts(5, seed=3), GREEDY)
    expected = texts(decode(Target.of(tiny_model(architecture), architecture), requests, ends=ENDS))
    target = on_gpu(architecture)
    assert texts(decode(target, requests, ends=ENDS)) == expected
    drafter = guessing(requests, expected)
    assert texts(decode(target, requests, ends=ENDS, drafter=drafter)) == expected


@pytest.mark.parametrize("concurrency", [1, 3, 32])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "pen"])
def test_every_drafter_gives_the_same_text(
    gpu_llama: Target, sampling: Sampling, concurrency: int
) -> None:
    requests = as_requests(random_prompts(12), sampling)
    plain = texts(decode(gpu_llama, requests, ends=ENDS))
    options: dict[str, Any] = {"max_running": concurrency, "ends": ENDS, "token_budget": 64}
    assert texts(decode(gpu_llama, requests, **options)) == plain
    drafter = guessing(requests, plain)
    assert texts(decode(gpu_llama, requests, drafter=drafter, **options)) == plain
    assert drafter.num_calls > 0


def test_rows_with_different_sampling_keep_their_own(gpu_llama: Target) -> None:
    requests = as_requests(random_prompts(len(MIXED), seed=5), MIXED)
    alone = {r.key: decode(gpu_llama, [r], ends=ENDS)[r.key].token_ids for r in requests}
    assert texts(decode(gpu_llama, requests, ends=ENDS)) == alone


def run(target: Target, requests: list[Request], decoder: Decoder) -> dict[RowKey, Completion]:
    for request in requests:
        decoder.add(request)
    done: dict[RowKey, Completion] = {}
    while decoder.has_work:
        done |= {each.key: each for each in decoder.step()}
    return done


@pytest.mark.parametrize("config", [DFLASH, DSPARK, DFLASH2, HAZARD])
def test_real_drafters_and_new_weights_change_no_text(
    gpu_llama: Target, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    requests = as_requests(random_prompts(8, seed=1), GREEDY)
    plain = texts(decode(gpu_llama, requests, ends=ENDS))
    decoder = Decoder(
        gpu_llama,
        drafter=lambda pages: BlockDrafter(net_of(config, 0).cuda().fuse(), gpu_llama, pages),
        kv_tokens=4096,
        end_token_ids=ENDS,
    )
    others = DrafterWeights(9, dict(net_of(config, 1).named_parameters()))
    coming = [None, None, None, others]
    decoder.follow(lambda: coming.pop(0) if coming else None)
    assert texts(run(gpu_llama, requests, decoder)) == plain
    assert decoder.drafter_version == 9
    assert calls.ahead > calls.now
    passes, drafter = decoder._passes, decoder._drafter
    assert isinstance(passes, DevicePasses)
    assert isinstance(drafter, DeviceDrafter)
    for graphs in (passes.graphs, drafter.graphs):
        assert graphs.failure is None
        assert graphs.num_replays > 0


def test_states_that_leave_are_those_of_the_cpu(llama: Target, gpu_llama: Target) -> None:
    requests, found = as_requests(random_prompts(6, seed=2), GREEDY), []
    for target in (llama, gpu_llama):
        kept: dict[RowKey, Trajectory] = {}
        # What a drafter computes behind a step leaves the target's states alone.
        net = net_of(DFLASH, 0, is_fused=False).to(target.device).fuse()
        drafter = partial(BlockDrafter, net, target)
        decoder = Decoder(target, drafter=drafter, kv_tokens=4096, max_running=3)
        decoder.capture((0, 2), lambda each, kept=kept: kept.update({each.key: each}))  # type: ignore[misc]
        run(target, requests, decoder)
        found.append(kept)
    assert found[0].keys() == found[1].keys()
    for key, trajectory in found[0].items():
        mine = found[1][key]
        assert mine.features.device.type == "cpu"
        for name in ("features", "last_hidden"):
            theirs = getattr(trajectory, name)
            torch.testing.assert_close(getattr(mine, name), theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_at_near_ties_only(dtype: torch.dtype) -> None:
    """What cuBLAS rounds may depend on how many rows there are; few texts may part for it."""
    target = on_gpu("llama", dtype)
    requests = as_requests(random_prompts(24, seed=4), GREEDY)
    alone = {r.key: decode(target, [r], ends=ENDS)[r.key].token_ids for r in requests}
    drafter = guessing(requests, alone)
    together = texts(decode(target, requests, ends=ENDS, drafter=drafter))
    assert sum(together[key] != alone[key] for key in alone) <= 4
