"""Products in tiles equal their reference, layers in one call equal layers run one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, VOCABULARY, tiny_llama, tiny_model

from adaflash_batch.engine.packed_linear import TiledLinear, compress
from adaflash_batch.engine.profile import about
from adaflash_batch.engine.stack import StackedModel
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels import compressed_tiles, native, tiled_linear
from adaflash_batch.kernels.paged_attention import PackedStep
from adaflash_batch.kernels.tiled_linear import TiledProduct

needs_tiles = pytest.mark.skipif(
    not tiled_linear.is_available(), reason="no AVX-512 BF16 here, or AMX, or no compiler"
)
needs_compression = pytest.mark.skipif(
    not (tiled_linear.is_available() and compressed_tiles.is_available()),
    reason="no AVX-512 VBMI here, or no tiles",
)
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@given(outputs=st.integers(1, 100), pairs=st.integers(1, 40))
def test_tiles_hold_the_weight(outputs: int, pairs: int) -> None:
    weight = normal(outputs, 2 * pairs)
    tiles = tiled_linear.tiled(weight)
    assert tiles.shape == (-(-outputs // 32), pairs, 32, 2)
    assert torch.equal(tiled_linear.untiled(tiles, outputs), weight)


@needs_tiles
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    pairs=st.integers(1, 70),
    outputs=st.integers(1, 100),
    bias=st.booleans(),
)
def test_a_product_equals_its_reference(rows: int, pairs: int, outputs: int, bias: bool) -> None:
    x, weight = normal(rows, 2 * pairs), tiled_linear.tiled(normal(outputs, 2 * pairs, seed=1))
    added = normal(outputs, seed=2) if bias else None
    linear = TiledProduct(weight, added, outputs)
    ours = tiled_linear.tiled_linear(x, linear)
    expected = tiled_linear.tiled_linear_reference(x, linear)
    error = (ours.float() - expected.float()).pow(2).mean().sqrt()
    assert error <= 4e-3 * expected.float().pow(2).mean().sqrt() + 1e-6


@needs_tiles
def test_a_product_leaves_its_inputs_and_reads_strided_ones() -> None:
    x, weight = normal(6, 4, 64), tiled_linear.tiled(normal(40, 64, seed=1))
    before = x.clone(), weight.clone()
    strided = x.transpose(0, 1)
    linear = TiledProduct(weight, None, 40)
    out = tiled_linear.tiled_linear(strided, linear)
    assert out.shape == (4, 6, 40)
    assert torch.equal(out, tiled_linear.tiled_linear(strided.contiguous(), linear))
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def odd_weight(outputs: int, inputs: int, share: float, seed: int) -> torch.Tensor:
    """Of usual numbers and, to this share, of any bits: tiny, huge, infinite, no numbers."""
    dice = torch.Generator().manual_seed(seed)
    usual = torch.randn(outputs, inputs, generator=dice).mul(0.05).bfloat16()
    anything = torch.randint(-(1 << 15), 1 << 15, (outputs, inputs), generator=dice).short()
    is_odd = torch.rand(outputs, inputs, generator=dice) < share
    return torch.where(is_odd, anything.view(torch.bfloat16), usual)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


@needs_compression
@settings(deadline=None)
@given(
    outputs=st.integers(1, 100),
    pairs=st.integers(1, 70),
    share=st.sampled_from([0.0, 1e-3]),
    seed=st.integers(0, 99),
)
def test_compressed_tiles_hold_every_bit(outputs: int, pairs: int, share: float, seed: int) -> None:
    weight = tiled_linear.tiled(odd_weight(outputs, 2 * pairs, share, seed))
    found = compressed_tiles.compressed(weight)
    if found is not None:
        assert torch.equal(bits(compressed_tiles.restored(found)), bits(weight))
        num_bytes = found.blocks.nbytes + found.uppers.nbytes
        assert num_bytes == weight.nbytes * 3 // 4 + 16 * len(weight)


@needs_compression
def test_most_weights_are_compressed_and_those_that_do_not_gain_are_not() -> None:
    weight = tiled_linear.tiled(odd_weight(96, 576, 5e-4, 0))
    found = compressed_tiles.compressed(weight)
    assert found is not None
    assert 0 < len(found.whole) < weight.shape[0] * weight.shape[1] / 10
    anything = tiled_linear.tiled(odd_weight(96, 576, 1.0, 0))
    assert compressed_tiles.compressed(anything) is None


@needs_compression
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 14),
    pairs=st.integers(40, 90),
    outputs=st.integers(1, 100),
    share=st.sampled_from([0.0, 1e-3]),
    seed=st.integers(0, 99),
)
def test_a_product_of_compressed_tiles_is_the_same_to_the_bit(
    rows: int, pairs: int, outputs: int, share: float, seed: int
) -> None:
    weight = odd_weight(outputs, 2 * pairs, share, seed)
    x, tiles = normal(rows, 2 * pairs, seed=seed), tiled_linear.tiled(weight.nan_to_num())
    plain = TiledProduct(tiles, normal(outputs, seed=2), outputs)
    found = compressed_tiles.compressed(tiles)
    if found is None:
        return
    poisoned = torch.full_like(tiles, torch.nan)  # few rows never read the weight itself
    compressed = replace(plain, weight=poisoned if rows <= 12 else tiles, compressed=found)
    ours = tiled_linear.tiled_linear(x, compressed)
    assert torch.equal(bits(ours), bits(tiled_linear.tiled_linear(x, plain)))


@needs_compression
def test_only_models_with_room_for_it_are_compressed() -> None:
    """And the engine says that step costs of the two are not the same."""
    small, large = (Target.of(tiny_llama(2).bfloat16(), "llama") for _ in range(2))
    assert all(each.product.compressed is not None for each in tiled_layers(small))
    model = tiny_llama(2).bfloat16()
    for name in ("q_proj", "k_proj"):
        linear = getattr(model.model.layers[0].self_attn, name)
        packed = TiledLinear([linear])
        compress(packed, packed.product.weight.nbytes * 0.75 - 1)
        assert packed.product.compressed is None
        compress(packed, packed.product.weight.nbytes * 0.75)
        assert packed.product.compressed is not None
    for each in tiled_layers(large):
        each.product = replace(each.product, compressed=None)
    assert about(small, "") != about(large, "")


def tiled_layers(target: Target) -> list[TiledLinear]:
    return [each for each in target.packed_linears() if isinstance(each, TiledLinear)]


def test_processors_without_the_instructions_or_with_better_ones_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for flags in ({"avx512f"}, {"avx512_bf16", "amx_bf16"}, set[str]()):
        monkeypatch.setattr(native, "processor_flags", lambda flags=flags: frozenset(flags))
        assert not tiled_linear.is_available.__wrapped__()


def targets(architecture: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Target, Target]:
    """The model with its layers in one call, and one by one."""
    fields = {"hidden_size": 64, "intermediate_size": 192}
    whole = [
        tiny_llama(3, **fields) if architecture == "llama" else tiny_model(architecture)
        for _ in range(2)
    ]
    stacked = Target.of(whole[0].bfloat16(), architecture)
    with monkeypatch.context() as patch:
        patch.setattr(StackedModel, "of", staticmethod(lambda _model: None))
        return stacked, Target.of(whole[1].bfloat16(), architecture)


@needs_tiles
@pytest.mark.parametrize("architecture", LLAMA_LIKE)
def test_a_stack_computes_what_its_layers_do(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: logits, keys and values, tapped layers, over two passes of ragged pieces."""
    stacked, layered = targets(architecture, monkeypatch)
    assert stacked._stacked is not None
    assert layered._stacked is None
    dice, layers = torch.Generator().manual_seed(1), (0, 2)
    both = [(target, target.new_kv(4)) for target in (stacked, layered)]
    for target, kv in both:
        target.tap(layers)
        for layer in kv:
            layer.k_pages.zero_()
            layer.v_pages.zero_()
    table = np.array([[2, 3], [1, 0]], dtype=np.int32)
    for lengths, contexts in (([40, 17], [0, 0]), ([1, 5], [40, 17])):
        length, context = (np.array(each, dtype=np.int32) for each in (lengths, contexts))
        start = np.array([0, lengths[0]], dtype=np.int32)
        ids = torch.randint(0, VOCABULARY, (sum(lengths),), generator=dice)
        pieces = zip(contexts, lengths, strict=True)
        positions = torch.cat([torch.arange(begin, begin + count) for begin, count in pieces])
        rows = torch.tensor([0, sum(lengths) - 1])
        step = PackedStep(start, length, context, table)
        with torch.inference_mode():
            found = [target.forward(ids, positions, step, kv, rows) for target, kv in both]
        assert torch.equal(*found)
        for asked in (layers, layers[::-1], layers[:1]):
            assert torch.equal(*(target.tapped(asked, rows) for target, _ in both))
        assert torch.equal(*(target.tapped(layers, slice(3)) for target, _ in both))
        for ours, theirs in zip(both[0][1], both[1][1], strict=True):
            assert torch.equal(ours.k_pages, theirs.k_pages)
            assert torch.equal(ours.v_pages, theirs.v_pages)


@needs_tiles
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(LLAMA_LIKE)))
def test_other_models_are_run_by_their_own_forward(architecture: str) -> None:
    assert Target.of(tiny_model(architecture).bfloat16(), architecture)._stacked is None


def test_so_are_models_in_float32() -> None:
    assert Target.of(tiny_model("llama"), "llama")._stacked is None
