"""The drafter network equals its reference, packed and fused, and learns everywhere."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import CAUSAL, DFLASH2, DSPARK, TINY, WINDOWED, packed_block, random_drafter, random_rows

from adaflash_batch.drafter.model import DrafterConfig, build_target_layer_ids, initialise
from adaflash_batch.drafter.reference import reference_block
from adaflash_batch.errors import ConfigError

DFLASH2_PARTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 16,
}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "config",
    [TINY, WINDOWED, DSPARK, DFLASH2, CAUSAL],
    ids=["full", "windowed", "dspark", "dflash2", "causal"],
)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_packed_blocks_equal_the_dense_reference(
    config: DrafterConfig, dtype: torch.dtype, fused: bool
) -> None:
    model = random_drafter(config, dtype)
    if fused:
        model.fuse()
    lengths, starts = [7, 0, 1, 20], [0, 0, 3, 1000]
    with torch.no_grad():
        contexts = [model.context(random_rows(n, config.num_features, dtype, n)) for n in lengths]
        blocks = [random_rows(5, config.hidden_size, dtype, 100 + n) for n in lengths]
        packed = packed_block(model, contexts, blocks, starts)
        for index, output in enumerate(torch.split(packed, 5)):
            expected = reference_block(model, contexts[index], blocks[index], starts[index])
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(
                output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )


def test_block_without_context_equals_a_bidirectional_qwen3() -> None:
    """The layers, norms and rotation are Qwen3's: an independent implementation agrees."""
    from transformers import Qwen3Config, Qwen3Model

    model = random_drafter(TINY, torch.float32)
    qwen = Qwen3Model(
        Qwen3Config(
            hidden_size=TINY.hidden_size,
            intermediate_size=TINY.intermediate_size,
            num_hidden_layers=TINY.num_hidden_layers,
            num_attention_heads=TINY.num_attention_heads,
            num_key_value_heads=TINY.num_key_value_heads,
            head_dim=TINY.head_dim,
            rms_norm_eps=TINY.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": TINY.rope_theta},
            vocab_size=TINY.vocab_size,
        )
    )
    weights = model.state_dict()
    missing = qwen.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["embed_tokens.weight"]
    assert missing.unexpected_keys == ["fc.weight", "hidden_norm.weight"]
    rows = random_rows(5, TINY.hidden_size, torch.float32, 1)
    nothing = torch.empty(0, TINY.hidden_size)
    with torch.no_grad():
        expected = qwen(
            inputs_embeds=rows[None],
            attention_mask=torch.zeros(1, 1, 5, 5),
            position_ids=torch.arange(9, 14)[None],
        ).last_hidden_state[0]
        output = packed_block(model, [nothing], [rows], [9])
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_context_is_the_normed_projection_of_the_features() -> None:
    model = random_drafter(TINY)
    features = random_rows(4, TINY.num_features, torch.float64, 3)
    projected = features @ model.fc.weight.T
    scale = (projected.pow(2).mean(-1, keepdim=True) + TINY.rms_norm_eps).rsqrt()
    expected = projected * scale * model.hidden_norm.weight
    torch.testing.assert_close(model.context(features), expected, atol=1e-12, rtol=1e-12)


def test_rotary_is_a_rotation_by_the_absolute_position() -> None:
    model = random_drafter(TINY)
    positions = torch.tensor([0, 1, 17, 4095])
    cos, sin = model.rotary(positions)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (4, TINY.head_dim)
    angles = torch.tensor(
        [[p * 10000.0 ** (-2 * i / 16) for i in range(8)] * 2 for p in positions.tolist()],
        dtype=torch.float64,
    )
    torch.testing.assert_close(cos.double(), angles.cos(), atol=5e-4, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=5e-4, rtol=0)


