"""Folders of the published layouts of DSpark and DFlash 2, written by hand, smaller."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import BACKBONE_SHAPES
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash_batch.drafter.checkpoint import TargetFacts, load, save
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.growing import grow_dflash2
from adaflash_batch.drafter.model import initialise
from adaflash_batch.errors import ConfigError

TARGET = TargetFacts(vocab_size=300, hidden_size=64, num_hidden_layers=12, name="tiny")
BACKBONE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 300,
}
DEEPSPEC = BACKBONE | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "layer_types": ["full_attention"] * 2,
    "markov_head_type": "vanilla",
    "markov_rank": 24,
    "mask_token_id": 299,
    "num_anchors": 512,
    "num_target_layers": 12,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "target_layer_ids": [1, 5, 9],
}
# Published as `dflash_*_block7`: the same class without its heads.
BLOCK7 = DEEPSPEC | {
    "confidence_head_with_markov": False,
    "enable_confidence_head": False,
    "markov_rank": 0,
}
SPECFORGE = BACKBONE | {
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7,
    "dflash_config": {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 24,
        "mask_token_id": 299,
        "projector_type": "dspark",
        "target_layer_ids": [1, 5, 9],
    },
    "layer_types": ["full_attention"] * 2,
    "num_target_layers": 12,
    "rope_scaling": None,
    "rope_theta": 1000000,
}
DFLASH2 = BACKBONE | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "input_embedding_scale": 1.0,
        "mask_token_id": 299,
        "output_multiplier": 0.19611613513818404,
        "selector_rank": 24,
        "selector_top_k": 16,
        "target_layer_ids": [1, 5, 9],
    },
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
}
SHAPE = DrafterConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    vocab_size=300,
    block_size=7,
    mask_token_id=299,
    target_layer_ids=(1, 5, 9),
    num_target_layers=12,
    max_position_embeddings=40960,
)
AS_DSPARK = dataclasses.replace(
    SHAPE,
    from_anchor=True,
    markov_rank=24,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
AS_BLOCK7 = dataclasses.replace(SHAPE, from_anchor=True)
AS_DFLASH2 = dataclasses.replace(
    SHAPE,
    block_size=8,
    layer_types=("sliding_attention",) * 2,
    sliding_window=2048,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=24,
    selector_top_k=16,
    output_multiplier=0.19611613513818404,
    final_logit_softcapping=20.0,
)

COPIES = {"embed_tokens.weight": (300, 64), "lm_head.weight": (300, 64)}
MARKOV = {"markov_head.markov_w1.weight": (300, 24), "markov_head.markov_w2.weight": (300, 24)}
CONFIDENCE = {"confidence_head.proj.weight": (1, 88), "confidence_head.proj.bias": (1,)}
PARTS: dict[str, tuple[int, ...]] = {
    "candidate_selector.hidden_projection.weight": (24, 64),
    "candidate_selector.predecessor_codebook": (300, 24),
    "candidate_selector.successor_codebook": (300, 24),
}
for _layer in range(2):
    for _name in ("attention_conv", "mlp_conv"):
        PARTS |= {
            f"layers.{_layer}.{_name}.base_kernel": (2, 2, 64),
            f"layers.{_layer}.{_name}.kernel_projection.weight": (2 * 2 * 4, 64),
        }

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], DrafterConfig]] = {
    "deepspec": (DEEPSPEC, BACKBONE_SHAPES | COPIES | MARKOV | CONFIDENCE, AS_DSPARK),
    "block7": (BLOCK7, BACKBONE_SHAPES | COPIES, AS_BLOCK7),
    "specforge": (SPECFORGE, BACKBONE_SHAPES | MARKOV | CONFIDENCE, AS_DSPARK),
    "dflash2": (DFLASH2, BACKBONE_SHAPES | PARTS, AS_DFLASH2),
}


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def changed(layout: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A published config with fields set where they stand, or removed where the value is `...`."""
    config = copy.deepcopy(PUBLISHED[layout][0])
    for name, value in changes.items():
        inside = config.get("dflash_config", {})
        place = inside if name in inside else config
        if value is ...:
            place.pop(name)
        else:
            place[name] = value
    return config


