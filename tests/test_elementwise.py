"""The compiled small operations equal their references, and a fused model equals the unfused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, VOCABULARY, tiny_llama, tiny_model
from torch import nn

from adaflash_batch.engine.fused_layer import FusedLayer
from adaflash_batch.engine.packed_linear import can_pack, pack
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels import elementwise
from adaflash_batch.kernels.paged_attention import PackedStep

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    error = (ours.double() - reference.double()).pow(2).mean().sqrt()
    scale = reference.double().pow(2).mean().sqrt()
    assert error <= BOUNDS[ours.dtype] * scale


any_type = st.sampled_from(list(BOUNDS))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), dtype=any_type)
def test_norms_equal_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (normal(rows, width, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = normal(width, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    assert_close(
        elementwise.rms_norm(x, weight, 1e-5), elementwise.rms_norm_reference(x, weight, 1e-5)
    )
    total, out = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    expected_total, expected = elementwise.add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_close(out, expected)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), dtype=any_type)
def test_silu_mul_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(rows, 2 * width, dtype=dtype) * 6
    assert_close(elementwise.silu_mul(gate_up), elementwise.silu_mul_reference(gate_up))


def test_silu_at_the_ends() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, *([1.0] * 5)]])
    expected = pytest.approx([0.0, 0.0, 0.0, 100.0, 1e4], abs=1e-30)
    assert elementwise.silu_mul(gate_up)[0].tolist() == expected
    assert elementwise.silu_mul(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 2)]),
    dim=st.sampled_from([2, 8, 64]),
    normed=st.booleans(),
    dtype=any_type,
)
def test_rotation_equals_the_reference(
    tokens: int, heads: tuple[int, int], dim: int, normed: bool, dtype: torch.dtype
) -> None:
    qkv = normal(tokens, (heads[0] + 2 * heads[1]) * dim, dtype=dtype)
    cos, sin = (normal(tokens, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    weights = normal(dim, dtype=dtype, seed=3), normal(dim, dtype=dtype, seed=4)
    norms = weights if normed else None
    ours = elementwise.rotate(qkv, cos, sin, *heads, norms, 1e-6)
    assert_close(ours, elementwise.rotate_reference(qkv, cos, sin, *heads, norms, 1e-6))


def fused_layers(target: Target) -> int:
    return sum(isinstance(module, FusedLayer) for module in target._model.modules())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_known_layers_are_fused_and_others_left_alone(architecture: str) -> None:
    target = Target.of(tiny_model(architecture), architecture)
    is_llama_like = architecture in ("llama", "mistral", "qwen2", "qwen3")
    assert fused_layers(target) == (target.num_layers if is_llama_like else 0)


@pytest.mark.parametrize("change", ["hidden_act", "mlp_bias"])
def test_layers_that_differ_from_the_known_ones_are_not_fused(change: str) -> None:
    """They still decode: `Target.of` compares their logits with the model's own."""
    import transformers

    _, fields = ARCHITECTURES["llama"]
    extra: dict[str, Any] = {"hidden_act": "gelu"} if change == "hidden_act" else {change: True}
    config = transformers.LlamaConfig(**fields, **extra)
    target = Target.of(transformers.LlamaForCausalLM(config), "changed")
    assert fused_layers(target) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_models_pack_their_weights_and_keep_their_logits(architecture: str) -> None:
    # Target.of refuses a model whose logits change by more than rounding.
    target = Target.of(tiny_model(architecture).bfloat16(), architecture)
    assert bool(target.packed_linears()) == can_pack(torch.bfloat16, CPU)


@pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="no bfloat16 products here")
def test_a_packed_product_does_not_depend_on_the_rows_beside_it() -> None:
    """Else a text in bfloat16 would depend on what runs at the same time, and on speculation."""
    linear = nn.Linear(1536, 576, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    packed = pack([linear])
    # Sums of large numbers that nearly cancel: another order of summation is seen at once.
    x = torch.randn(64, 1536, generator=torch.Generator().manual_seed(0)).pow(5).bfloat16()
    whole = packed(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 16, 33):
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
    assert torch.equal(packed(x[None, :1]), whole[None, :1])


@pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="no bfloat16 products here")
def test_a_pass_in_bfloat16_is_the_same_bit_for_bit_in_any_company() -> None:
    model = tiny_llama(3, hidden_size=64, intermediate_size=192).bfloat16()
    target = Target.of(model, "tiny llama")
    ids = torch.randint(0, VOCABULARY, (24,), generator=torch.Generator().manual_seed(1))

    def logits(pieces: list[int]) -> torch.Tensor:
        kv, found, begin = target.new_kv(1), [], 0
        for count in pieces:
            start, length, context = np.array([[0], [count], [begin]], dtype=np.int32)
            step = PackedStep(start, length, context, np.zeros((1, 1), dtype=np.int32))
            rows = torch.arange(count)
            found.append(target.forward(ids[begin : begin + count], rows + begin, step, kv, rows))
            begin += count
        return torch.cat(found)

    whole = logits([24])
    for pieces in ([1] * 24, [2] * 12, [1, 2, 3, 4, 5, 9], [23, 1]):
        assert torch.equal(logits(pieces), whole), pieces


def test_a_packed_linear_equals_the_linears() -> None:
    if not can_pack(torch.bfloat16, CPU):
        pytest.skip("this processor has no bf16 matrix kernels in oneDNN")
    for has_bias in (False, True):
        linears = [torch.nn.Linear(24, width, bias=has_bias).bfloat16() for width in (8, 40)]
        x = normal(3, 24, dtype=torch.bfloat16)
        with torch.inference_mode():
            expected = torch.cat([linear(x) for linear in linears], dim=-1)
            assert_close(pack(linears)(x), expected)
