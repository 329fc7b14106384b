"""What a model's folder holds: weights, their identity, the tokenizer's, sampling defaults."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from adaflash_batch.errors import ConfigError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model's weights. Raises ConfigError if one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model folder {folder} is incomplete: {index.name} names {missing[0]}"
            + (f" and {len(missing) - 1} more files" if len(missing) > 1 else "")
            + ", not found there",
        )
    return [folder / name for name in names]


def model_identity(folder: Path) -> dict[str, str]:
    """Digests of everything in `folder` that decides a completion's text.

    Small files are hashed whole, by name. `weights` covers every safetensors header (names,
    dtypes, shapes, offsets of all tensors), the file sizes, and three pieces of each tensor.
    Training, merging, pruning or quantising changes nearly every number of the tensors it touches,
    so it shows in the pieces; only a deliberate edit of a few numbers could slip through, and a
    fingerprint guards against mistakes, not against that. It reads a few MB instead of all.
    """
    names = ("config.json", "generation_config.json", *_TOKENIZER_FILES)
    present = [folder / name for name in names if (folder / name).is_file()]
    identity = {path.name: _digest(path) for path in present}
    weights = hashlib.sha256()
    for path in weight_files(folder):
        weights.update(path.name.encode())
        weights.update(_sample_safetensors(path))
    return identity | {"weights": weights.hexdigest()}


def tokenizer_digest(folder: Path) -> str | None:
    """Digest of tokenizer.json, as `model_identity` has it; None where there is none."""
    path = folder / "tokenizer.json"
    return _digest(path) if path.is_file() else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def generation_defaults(folder: Path) -> dict[str, Any]:
    """What the model's authors suggest, in the words of `Sampling`, and `eos_token_id` as a list.

    `temperature` is always there: 0 unless `do_sample` is on. `top_p` and `top_k` are there if
    sampling is on and they are given; `repetition_penalty` if given (it works on greedy text too).
    Without generation_config.json the end token comes from config.json, as in transformers.
    """
    path, fallback = folder / "generation_config.json", folder / "config.json"
    given = _read_json(path) if path.is_file() else {}
    defaults: dict[str, Any] = {"temperature": 0.0}
    wanted = ["repetition_penalty"]
    if given.get("do_sample") is True:
        defaults["temperature"] = 1.0
        wanted += ["temperature", "top_p", "top_k"]
    defaults |= {name: given[name] for name in wanted if given.get(name) is not None}
    ends = given.get("eos_token_id")
    if ends is None and fallback.is_file():
        ends = _read_json(fallback).get("eos_token_id")
    defaults["eos_token_id"] = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return defaults


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def _sample_safetensors(path: Path) -> bytes:
    piece = 1024
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = stream.read(length)
            tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        except (struct.error, AttributeError, ValueError, MemoryError, OverflowError):
            raise ConfigError(f"{path} is not a safetensors file") from None
        digest.update(header)
        digest.update(str(path.stat().st_size).encode())
        for name in sorted(tensors):
            begin, end = tensors[name]["data_offsets"]
            for start in {begin, (begin + end) // 2, max(begin, end - piece)}:
                stream.seek(8 + length + start)
                digest.update(stream.read(min(piece, end - start)))
    return digest.digest()
