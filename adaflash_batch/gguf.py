"""Turns the GGUF file of a Llama model into a Hugging Face folder. Needs the `gguf` package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaflash_batch.errors import ConfigError

if TYPE_CHECKING:
    import torch

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# A table that transformers computes itself.
_COMPUTED = {"rope_freqs.weight"}
_CONTROL_TOKEN = 3


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and bf16 safetensors of `gguf_file` into `folder`.

    Weights are dequantised: real ones, but not bit for bit the original checkpoint's.
    Raises ConfigError for anything but a Llama with a GPT-2-like tokenizer of the SmolLM kind.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _refuse_others(gguf_file, fields)
    weights = _weights(reader, fields)
    write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in weights))
    write_json(folder / "generation_config.json", _special_ids(fields))
    _write_tokenizer(fields, folder)
    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod(0o644)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _refuse_others(gguf_file: Path, fields: dict[str, Any]) -> None:
    wanted = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for name, value in wanted.items():
        if fields.get(name) != value:
            raise ConfigError(
                f"{gguf_file.name} has {name} {fields.get(name)!r}, only {value!r} can be converted"
            )


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": fields["llama.rope.freq_base"],
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {kind: f"tokenizer.ggml.{name}_token_id" for kind, name in names.items()}
    return {f"{kind}_token_id": fields[key] for kind, key in keys.items() if key in fields}


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    # The model was trained with digits split off first; without it " 0" after a newline is cut
    # otherwise. Readers of GGUF tend to leave it out.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {f"{kind[:3]}_token": tokens[i] for kind, i in _special_ids(fields).items()}
    named["unk_token"] = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", named | settings)
    template = folder / "chat_template.jinja"
    template.write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def _weights(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name in _COMPUTED:
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            # llama.cpp interleaves the two rotary halves of q and k; undo it.
            rows, columns = shape
            split = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
            values = split.swapaxes(1, 2).reshape(shape)
        values = np.require(values, requirements=["C", "W"])
        weights[_hf_name(tensor.name)] = torch.from_numpy(values).bfloat16()
    return weights


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer is None:
        return _OUTER_NAMES[name]
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