def test_context_keys_are_rotated_at_absolute_positions_and_values_are_not() -> None:
    model = random_drafter(TINY)
    context = model.context(random_rows(3, TINY.num_features, torch.float64, 5))
    origin = model.rotary(torch.zeros(3, dtype=torch.long))
    k0, v0 = model.context_kv(1, context, *origin)
    k, v = model.context_kv(1, context, *model.rotary(torch.tensor([4, 9, 2])))
    assert k.shape == v.shape == (3, TINY.num_key_value_heads, TINY.head_dim)
    torch.testing.assert_close(v, v0, atol=0, rtol=0)
    for row, position in enumerate([4, 9, 2]):
        as_complex = torch.complex(k0[row, :, :8], k0[row, :, 8:])
        frequencies = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
        turned = as_complex * torch.exp(1j * position * frequencies)
        expected = torch.cat((turned.real, turned.imag), -1)
        torch.testing.assert_close(k[row], expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(shift=st.integers(1, 3000), length=st.integers(0, 12))
def test_only_relative_positions_matter(shift: int, length: int) -> None:
    model = random_drafter(WINDOWED)
    contexts = [random_rows(length, TINY.hidden_size, torch.float64, 1)]
    blocks = [random_rows(5, TINY.hidden_size, torch.float64, 2)]
    with torch.no_grad():
        at_origin = packed_block(model, contexts, blocks, [0])
        shifted = packed_block(model, contexts, blocks, [shift])
    # The angles are float32: their rounding is all that may differ.
    torch.testing.assert_close(shifted, at_origin, atol=5e-3, rtol=5e-3)


def test_the_order_of_the_context_matters() -> None:
    model = random_drafter(TINY)
    context = random_rows(6, TINY.hidden_size, torch.float64, 1)
    rows = random_rows(5, TINY.hidden_size, torch.float64, 2)
    with torch.no_grad():
        forwards = packed_block(model, [context], [rows], [0])
        backwards = packed_block(model, [context.flip(0)], [rows], [0])
    assert (forwards - backwards).abs().max() > 0.05


def test_requests_of_a_batch_do_not_see_each_other() -> None:
    model = random_drafter(TINY)
    contexts = [random_rows(n, TINY.hidden_size, torch.float64, n) for n in (3, 8)]
    blocks = [random_rows(5, TINY.hidden_size, torch.float64, 50 + n) for n in (3, 8)]
    with torch.no_grad():
        both = packed_block(model, contexts, blocks, [0, 0])
        alone = packed_block(model, contexts[1:], blocks[1:], [0])
    torch.testing.assert_close(both[5:], alone, atol=1e-12, rtol=1e-12)


def test_gradients_reach_every_parameter_also_when_fused() -> None:
    gradients = []
    for fused in (False, True):
        model = random_drafter(TINY)
        if fused:
            model.fuse()
        context = model.context(random_rows(6, TINY.num_features, torch.float64, 5))
        rows = random_rows(5, TINY.hidden_size, torch.float64, 6)
        torch.autograd.backward(packed_block(model, [context], [rows], [0]).square().sum())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-12, rtol=1e-12)


def test_new_weights_reach_a_fused_drafter() -> None:
    """Served weights are replaced while a job runs: no stale packed copy may answer."""
    rows = random_rows(5, TINY.hidden_size, torch.float64, 6)
    contexts = [random_rows(4, TINY.hidden_size, torch.float64, 7)]
    served = random_drafter(TINY).fuse()
    newer = random_drafter(TINY)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.mul_(1.3)
        expected = packed_block(newer, contexts, [rows], [0])
        served.load_state_dict(newer.state_dict())
        torch.testing.assert_close(packed_block(served, contexts, [rows], [0]), expected)
        replaced = random_drafter(TINY).fuse()
        replaced.load_state_dict(newer.state_dict(), assign=True)
        torch.testing.assert_close(packed_block(replaced, contexts, [rows], [0]), expected)
        copied = copy.deepcopy(random_drafter(TINY).fuse())
        copied.load_state_dict(newer.state_dict())
        torch.testing.assert_close(packed_block(copied, contexts, [rows], [0]), expected)
        moved = random_drafter(TINY).fuse().float().double()
        moved.load_state_dict(newer.state_dict())
        torch.testing.assert_close(packed_block(moved, contexts, [rows], [0]), expected)


def test_an_optimiser_step_reaches_a_fused_drafter() -> None:
    rows = random_rows(5, TINY.hidden_size, torch.float64, 6)
    contexts = [random_rows(4, TINY.hidden_size, torch.float64, 7)]
    outputs = []
    for fused in (False, True):
        model = random_drafter(TINY)
        if fused:
            model.fuse()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.autograd.backward(packed_block(model, contexts, [rows], [0]).square().sum())
        optimiser.step()
        with torch.no_grad():
            outputs.append(packed_block(model, contexts, [rows], [0]))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-9, rtol=1e-9)


def test_inputs_are_not_written_to() -> None:
    model = random_drafter(TINY).fuse()
    rows = random_rows(5, TINY.hidden_size, torch.float64, 6)
    context = random_rows(4, TINY.hidden_size, torch.float64, 7)
    before = (rows.clone(), context.clone())
    with torch.inference_mode():
        packed_block(model, [context], [rows], [0])
    assert torch.equal(rows, before[0])
    assert torch.equal(context, before[1])


