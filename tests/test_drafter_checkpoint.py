"""Checkpoints of a drafter: what loads, and every refusal by its words."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import BACKBONE_SHAPES
from safetensors.torch import save_file
from torch import Tensor

from adaflash_batch.drafter.checkpoint import TargetFacts, load
from adaflash_batch.drafter.model import DrafterConfig
from adaflash_batch.errors import ConfigError

TARGET = TargetFacts(
    vocab_size=300, hidden_size=64, num_hidden_layers=12, name="tiny", tokenizer_digest="aaaa"
)

# A published folder, smaller; written by hand so that `save` cannot vouch for `load`.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 299, "target_layer_ids": [1, 5, 9]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_target_layers": 12,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 300,
}


def published_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in BACKBONE_SHAPES.items()
    }


def write_published(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED if config is None else config))
    save_file(published_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def changed(**changes: Any) -> dict[str, Any]:
    """PUBLISHED with fields set, or removed where the value is `...`; `dflash_` goes inside."""
    config = copy.deepcopy(PUBLISHED)
    for name, value in changes.items():
        inside = name.startswith("dflash_") and name != "dflash_config"
        place = config["dflash_config"] if inside else config
        key = name.removeprefix("dflash_") if inside else name
        if value is ...:
            place.pop(key)
        else:
            place[key] = value
    return config


def refusal(folder: Path, target: TargetFacts = TARGET) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, target, dtype=torch.float32)
    assert str(folder) in caught.value.message
    assert not caught.value.message.endswith(".")
    return caught.value.message


def test_a_published_folder_loads(tmp_path: Path) -> None:
    model = load(write_published(tmp_path / "drafter"), TARGET, dtype=torch.float32)
    assert model.config == DrafterConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        vocab_size=300,
        block_size=16,
        mask_token_id=299,
        target_layer_ids=(1, 5, 9),
        num_target_layers=12,
        layer_types=("full_attention", "full_attention"),
        max_position_embeddings=40960,
    )
    for name, tensor in published_tensors().items():
        assert torch.equal(model.state_dict()[name], tensor.float()), name
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_loaded_drafter_runs(tmp_path: Path) -> None:
    model = load(write_published(tmp_path / "drafter"), TARGET, dtype=torch.bfloat16).fuse()
    rows = torch.randn(16, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        out = model.block(
            rows, *model.rotary(torch.arange(16)), lambda _, q, k, v: q.flatten(1) * 0.5
        )
    assert out.shape == rows.shape
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": ..., "dflash_block_size": 16},
        {"dflash_block_size": 16},
        {"mask_token_id": 299, "dflash_mask_token_id": ...},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1000000}},
        {"rope_scaling": {"type": "default"}},
        {"layer_types": ..., "sliding_window": ...},
        {"num_target_layers": ...},
        {"dflash_projector_type": "dflash"},
        {"final_logit_softcapping": -1, "output_multiplier": 1, "dflash_input_embedding_scale": 1},
        {"is_causal": False},
        {"max_position_embeddings": ...},
        {"dflash_use_prob_head": False},
        {"sample_from_anchor": False, "markov_rank": 0},
    ],
    ids=str,
)
def test_the_same_said_differently_loads_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = load(write_published(tmp_path / "a"), TARGET, dtype=torch.float32).config
    folder = write_published(tmp_path / "b", changed(**changes))
    config = load(folder, TARGET, dtype=torch.float32).config
    longest = plain.max_position_embeddings
    assert dataclasses.replace(config, max_position_embeddings=longest) == plain


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 320}, ["vocab_size is 320", "vocabulary of the target tiny is 300"]),
        ({"hidden_size": 80}, ["hidden_size is 80", "hidden size of the target tiny is 64"]),
        ({"num_target_layers": 28}, ["num_target_layers is 28", "target tiny is 12"]),
        ({"dflash_target_layer_ids": ...}, ["no target_layer_ids"]),
        ({"dflash_config": ...}, ["no mask_token_id"]),
        ({"dflash_target_layer_ids": [1, 5, 11]}, ["[1, 5, 11]", "12 layers"]),
        ({"dflash_target_layer_ids": [1, 5, 40]}, ["[1, 5, 40]", "12 layers"]),
        ({"dflash_target_layer_ids": [-1, 5, 9]}, ["[-1, 5, 9]", "from 0"]),
        ({"dflash_target_layer_ids": [5, 1, 9]}, ["[5, 1, 9]", "increase"]),
        ({"dflash_target_layer_ids": [1, 1, 9]}, ["[1, 1, 9]", "increase"]),
        ({"dflash_target_layer_ids": "1,5,9"}, ["target_layer_ids", "not a list"]),
        ({"dflash_target_layer_ids": [1.0, 5, 9]}, ["target_layer_ids", "not a list"]),
        ({"dflash_mask_token_id": ...}, ["no mask_token_id"]),
        ({"dflash_mask_token_id": 300}, ["mask_token_id 300", "vocabulary of 300"]),
        ({"dflash_mask_token_id": -5}, ["mask_token_id -5", "vocabulary of 300"]),
        ({"dflash_mask_token_id": True}, ["mask_token_id", "not a whole number"]),
        ({"dflash_block_size": 8}, ["block_size is 16", "8 in dflash_config"]),
        ({"block_size": ...}, ["no block_size"]),
        ({"block_size": 1}, ["block_size is 1"]),
        ({"target_layer_ids": [1, 5, 8]}, ["[1, 5, 8]", "[1, 5, 9] in dflash_config"]),
        ({"head_dim": ...}, ["no head_dim"]),
        ({"rope_theta": ...}, ["no rope_theta"]),
        ({"rope_theta": "big"}, ["rope_theta", "not a number"]),
        ({"rope_parameters": {"rope_theta": 10000}}, ["1000000", "10000"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ["yarn", "'default'"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, ["linear"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, ["full_attention"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ["partial_rotary_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"model_type": "llama"}, ["model_type", "llama"]),
        ({"is_causal": True}, ["is_causal in config.json is True"]),
        ({"dflash_input_embedding_scale": -8.0}, ["input_embedding_scale is -8.0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"speculators_model_type": "dflash"}, ["speculators_model_type"]),
        ({"draft_vocab_size": 128}, ["draft_vocab_size 128", "300"]),
        ({"layer_types": ["full_attention"]}, ["names 1 layers", "is 2"]),
        ({"layer_types": ["full_attention", "mamba"]}, ["mamba"]),
        ({"layer_types": ..., "use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, ["no is_causal"]),
        ({"layer_types": ["sliding_attention"] * 2, "is_causal": False}, ["no sliding_window"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "DFlashDraftModel"]),
        ({"architectures": ...}, ["architectures", "None"]),
        ({"architectures": ["DSparkDraftModel"]}, ["no markov_rank"]),
        ({"architectures": ["Qwen3DSparkModel"]}, ["no markov_rank"]),
        ({"architectures": ["DFlash2DraftModel"]}, ["no conv_kernel_size"]),
        ({"architectures": ["DFlashDraftModel", "DSparkDraftModel"]}, ["must be one of"]),
        ({"dflash_markov_rank": 256}, ["a DSpark drafter", "markov_rank is 256"]),
        ({"dflash_projector_type": "dspark"}, ["a DSpark drafter", "projector_type"]),
        ({"dflash_projector_type": "domino"}, ["a domino drafter", "projector_type"]),
        ({"dflash_conv_kernel_size": 2}, ["a DFlash 2 drafter", "conv_kernel_size is 2"]),
        ({"sample_from_anchor": True}, ["sample_from_anchor is true"]),
        ({"adaflash": {"tokenizer_sha256": "bbbb"}}, ["bbbb", "target tiny is aaaa"]),
        ({"dflash_use_prob_head": True}, ["use_prob_head is on", "prob_head."]),
        ({"dflash_use_thresh_head_two_model": True}, ["use_thresh_head_two_model is on"]),
    ],
    ids=str,
)
def test_a_drafter_that_does_not_fit_is_refused_naming_both_sides(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    message = refusal(write_published(tmp_path / "drafter", changed(**changes)))
    for word in words:
        assert word in message


def test_the_tokenizer_is_compared_where_both_are_known(tmp_path: Path) -> None:
    same = changed(adaflash={"tokenizer_sha256": "aaaa"})
    write_published(tmp_path / "same", same)
    write_published(tmp_path / "other", changed(adaflash={"tokenizer_sha256": "bbbb"}))
    unknown = dataclasses.replace(TARGET, tokenizer_digest=None)
    for folder, target in (("same", TARGET), ("other", unknown)):
        assert load(tmp_path / folder, target, dtype=torch.float32).config.mask_token_id == 299


def _without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: tensor}


def _poisoned(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["layers.1.mlp.up_proj.weight"][3, 5] = value
        return tensors

    return poison


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _without("norm.weight", "layers.1.self_attn.q_norm.weight"),
            ["missing layers.1.self_attn.q_norm.weight, norm.weight"],
        ),
        (_without("fc.weight"), ["missing fc.weight"]),
        (
            _with("lm_head.weight", torch.zeros(300, 64)),
            ["unexpected lm_head.weight"],
        ),
        (
            _with("layers.2.mlp.up_proj.weight", torch.zeros(96, 64)),
            ["unexpected layers.2.mlp.up_proj.weight"],
        ),
        (
            _with("fc.weight", torch.zeros(64, 320)),
            ["fc.weight is [64, 320]", "hidden size 64 of the target tiny", "[64, 192]"],
        ),
        (
            _with("layers.0.self_attn.k_proj.weight", torch.zeros(32, 64)),
            ["layers.0.self_attn.k_proj.weight is [32, 64]", "[64, 64]"],
        ),
        (_with("norm.weight", torch.zeros(64, dtype=torch.int8)), ["norm.weight", "not floating"]),
        (_poisoned(float("nan")), ["NaN", "layers.1.mlp.up_proj.weight"]),
        (_poisoned(float("inf")), ["infinite", "layers.1.mlp.up_proj.weight"]),
    ],
)
def test_tensors_that_do_not_fit_are_listed(
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    words: list[str],
) -> None:
    folder = write_published(tmp_path / "drafter", tensors=change(published_tensors()))
    message = refusal(folder)
    for word in words:
        assert word in message


def test_weights_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "drafter", tensors=_poisoned(1e30)(published_tensors()))
    load(folder, TARGET, dtype=torch.float32)
    with pytest.raises(ConfigError, match="as float16"):
        load(folder, TARGET, dtype=torch.float16)


def test_length_heads_are_skipped(tmp_path: Path) -> None:
    tensors = published_tensors() | {
        "thresh_head_two_model.down.weight": torch.zeros(256, 128),
        "prob_head.model.0.weight": torch.zeros(64, 64),
    }
    model = load(write_published(tmp_path / "off", tensors=tensors), TARGET, dtype=torch.float32)
    assert model.state_dict().keys() == BACKBONE_SHAPES.keys()
    on = changed(dflash_use_prob_head=True)
    load(write_published(tmp_path / "on", on, tensors), TARGET, dtype=torch.float32)


def test_a_sharded_checkpoint_loads(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    tensors, weight_map = published_tensors(), {}
    for number, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-0000{number % 2 + 1}-of-00002.safetensors"
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n, s in weight_map.items() if s == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model = load(folder, TARGET, dtype=torch.float32)
    assert torch.equal(model.fc.weight, tensors["fc.weight"].float())
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    assert "../elsewhere.safetensors" in refusal(folder)


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    assert "cannot read config.json" in refusal(tmp_path / "absent")
    folder = write_published(tmp_path / "drafter")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert "not a whole safetensors file" in refusal(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="neither") as caught:
        load(folder, TARGET, dtype=torch.float32)
    assert "Only safetensors" in str(caught.value.hint)
    (folder / "config.json").write_text("{")
    assert "not JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(folder)
