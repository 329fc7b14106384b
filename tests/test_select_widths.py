"""Widths chosen on the device equal those that the engine chooses on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.drafter.length import survival_of
from adaflash_batch.engine.widths import Widths, choose_widths
from adaflash_batch.kernels.widths import Selected, select_widths, select_widths_reference

triton_widths = pytest.importorskip("adaflash_batch.kernels.triton_widths")


def by_engine(
    survivals: torch.Tensor, sizes: torch.Tensor, seconds: torch.Tensor
) -> tuple[list[int], list[float]]:
    """What the engine chooses for them."""
    pairs = zip(survivals.tolist(), sizes.tolist(), strict=True)
    known = seconds.numpy()
    chosen: Widths = choose_widths([row[:size] for row, size in pairs], lambda n: known[n])
    return chosen.widths, [chosen.emitted, chosen.seconds]


def as_lists(selected: Selected) -> tuple[list[int], list[float]]:
    assert selected.widths.dtype == torch.int32
    return selected.widths.tolist(), selected.promised.tolist()


CHANCES = st.one_of(
    st.floats(2.0**-16, 1.0, width=32), st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, float("nan")])
)


@settings(max_examples=25)
@given(st.integers(0, 9), st.integers(0, 5), st.data())
def test_it_is_the_engines_choice(num_requests: int, num_places: int, data: Any) -> None:
    size = num_requests * num_places
    chances = data.draw(st.lists(CHANCES, min_size=size, max_size=size))
    survivals = torch.tensor(chances, dtype=torch.float32).view(num_requests, num_places)
    room = st.lists(st.integers(0, num_places), min_size=num_requests, max_size=num_requests)
    sizes = torch.tensor(data.draw(room), dtype=torch.int32)
    prices = st.lists(st.integers(0, 12), min_size=size + 1, max_size=size + 1)
    seconds = torch.tensor(sorted(data.draw(prices)), dtype=torch.float64) * 0.1
    before = [each.clone() for each in (survivals, sizes, seconds)]
    expected = by_engine(survivals, sizes, seconds)
    assert as_lists(select_widths_reference(survivals, sizes, seconds)) == expected
    assert as_lists(triton_widths.select_widths(survivals, sizes, seconds)) == expected
    for each, was in zip((survivals, sizes, seconds), before, strict=True):
        assert torch.equal(each.nan_to_num(nan=7.0), was.nan_to_num(nan=7.0))


def test_batches_of_more_than_one_tile() -> None:
    generator = torch.Generator().manual_seed(0)
    survivals = torch.rand(37, 15, generator=generator).cumprod(1)
    sizes = torch.randint(0, 16, (37,), generator=generator, dtype=torch.int32)
    seconds = torch.from_numpy(1.0 + 0.05 * (np.arange(37 * 15 + 1) // 16))
    expected = by_engine(survivals, sizes, seconds)
    assert 0 < sum(expected[0]) < int(sizes.sum()), "all or none: nothing was chosen"
    assert as_lists(triton_widths.select_widths(survivals, sizes, seconds)) == expected


@pytest.mark.parametrize("scaled", [False, True])
def test_hazards_are_multiplied_up(scaled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(11, 7, generator=generator) - 1.0
    logits[3, 2:] = torch.inf
    logits[5, 4:] = torch.nan
    factors = torch.rand(7, generator=generator) * 1.5 if scaled else None
    sizes = torch.full((11,), 7, dtype=torch.int32)
    seconds = torch.linspace(1.0, 4.0, 78, dtype=torch.float64)
    survivals = survival_of(logits) * (1.0 if factors is None else factors)
    widths, promised = by_engine(survivals, sizes, seconds)
    for form in (select_widths_reference, triton_widths.select_widths):
        selected = form(logits, sizes, seconds, factors, are_hazards=True)
        assert selected.widths.tolist() == widths
        assert selected.promised.tolist() == pytest.approx(promised, rel=1e-6)
    assert sum(widths) > 0
    assert widths[3] <= 2
    assert widths[5] <= 4


def test_tensors_on_the_host_take_the_reference() -> None:
    survivals = torch.tensor([[0.9, 0.1], [0.5, 0.4]])
    sizes = torch.tensor([2, 2], dtype=torch.int32)
    seconds = torch.tensor([1.0, 1.1, 1.2, 2.0, 3.0], dtype=torch.float64)
    assert as_lists(select_widths(survivals, sizes, seconds)) == by_engine(
        survivals, sizes, seconds
    )