def test_state_dict_has_the_published_names_and_shapes() -> None:
    shapes = {name: tuple(t.shape) for name, t in random_drafter(TINY).state_dict().items()}
    assert shapes.pop("fc.weight") == (48, 3 * 48)
    assert shapes.pop("hidden_norm.weight") == shapes.pop("norm.weight") == (48,)
    per_layer = {
        "input_layernorm.weight": (48,),
        "post_attention_layernorm.weight": (48,),
        "self_attn.q_proj.weight": (96, 48),
        "self_attn.k_proj.weight": (32, 48),
        "self_attn.v_proj.weight": (32, 48),
        "self_attn.o_proj.weight": (48, 96),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (80, 48),
        "mlp.up_proj.weight": (80, 48),
        "mlp.down_proj.weight": (48, 80),
    }
    assert shapes == {
        f"layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in per_layer.items()
    }


def test_initialise_depends_on_its_generator_only() -> None:
    first = initialise(TINY, torch.Generator().manual_seed(7)).state_dict()
    state = torch.get_rng_state()
    torch.manual_seed(123)
    mark = torch.get_rng_state()
    second = initialise(TINY, torch.Generator().manual_seed(7)).state_dict()
    assert torch.equal(torch.get_rng_state(), mark)
    torch.set_rng_state(state)
    other = initialise(TINY, torch.Generator().manual_seed(8)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(48))
    assert 0.015 < first["fc.weight"].std().item() < 0.025


@pytest.mark.parametrize(
    ("num_layers", "n", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (48, 5, (1, 12, 23, 34, 45)),
        (32, 5, (1, 8, 15, 22, 29)),
        (28, 5, (1, 7, 13, 19, 25)),
        (30, 1, (15,)),
    ],
)
def test_target_layer_ids_are_those_of_published_drafters(
    num_layers: int, n: int, expected: tuple[int, ...]
) -> None:
    assert build_target_layer_ids(num_layers, n) == expected


@pytest.mark.parametrize(("num_layers", "n"), [(4, 2), (2, 1), (6, 5), (30, 0)])
def test_too_few_target_layers_are_refused(num_layers: int, n: int) -> None:
    with pytest.raises(ConfigError, match=f"{n} feature layers .* {num_layers} layers"):
        build_target_layer_ids(num_layers, n)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 4}, r"num_attention_heads \(6\) .* num_key_value_heads \(4\)"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"block_size": 1}, "block_size is 1"),
        ({"mask_token_id": 100}, "mask_token_id 100 .* 100"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (3, 1)}, r"\[3, 1\] must increase"),
        ({"target_layer_ids": (1, 5)}, r"\[1, 5\] must lie from 0 to 4.* 6 layers"),
        ({"target_layer_ids": (-1, 2)}, r"\[-1, 2\] must lie from 0"),
        ({"layer_types": ("full_attention",)}, "names 1 layers, num_hidden_layers is 2"),
        ({"layer_types": ("full_attention", "mamba")}, "mamba"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "sliding_window is None"),
        ({"markov_rank": 8}, "belongs to DSpark"),
        ({"enable_confidence_head": True}, "belongs to DSpark"),
        ({"from_anchor": True, "markov_rank": -1}, "markov_rank is -1"),
        ({"from_anchor": True, "block_size": 0}, "it must be 1 or more"),
        ({"from_anchor": True, "markov_rank": 8, "markov_head_type": "lstm"}, "'lstm'"),
        (
            {
                "from_anchor": True,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
            "without a confidence head and a Markov head",
        ),
        (
            {
                "from_anchor": True,
                "enable_confidence_head": True,
                "confidence_temperatures": (1.0,) * 4,
            },
            "has 4 values.* 5 drafts",
        ),
        ({"from_anchor": True, "output_multiplier": 0.5}, "DSpark knows no scales"),
        ({"output_multiplier": 0.0}, "output_multiplier is 0.0"),
        ({"final_logit_softcapping": -3.0}, "final_logit_softcapping is -3.0"),
        ({"conv_kernel_size": 2}, "all of its parts or none"),
        ({"has_causal_windows": True}, "only DFlash 2"),
        ({**DFLASH2_PARTS, "from_anchor": True}, "DSpark or DFlash 2, not both"),
        ({**DFLASH2_PARTS, "conv_group_size": 7}, "7 does not divide hidden_size 48"),
        ({**DFLASH2_PARTS, "conv_kernel_size": 6}, "6 is longer than the block of 5"),
        ({**DFLASH2_PARTS, "selector_top_k": 101}, "101 is above the vocabulary of 100"),
    ],
)
def test_contradicting_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


def test_windows_are_kept_per_layer() -> None:
    assert TINY.windows == (None, None)
    assert WINDOWED.windows == (4, None)
