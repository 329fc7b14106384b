"""Interpreted kernels that store keys and values equal their references and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from device_steps import Layout, layout, rms_ratio
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash_batch.kernels.paged_attention import (
    KVLayer,
    rotate_and_store_reference,
    store_kv_reference,
)
from adaflash_batch.kernels.triton_store import rotate_and_store, store_kv

segments_of = st.lists(
    st.tuples(st.integers(0, 80), st.sampled_from([0, 1, 5, 33])), min_size=1, max_size=4
).filter(lambda segments: any(length for _, length in segments))


def copied(kv: KVLayer, dtype: torch.dtype | None = None) -> KVLayer:
    return KVLayer(*(pages.clone().to(dtype) for pages in (kv.k_pages, kv.v_pages)))


def assert_same_pages(ours: KVLayer, theirs: KVLayer, bound: float = 0.0) -> None:
    """What nobody wrote is NaN in both."""
    for mine, other in ((ours.k_pages, theirs.k_pages), (ours.v_pages, theirs.v_pages)):
        assert torch.equal(mine.isnan(), other.isnan())
        assert rms_ratio(mine.nan_to_num(0.0), other.nan_to_num(0.0)) <= bound


@settings(max_examples=20)
@given(
    segments=segments_of,
    kv_heads=st.sampled_from([1, 3]),
    dim=st.sampled_from([16, 80]),
    padding=st.sampled_from([0, 5]),
)
def test_storing_equals_the_reference(
    segments: list[tuple[int, int]], kv_heads: int, dim: int, padding: int
) -> None:
    at = layout(segments, (kv_heads, kv_heads), dim, torch.bfloat16, padding=padding)
    theirs = copied(at.kv)
    k = at.k.transpose(0, 1).contiguous().transpose(0, 1)
    store_kv(at.device, at.kv, k, at.v)
    store_kv_reference(at.packed, theirs, at.k, at.v)
    assert_same_pages(at.kv, theirs)


def projections(
    at: Layout, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values side by side, NaN where there is padding, and a rotation."""
    draw = torch.Generator().manual_seed(3)
    tokens = at.device.num_tokens
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=draw).to(dtype)
    qkv[at.device.segment_of < 0] = float("nan")
    angles = torch.randn(tokens, dim, generator=draw)
    return qkv, angles.cos().to(dtype), angles.sin().to(dtype)


# The interpreter cuts bfloat16 off where GPUs round: three times here, by up to 2 ** -7 each.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1.2e-2), (torch.float16, 8e-4)]
)
@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("heads", [0, 6])
def test_rotating_and_storing_equals_the_reference(
    dtype: torch.dtype, bound: float, dim: int, has_norms: bool, heads: int
) -> None:
    at = layout([(30, 5), (0, 0), (0, 1), (64, 17)], (2, 2), dim, dtype, padding=3)
    qkv, cos, sin = projections(at, heads, 2, dim, dtype)
    given_qkv = qkv.clone()
    norms = None
    if has_norms:
        weights = torch.randn(2, dim, generator=torch.Generator().manual_seed(4)).to(dtype)
        norms = (weights[0], weights[1])
    exact = None if norms is None else (norms[0].double(), norms[1].double())
    theirs = copied(at.kv, torch.float64)
    rotation = (cos.double(), sin.double())
    wanted = rotate_and_store_reference(
        at.packed, theirs, qkv.double(), *rotation, heads, exact, 1e-6
    )
    ours = rotate_and_store(at.device, at.kv, qkv, cos, sin, heads, norms, 1e-6)
    assert ours.shape == (at.device.num_tokens, heads, dim)
    assert heads == 0 or rms_ratio(ours[at.rows], wanted[at.rows]) < bound
    assert_same_pages(at.kv, theirs, bound)
    assert torch.equal(qkv.nan_to_num(7.0), given_qkv.nan_to_num(7.0))
