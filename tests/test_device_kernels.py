"""The whole engine with interpreted kernels writes the texts of the path of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from drafters import DFLASH, net_of
from tiny import as_requests, decode, texts, tiny_model

from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.profile import about
from adaflash_batch.engine.row_linear import RowLinear
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Request, Sampling

triton_attention = pytest.importorskip("adaflash_batch.kernels.triton_attention")

# Padding is computed with whatever memory holds; numpy, which interprets, says so.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

ENDS = frozenset([2])
SAMPLED = Sampling(max_new_tokens=3, temperature=0.8, top_p=0.9, seed=7)


def some_requests() -> list[Request]:
    return as_requests([[5, 6, 7] * 12, [8]], [Sampling(max_new_tokens=4), SAMPLED])


def few_requests(num_tokens: int = 3) -> list[Request]:
    return as_requests([[5, 6, 7], [8]], Sampling(max_new_tokens=num_tokens))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_interpreted_kernels_write_the_same_texts(architecture: str) -> None:
    host = Target.of(tiny_model(architecture), architecture)
    expected = texts(decode(host, some_requests(), ends=ENDS))
    device = Target.of(tiny_model(architecture), architecture, kernels="triton")
    assert device.kernels.kind == "triton"
    assert texts(decode(device, some_requests(), ends=ENDS, max_running=2)) == expected


@pytest.mark.parametrize(("architecture", "is_known"), [("qwen3", True), ("gemma2", False)])
def test_known_layers_rotate_and_store_in_one_launch(
    architecture: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        launcher = getattr(triton_attention, name)

        def launch(*arguments: Any) -> Any:
            launches.append(name)
            return launcher(*arguments)

        return launch

    for name in ("rotate_and_store", "store_kv"):
        monkeypatch.setattr(triton_attention, name, counted(name))
    target = Target.of(tiny_model(architecture), architecture, kernels="triton")
    launches.clear()
    decode(target, as_requests([[5]], Sampling(max_new_tokens=1)), ends=ENDS)
    assert set(launches) == {"rotate_and_store" if is_known else "store_kv"}
    assert len(launches) % target.num_layers == 0


def test_a_drafter_with_interpreted_kernels_changes_no_text(llama: Target) -> None:
    """Nor a count: drafts begun ahead are those that the host's path makes later."""
    found = []
    for target in (llama, Target.of(tiny_model("llama"), "llama", kernels="triton")):
        drafter = BlockDrafter(net_of(DFLASH, 0), target, 16384 // 32)
        found.append(decode(target, few_requests(5), ends=ENDS, drafter=drafter))
    host, device = found
    assert texts(device) == texts(host) == texts(decode(llama, few_requests(5), ends=ENDS))
    assert all(device[key].counts == completion.counts for key, completion in host.items())


def test_the_deterministic_mode_makes_a_token_independent_of_its_pass(llama: Target) -> None:
    target = Target.of(tiny_model("llama"), "llama", kernels="triton", deterministic=True)
    products = [m for m in target._model.modules() if isinstance(m, RowLinear)]
    assert len(products) == 4 * target.num_layers + 1
    x = torch.randn(70, 32, generator=torch.Generator().manual_seed(0))
    whole = target.head(x)
    for rows in (1, 65):
        assert torch.equal(target.head(x[:rows]), whole[:rows])
    done = texts(decode(target, few_requests(), ends=ENDS))
    assert done == texts(decode(llama, few_requests(), ends=ENDS))


def test_what_steps_take_is_kept_apart_for_other_kernels(llama: Target) -> None:
    """The deterministic mode's products are slower: neither may take up the other's costs."""
    ways = [
        Target.of(tiny_model("llama"), "llama", kernels="triton", deterministic=deterministic)
        for deterministic in (False, True)
    ]
    torch_form = Target.of(tiny_model("llama"), "llama", kernels="torch")
    assert len({about(each, "") for each in (llama, torch_form, *ways)}) == 4
    again = Target.of(tiny_model("llama"), "llama", kernels="triton", deterministic=True)
    assert about(again, "") == about(ways[1], "")


def test_models_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic mode knows"):
        Target.of(tiny_model("gemma2"), "gemma2", kernels="triton", deterministic=True)
