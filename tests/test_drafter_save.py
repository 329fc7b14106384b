"""A saved drafter is what was saved, in the published layout, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts, identity, load, save
from adaflash_batch.drafter.model import DFlash, DrafterConfig, initialise
from adaflash_batch.errors import ConfigError

TARGET = TargetFacts(
    vocab_size=300, hidden_size=64, num_hidden_layers=12, name="tiny", tokenizer_digest="aaaa"
)


def small_drafter(dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> DFlash:
    config = DrafterConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        vocab_size=300,
        block_size=8,
        mask_token_id=7,
        target_layer_ids=(1, 5, 9),
        num_target_layers=12,
    )
    config = dataclasses.replace(config, **changes)
    return initialise(config, torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 256}],
    ids=["full", "sliding"],
)
def test_what_is_saved_is_loaded(
    tmp_path: Path, dtype: torch.dtype, fused: bool, changes: dict[str, Any]
) -> None:
    model = small_drafter(dtype, **changes)
    if fused:
        model.fuse()
    save(model, tmp_path / "deep" / "v1", {"adaflash": {"tokenizer_sha256": "aaaa"}})
    loaded = load(tmp_path / "deep" / "v1", TARGET, dtype=dtype)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    stored = load_file(tmp_path / "deep" / "v1" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert sorted(path.name for path in (tmp_path / "deep").rglob("*")) == [
        "config.json",
        "model.safetensors",
        "v1",
    ]


def test_saved_config_has_the_published_fields(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    save(small_drafter(torch.bfloat16), tmp_path / "v1", {"adaflash": {"parent": "v0"}})
    config = json.loads((tmp_path / "v1" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == 8
    assert config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 5, 9]}
    assert config["num_target_layers"] == 12
    assert config["layer_types"] == ["full_attention", "full_attention"]
    assert config["dtype"] == "bfloat16"
    assert config["adaflash"] == {"parent": "v0"}
    read = Qwen3Config.from_pretrained(tmp_path / "v1")
    assert read.rope_parameters["rope_theta"] == 500000.0
    assert (read.head_dim, read.rms_norm_eps, read.vocab_size) == (16, 1e-5, 300)


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save(small_drafter(seed=1), tmp_path / "v1")
    before = identity(tmp_path / "v1")
    with pytest.raises(ConfigError, match="exists already"):
        save(small_drafter(seed=2), tmp_path / "v1")
    assert identity(tmp_path / "v1") == before


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "flush", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(small_drafter(), tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


def test_loaded_weights_do_not_depend_on_the_file_any_more(tmp_path: Path) -> None:
    save(small_drafter(), tmp_path / "v1")
    model = load(tmp_path / "v1", TARGET, dtype=torch.float32)
    expected = model.fc.weight.detach().clone()
    weights = tmp_path / "v1" / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(b"\0" * weights.stat().st_size)
    assert torch.equal(model.fc.weight, expected)


def test_identity_names_the_weights_and_the_shape(tmp_path: Path) -> None:
    save(small_drafter(seed=1), tmp_path / "a")
    save(small_drafter(seed=1), tmp_path / "b")
    save(small_drafter(seed=2), tmp_path / "c")
    save(small_drafter(seed=1, block_size=9), tmp_path / "d")
    digests = [identity(tmp_path / name) for name in "abcd"]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    (tmp_path / "a" / "README.md").write_text("a note changes nothing")
    assert identity(tmp_path / "a") == digests[0]
    with pytest.raises(ConfigError, match="cannot read"):
        identity(tmp_path / "absent")
