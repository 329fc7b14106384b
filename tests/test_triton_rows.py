"""Operations on rows in Triton equal their references, and no row depends on the others."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from adaflash_batch.kernels import elementwise, triton_elementwise
from adaflash_batch.kernels.triton_linear import linear, linear_reference

# Triton's interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2), (torch.float16, 1e-3)]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    assert ours.shape == reference.shape
    difference = (ours.double() - reference.double()).pow(2).mean().sqrt()
    return float(difference / reference.double().pow(2).mean().sqrt())


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("width", [1, 48, 65])
def test_norms(dtype: torch.dtype, bound: float, width: int) -> None:
    x, residual = (normal(3, width, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = normal(width, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    ours = triton_elementwise.rms_norm(x, weight, 1e-5)
    wide = elementwise.rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert error(ours, wide) < bound
    total, out = triton_elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert error(total, (x + residual).double()) < bound
    assert torch.equal(out, triton_elementwise.rms_norm(total, weight, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_gating_and_rotation(dtype: torch.dtype, bound: float) -> None:
    gate_up = normal(3, 2 * 37, dtype=dtype)
    gated = elementwise.silu_mul_reference(gate_up.double())
    assert error(triton_elementwise.silu_mul(gate_up), gated) < bound
    heads, kv_heads, dim, tokens = 3, 2, 12, 4
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = normal(tokens, dim // 2, dtype=torch.float32)
    angles = torch.cat((angles, angles), dim=-1)
    norms = normal(dim, dtype=dtype, seed=3), normal(dim, dtype=dtype, seed=4)
    for given in (None, norms):
        table = angles.cos().to(dtype), angles.sin().to(dtype)
        ours = triton_elementwise.rotate(qkv, *table, heads, kv_heads, given, 1e-5)
        doubles = None if given is None else (given[0].double(), given[1].double())
        wide = [each.double() for each in table]
        reference = elementwise.rotate_reference(
            qkv.double(), wide[0], wide[1], heads, kv_heads, doubles, 1e-5
        )
        assert error(ours, reference) < bound


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("sizes", [(1, 7, 5), (3, 100, 70), (66, 64, 33)])
def test_linear(dtype: torch.dtype, bound: float, sizes: tuple[int, int, int]) -> None:
    rows, inputs, outputs = sizes
    x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, seed=1)
    for bias in (None, normal(outputs, dtype=dtype, seed=2)):
        wide = None if bias is None else bias.double()
        reference = linear_reference(x.double(), weight.double(), wide)
        assert error(linear(x, weight, bias), reference) < bound


@pytest.mark.parametrize("rows", [2, 65])
def test_a_row_is_the_same_alone(rows: int) -> None:
    x, weight = normal(rows, 100, dtype=torch.bfloat16), normal(40, 100, dtype=torch.bfloat16)
    together = linear(x, weight, None)
    for row in (0, rows - 1):
        assert torch.equal(linear(x[row : row + 1], weight, None)[0], together[row])
