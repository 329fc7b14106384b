"""The compiled attention equals its PyTorch reference, over ragged layouts and poisoned pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import (
    Attention,
    KVLayer,
    PackedStep,
    paged_attention,
    paged_attention_reference,
    store_kv,
    store_kv_reference,
    unavailable_reason,
)


def layout(segments: list[tuple[int, int]], spare: int = 3) -> tuple[PackedStep, int]:
    """Segments of (context, length) on shuffled pages; also the number of pages."""
    lengths = np.array([length for _, length in segments], dtype=np.int32)
    contexts = np.array([context for context, _ in segments], dtype=np.int32)
    counts = [-(-(context + length) // PAGE) for context, length in segments]
    pages = np.random.default_rng(0).permutation(sum(counts) + spare).astype(np.int32)
    table = np.full((len(segments), max(counts)), -1, dtype=np.int32)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = pages[used : used + count]
        used += count
    start = (np.cumsum(lengths) - lengths).astype(np.int32)
    return PackedStep(start, lengths, contexts, table), len(pages)


def rms_ratio(ours: torch.Tensor, reference: torch.Tensor) -> float:
    error = (ours.double() - reference.double()).pow(2).mean().sqrt()
    return float(error / reference.double().pow(2).mean().sqrt())


def filled(
    segments: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[PackedStep, KVLayer, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step whose contexts are stored already; every slot that nobody wrote holds NaN."""
    step, num_pages = layout(segments)
    kv = KVLayer.empty(num_pages, kv_heads, dim, dtype, torch.device("cpu"))
    kv.k_pages.fill_(float("nan"))
    kv.v_pages.fill_(float("nan"))
    history = [context for context, _ in segments]
    before = PackedStep(
        (np.cumsum(history) - history).astype(np.int32),
        np.array(history, dtype=np.int32),
        np.zeros(len(segments), dtype=np.int32),
        step.table,
    )
    generator = torch.Generator().manual_seed(1)

    def normal(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, width, dim, generator=generator).to(dtype)

    store_kv_reference(before, kv, normal(sum(history), kv_heads), normal(sum(history), kv_heads))
    tokens = int(step.length.sum())
    return step, kv, normal(tokens, heads), normal(tokens, kv_heads), normal(tokens, kv_heads)


@settings(max_examples=40, deadline=None)
@given(
    segments=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4), (7, 1)]),
    window=st.sampled_from([0, 1, 5, 33]),
    softcap=st.sampled_from([0.0, 2.0]),
    causal=st.booleans(),
)
def test_compiled_attention_equals_the_reference(
    segments: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int,
    softcap: float,
    causal: bool,
) -> None:
    assert unavailable_reason(torch.float32, 16) is None
    step, kv, q, k, v = filled(segments, *heads, 16, torch.float32)
    how = Attention(scale=0.3, window=window, softcap=softcap, causal=causal)
    ours = paged_attention(step, kv, q, k, v, how)
    reference = paged_attention_reference(step, kv, q, how)
    assert not reference.isnan().any()
    assert rms_ratio(ours, reference) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_every_element_type_and_head_size(dtype: torch.dtype, bound: float, dim: int) -> None:
    step, kv, q, k, v = filled([(0, 1), (31, 2), (100, 9)], 6, 2, dim, dtype)
    # Strided like the model's own: heads before tokens.
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    how = Attention(scale=dim**-0.5)
    ours = paged_attention(step, kv, q, k, v, how)
    exact = KVLayer(kv.k_pages.double(), kv.v_pages.double())
    assert rms_ratio(ours, paged_attention_reference(step, exact, q.double(), how)) < bound


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    alone = filled([(50, 1)], 9, 3, 64, torch.float32)
    crowd = filled([(50, 1), (3, 7), (90, 33)], 9, 3, 64, torch.float32)
    for ours, theirs in zip(alone[2:], crowd[2:], strict=True):
        theirs[:1] = ours[:1]
    page_of = crowd[0].table[0, :2].tolist()
    for mine, other in zip(alone[0].table[0].tolist(), page_of, strict=True):
        crowd[1].k_pages[other] = alone[1].k_pages[mine]
        crowd[1].v_pages[other] = alone[1].v_pages[mine]
    how = Attention(scale=0.125)
    assert torch.equal(paged_attention(*alone, how)[0], paged_attention(*crowd, how)[0])


def test_storing_equals_the_reference_and_touches_nothing_else() -> None:
    step, kv, _, k, v = filled([(30, 5), (0, 1)], 2, 2, 16, torch.float32)
    other = KVLayer(kv.k_pages.clone(), kv.v_pages.clone())
    store_kv(step, kv, k, v)
    store_kv_reference(step, other, k, v)
    assert torch.equal(kv.k_pages.nan_to_num(7.0), other.k_pages.nan_to_num(7.0))
    assert torch.equal(kv.v_pages.nan_to_num(7.0), other.v_pages.nan_to_num(7.0))
    assert kv.k_pages.isnan().any()