@pytest.mark.parametrize("layout", PUBLISHED)
def test_a_published_folder_loads_and_keeps_every_tensor(tmp_path: Path, layout: str) -> None:
    config, shapes, expected = PUBLISHED[layout]
    tensors = random_tensors(shapes)
    model = load(write(tmp_path / "drafter", config, tensors), TARGET, dtype=torch.bfloat16)
    assert model.config == expected
    kept = {name for name in tensors if name not in COPIES}
    assert model.state_dict().keys() == kept
    assert all(torch.equal(model.state_dict()[name], tensors[name]) for name in kept)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("layout", PUBLISHED)
def test_what_is_saved_is_loaded(tmp_path: Path, layout: str) -> None:
    config, shapes, _ = PUBLISHED[layout]
    model = load(
        write(tmp_path / "a", config, random_tensors(shapes)), TARGET, dtype=torch.bfloat16
    )
    save(model.fuse(), tmp_path / "b")
    again = load(tmp_path / "b", TARGET, dtype=torch.bfloat16)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        name: shape for name, shape in shapes.items() if name not in COPIES
    }


@pytest.mark.parametrize(("layout", "written"), [("specforge", SPECFORGE), ("dflash2", DFLASH2)])
def test_saved_fields_stand_where_the_published_ones_do(
    tmp_path: Path, layout: str, written: dict[str, Any]
) -> None:
    config, shapes, _ = PUBLISHED[layout]
    model = load(
        write(tmp_path / "a", config, random_tensors(shapes)), TARGET, dtype=torch.bfloat16
    )
    save(model, tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    told = {"auto_map", "rope_scaling", "initializer_range"}  # says nothing about the drafter
    assert {name: saved.get(name) for name in written.keys() - told - {"dflash_config"}} == {
        name: value for name, value in written.items() if name not in told | {"dflash_config"}
    }
    training_or_usual = {"confidence_head_alpha", "input_embedding_scale"}
    assert saved["dflash_config"] == {
        name: value
        for name, value in written["dflash_config"].items()
        if name not in training_or_usual
    }
    assert ("block_size" in saved) == (layout == "specforge")


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_other_markov_heads_load(tmp_path: Path, kind: str) -> None:
    own: dict[str, tuple[int, ...]] = {
        "gated": {
            "markov_head.gate_proj.weight": (24, 88),
            "markov_head.gate_proj.bias": (24,),
        },
        "rnn": {
            "markov_head.joint_proj.weight": (72, 112),
            "markov_head.joint_proj.bias": (72,),
        },
    }[kind]
    tensors = random_tensors(BACKBONE_SHAPES | MARKOV | CONFIDENCE | own)
    config = changed("specforge", {"markov_head_type": kind})
    model = load(write(tmp_path / "a", config, tensors), TARGET, dtype=torch.bfloat16)
    assert model.config.markov_head_type == kind
    save(model, tmp_path / "b")
    again = load(tmp_path / "b", TARGET, dtype=torch.bfloat16)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(ConfigError, match="markov_head"):
        load(write(tmp_path / "c", changed("specforge", {}), tensors), TARGET, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("dflash2", {"block_size": ..., "conv_kernel_size": 2} | {"max_position_embeddings": ...}),
        ("dflash2", {"num_target_layers": 12, "sample_from_anchor": False}),
        ("deepspec", {"sample_from_anchor": True, "is_causal": False}),
        ("deepspec", {"markov_head_type": "vanilla", "num_anchors": ...}),
        ("block7", {"markov_head_type": ..., "confidence_head_with_markov": True}),
        ("specforge", {"num_target_layers": ..., "auto_map": ...}),
    ],
)
def test_the_same_said_differently_loads_the_same(
    tmp_path: Path, layout: str, changes: dict[str, Any]
) -> None:
    config, shapes, expected = PUBLISHED[layout]
    config = changed(layout, changes)
    if "block_size" not in config.get("dflash_config", {}):
        config["block_size"] = expected.block_size  # z-lab reads it from both places
    folder = write(tmp_path / "drafter", config, random_tensors(shapes))
    loaded = load(folder, TARGET, dtype=torch.float32).config
    longest = expected.max_position_embeddings
    assert dataclasses.replace(loaded, max_position_embeddings=longest) == expected


