"""Interpreted kernels equal their PyTorch references, and no row depends on what is around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from device_steps import Layout, layout, rms_ratio
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.kernels import triton_attention, triton_splits
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import (
    Attention,
    KVLayer,
    paged_attention_reference,
    store_kv_reference,
)
from adaflash_batch.kernels.triton_attention import attend, paged_attention

HEADS = [(1, 1), (6, 2), (2, 2), (7, 1), (20, 1)]


@contextmanager
def poisoned(split: int = 64) -> Iterator[None]:
    """New memory is full of NaN; splits are small, for contexts in tests are."""
    empty: Callable[..., torch.Tensor] = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
        patch.setattr(triton_attention, "SPLIT", split)
        patch.setattr(triton_splits, "SPLIT", split)
        yield


def expected(at: Layout, how: Attention) -> torch.Tensor:
    """Of the rows that are in a segment, in float64."""
    kv = KVLayer(at.kv.k_pages.double(), at.kv.v_pages.double())
    q, k, v = (each.double() for each in (at.q, at.k, at.v))
    store_kv_reference(at.packed, kv, k, v)
    return paged_attention_reference(at.packed, kv, q, how)[at.rows]


def attended(at: Layout, how: Attention, *, walks: bool | None = None) -> torch.Tensor:
    """The same, by the kernels."""
    store_kv_reference(at.packed, at.kv, at.k, at.v)
    return attend(at.device, at.kv, at.q, how, walks)[at.rows]


lengths = st.one_of(st.sampled_from([0, 0, 1, 1, 2, 5, 17]), st.integers(0, 25))
segments_of = st.lists(st.tuples(st.integers(0, 110), lengths), min_size=1, max_size=3).filter(
    lambda segments: any(length for _, length in segments)
)


@settings(max_examples=15)
@given(
    segments=segments_of,
    heads=st.sampled_from(HEADS),
    how=st.builds(
        Attention,
        scale=st.just(0.3),
        window=st.sampled_from([0, 1, 5, 70]),
        softcap=st.sampled_from([0.0, 2.0]),
        causal=st.booleans(),
    ),
    padding=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
def test_attention_equals_the_reference_however_it_is_divided(
    segments: list[tuple[int, int]],
    heads: tuple[int, int],
    how: Attention,
    padding: int,
    seed: int,
) -> None:
    at = layout(segments, heads, padding=padding, seed=seed)
    with poisoned():
        apart, together = (attended(at, how, walks=walks) for walks in (False, True))
    assert torch.equal(apart, together)
    assert rms_ratio(apart, expected(at, how)) < 1e-6


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 6e-3), (torch.float16, 8e-4)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_element_type_and_head_size(
    dtype: torch.dtype, bound: float, dim: int, causal: bool
) -> None:
    at = layout([(0, 1), (31, 2), (0, 0), (100, 23)], (6, 2), dim, dtype, padding=2)
    # Strided like the model's own: heads before tokens.
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (at.q, at.k, at.v))
    how = Attention(scale=dim**-0.5, causal=causal)
    with poisoned(split=128):
        ours = paged_attention(at.device, at.kv, q, k, v, how)
    assert rms_ratio(ours[at.rows], expected(at, how)) < bound


def test_a_long_context_is_split_where_it_is_in_use() -> None:
    at = layout([(1200, 3), (511, 1), (512, 2)], (2, 1))
    how = Attention(scale=0.25)
    with poisoned(triton_splits.SPLIT):
        ours = attended(at, how)
    assert rms_ratio(ours, expected(at, how)) < 1e-6


def test_a_crowd_is_not_split() -> None:
    at = layout([(700, 4)], (2, 1))
    crowded = (1000, 8, 2)
    assert triton_attention._is_crowded(crowded, at.q.numel())
    assert triton_attention._is_crowded((1, 8, 400), 2**20)
    assert not triton_attention._is_crowded((1, 8, 400), at.q.numel())
    assert not triton_attention._is_crowded((1000, 8, 1), at.q.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40])
def test_a_row_depends_on_its_request_alone(dtype: torch.dtype, window: int) -> None:
    """To the bit: one token a step, all in one step, and in a crowd."""
    how = Attention(scale=0.125, window=window)
    whole = layout([(150, 7)], (6, 2), 64, dtype)
    crowd = layout([(3, 30), (150, 7), (90, 1), (0, 0)], (6, 2), 64, dtype, padding=4)
    begin = int(crowd.device.start[1])
    for mine, theirs in ((whole.q, crowd.q), (whole.k, crowd.k), (whole.v, crowd.v)):
        theirs[begin : begin + 7] = mine
    for mine, other in zip(whole.device.table[0], crowd.device.table[1].tolist(), strict=True):
        crowd.kv.k_pages[other] = whole.kv.k_pages[mine]
        crowd.kv.v_pages[other] = whole.kv.v_pages[mine]
    with poisoned():
        at_once = paged_attention(whole.device, whole.kv, whole.q, whole.k, whole.v, how)
        crowded = paged_attention(crowd.device, crowd.kv, crowd.q, crowd.k, crowd.v, how)
        assert torch.equal(crowded[begin : begin + 7], at_once)
        assert torch.equal(attend(whole.device, whole.kv, whole.q, how, walks=True), at_once)
        for row in range(7):
            step = dataclasses.replace(
                whole.device,
                length=torch.tensor([1], dtype=torch.int32),
                context=torch.tensor([150 + row], dtype=torch.int32),
                segment_of=torch.zeros(1, dtype=torch.int32),
                num_tokens=1,
                max_length=1,
            )
            q, k, v = (each[row : row + 1] for each in (whole.q, whole.k, whole.v))
            alone = paged_attention(step, whole.kv, q, k, v, how)
            assert torch.equal(alone[0], at_once[row])


def test_inputs_are_left_alone() -> None:
    at = layout([(60, 5), (0, 0), (5, 20)], padding=3)
    inputs = {field.name: getattr(at.device, field.name) for field in dataclasses.fields(at.device)}
    tensors: dict[str, Any] = {"q": at.q, "k": at.k, "v": at.v}
    tensors |= {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}
    paged_attention(at.device, at.kv, at.q, at.k, at.v, Attention(scale=0.3))
    for name, tensor in tensors.items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


def test_pages_lie_farther_apart_than_32_bits_count(tmp_path: Path) -> None:
    """In a file with holes, which takes neither memory nor disk."""
    at = layout([(40, 3)], (2, 2), dim=32, dtype=torch.float16)
    far = 2**31 // at.kv.k_pages[0].numel() + 1
    pages = []
    for name, near in (("k", at.kv.k_pages), ("v", at.kv.v_pages)):
        size = (far + len(near)) * near[0].numel()
        file = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=near.dtype)
        pages.append(file.view(-1, *near.shape[1:]))
        pages[-1][far:] = near
    step = dataclasses.replace(at.device, table=at.device.table + far)
    how = Attention(scale=0.3)
    ours = paged_attention(step, KVLayer(*pages), at.q, at.k, at.v, how)
    assert rms_ratio(ours, expected(at, how)) < 2e-3
    assert at.device.table.shape[1] == -(-43 // PAGE)