def test_sliding_layers_of_dflash2_are_causal_where_nothing_is_said(tmp_path: Path) -> None:
    config, shapes, expected = PUBLISHED["dflash2"]
    silent = changed("dflash2", {"is_causal": ...})
    mixed = {"layer_types": ["sliding_attention", "full_attention"]}
    for number, extra in enumerate(({}, mixed)):
        folder = write(tmp_path / f"a{number}", silent | extra, random_tensors(shapes))
        model = load(folder, TARGET, dtype=torch.bfloat16)
        assert model.config.causal == ((True, True), (True, False))[number]
        save(model, tmp_path / f"b{number}")
        assert load(tmp_path / f"b{number}", TARGET, dtype=torch.bfloat16).config == model.config
    assert config["is_causal"] is False
    assert expected.causal == (False, False)


def test_confidence_temperatures_are_kept(tmp_path: Path) -> None:
    temperatures = [1.5, 0.9, 1.5, 1.6, 0.9, 1.4, 1.6]
    config = changed("deepspec", {"confidence_temperatures": temperatures})
    folder = write(tmp_path / "a", config, random_tensors(PUBLISHED["deepspec"][1]))
    model = load(folder, TARGET, dtype=torch.bfloat16)
    assert model.config.confidence_temperatures == tuple(temperatures)
    save(model, tmp_path / "b")
    assert load(tmp_path / "b", TARGET, dtype=torch.bfloat16).config == model.config


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("deepspec", {"markov_rank": ...}, "no markov_rank"),
        ("deepspec", {"markov_head_type": ...}, "no markov_head_type"),
        ("deepspec", {"markov_head_type": "lstm"}, "'lstm'"),
        ("deepspec", {"enable_confidence_head": ...}, "no enable_confidence_head"),
        ("deepspec", {"enable_confidence_head": 1}, "not true or false"),
        ("deepspec", {"enable_confidence_head": False}, "unexpected confidence_head.proj.bias"),
        ("deepspec", {"confidence_head_with_markov": ...}, "no confidence_head_with_markov"),
        ("deepspec", {"confidence_head_with_markov": False}, "[1, 88], config.json makes it"),
        ("deepspec", {"sample_from_anchor": False}, "sample_from_anchor is false"),
        ("deepspec", {"target_layer_ids": [-1, 5, 9]}, "output of the embedding"),
        ("deepspec", {"markov_rank": 16}, "[300, 24], config.json makes it [300, 16]"),
        ("deepspec", {"conv_kernel_size": 2}, "makes it a DFlash 2 drafter"),
        ("deepspec", {"projector_type": "dflash"}, "makes it a DFlash drafter"),
        ("deepspec", {"confidence_temperatures": [1.0]}, "1 values"),
        ("deepspec", {"confidence_temperatures": "hot"}, "not a list of numbers"),
        ("deepspec", {"output_multiplier": 0.5}, "knows no scales"),
        ("deepspec", {"layer_types": ["sliding_attention"] * 2}, "no is_causal"),
        ("deepspec", {"architectures": ["DSparkDraftModel"]}, "unexpected embed_tokens.weight"),
        ("deepspec", {"architectures": ["DFlashDraftModel"]}, "makes it a DSpark drafter"),
        ("block7", {"markov_rank": 24}, "missing markov_head.markov_w1.weight"),
        ("block7", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ("specforge", {"attention_mode": "mla"}, "attention_mode"),
        ("specforge", {"projector_type": "domino"}, "'domino'"),
        ("specforge", {"rope_scaling": {"rope_type": "yarn", "factor": 32}}, "yarn"),
        ("specforge", {"draft_vocab_size": 128}, "draft_vocab_size 128"),
        ("specforge", {"speculators_model_type": "dspark"}, "speculators"),
        ("dflash2", {"conv_kernel_size": ...}, "no conv_kernel_size"),
        ("dflash2", {"conv_kernel_size": 0}, "conv_kernel_size is 0"),
        ("dflash2", {"conv_kernel_size": 3}, "[2, 2, 64], config.json makes it [2, 3, 64]"),
        ("dflash2", {"conv_group_size": 7}, "7 does not divide hidden_size 64"),
        ("dflash2", {"conv_group_size": 8}, "[16, 64], config.json makes it [32, 64]"),
        ("dflash2", {"selector_rank": ...}, "no selector_rank"),
        ("dflash2", {"selector_top_k": ...}, "no selector_top_k"),
        ("dflash2", {"selector_top_k": 301}, "above the vocabulary"),
        ("dflash2", {"sample_from_anchor": True}, "sample_from_anchor is true"),
        ("dflash2", {"markov_rank": 24}, "makes it a DSpark drafter"),
        ("dflash2", {"is_causal": True}, "is_causal"),
        ("dflash2", {"target_layer_ids": ...}, "no target_layer_ids"),
        ("dflash2", {"target_layer_ids": [1, 5, 11]}, "12 layers"),
        ("dflash2", {"architectures": ["DFlashDraftModel"]}, "makes it a DFlash 2 drafter"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, layout: str, changes: dict[str, Any], words: str
) -> None:
    shapes = PUBLISHED[layout][1]
    folder = write(tmp_path / "drafter", changed(layout, changes), random_tensors(shapes))
    with pytest.raises(ConfigError) as caught:
        load(folder, TARGET, dtype=torch.bfloat16)
    assert words in caught.value.message
    assert str(folder) in caught.value.message
    assert not caught.value.message.endswith(".")


def test_block_size_in_two_places_must_agree(tmp_path: Path) -> None:
    config, shapes, _ = PUBLISHED["dflash2"]
    tensors = random_tensors(shapes)
    load(write(tmp_path / "same", config | {"block_size": 8}, tensors), TARGET, dtype=torch.float32)
    folder = write(tmp_path / "other", config | {"block_size": 16}, tensors)
    with pytest.raises(ConfigError, match=r"block_size is 16 .* 8 in dflash_config"):
        load(folder, TARGET, dtype=torch.float32)


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_targets_matrices_are_measured_and_left_out(
    tmp_path: Path, name: str
) -> None:
    config, shapes, _ = PUBLISHED["block7"]
    tensors = random_tensors(shapes)
    poisoned = tensors | {name: torch.full((300, 64), float("nan"))}
    load(write(tmp_path / "unread", config, poisoned), TARGET, dtype=torch.float32)
    del tensors[name]
    load(write(tmp_path / "without", config, tensors), TARGET, dtype=torch.float32)
    folder = write(tmp_path / "wrong", config, tensors | {name: torch.zeros(320, 64)})
    with pytest.raises(ConfigError, match=rf"{name} is \[320, 64\].*\[300, 64\]"):
        load(folder, TARGET, dtype=torch.float32)


def test_a_codebook_called_as_in_memory_is_not_the_published_one(tmp_path: Path) -> None:
    config, shapes, _ = PUBLISHED["dflash2"]
    tensors = random_tensors(shapes)
    name = "candidate_selector.predecessor_codebook"
    tensors[f"{name}.weight"] = tensors.pop(name)
    folder = write(tmp_path / "drafter", config, tensors)
    with pytest.raises(ConfigError, match=rf"missing {name}; unexpected {name}.weight"):
        load(folder, TARGET, dtype=torch.float32)


def test_a_grown_drafter_is_saved_as_dflash2(tmp_path: Path) -> None:
    net = initialise(SHAPE, torch.Generator().manual_seed(1))
    grown = grow_dflash2(net, torch.Generator().manual_seed(2), selector_rank=24)
    save(grown, tmp_path / "grown")
    loaded = load(tmp_path / "grown", TARGET, dtype=torch.float32)
    assert loaded.config == grown.config
    config = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    for name, tensor in grown.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
