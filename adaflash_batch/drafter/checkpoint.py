"""Drafter checkpoints as their authors publish them: `config.json` and safetensors.

load(folder, target, dtype=...)  the drafter, or a ConfigError that names both sides
save(model, folder, extra)       a folder that other engines load too; whole or not at all
inspect(folder)                  what it is, without a target
identity(folder)                 a digest, for statistics
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaflash_batch.drafter import members
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.fields import Fields
from adaflash_batch.drafter.layout import parse, render
from adaflash_batch.drafter.members import WITH_TARGET_COPIES
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.durable import flush
from adaflash_batch.errors import ConfigError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Write = Callable[[Path], None]

# Flags in dflash_config -> prefix of the tensors that they promise (AdaFlash's length heads).
_HEADS = {
    "use_thresh_head_two_model": "thresh_head_two_model.",
    "use_thresh_head_subsequent": "thresh_head_subsequent.",
    "use_prob_head": "prob_head.",
}
_HEAD_PREFIXES = ("thresh_head", "prob_head")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a drafter must agree with.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the hidden states.
        num_hidden_layers: layers.
        name: of the model, for messages.
        tokenizer_digest: sha256 that `adaflash.tokenizer_sha256` of a checkpoint is compared with;
            None when it is not known.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    name: str
    tokenizer_digest: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """What a folder says of itself.

    Attributes:
        config: the drafter's shape.
        num_parameters: numbers in its weight files, copies of the target's included.
        num_bytes: their size on disk.
        dtype: of all of them; float32 where they differ.
        names_target_layers: whether it says how many layers the target has.
        own: the field `adaflash` of config.json, {} without.
    """

    config: DrafterConfig
    num_parameters: int
    num_bytes: int
    dtype: torch.dtype
    names_target_layers: bool
    own: Mapping[str, Any]


def inspect(folder: str | Path) -> CheckpointView:
    """Read what a checkpoint is without its weights. Raises ConfigError where `load` would.

    Where the file does not say how many layers the target has, it is as few as the taps allow.
    """
    folder = Path(folder)
    fields = Fields(_read_json(folder / CONFIG), str(folder))
    members.identify(fields)
    config = parse(fields, max(fields.integers("target_layer_ids")) + 2)
    paths, count = _weight_files(folder, fields), 0
    kinds: set[str] = set()
    for path in paths:
        with _opened(path, fields) as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            count += sum(math.prod(tensor.get_shape()) for tensor in tensors)
            kinds |= {tensor.get_dtype() for tensor in tensors}
    dtype = _DTYPES.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
    own = fields.raw.get("adaflash")
    size = sum(path.stat().st_size for path in paths)
    return CheckpointView(
        config=config,
        num_parameters=count,
        num_bytes=size,
        dtype=dtype,
        names_target_layers=fields.get("num_target_layers") is not None,
        own=own if isinstance(own, Mapping) else {},
    )


def load(folder: str | Path, target: TargetFacts, *, dtype: torch.dtype) -> DFlash:
    """The drafter in a folder, on the CPU, its weights in `dtype`.

    Raises ConfigError for a folder that is not a whole checkpoint in safetensors in one of the
    layouts of `members`, and for a drafter that was made for another target; the message names both
    sides.
    """
    folder = Path(folder)
    fields = Fields(_read_json(folder / CONFIG), str(folder))
    _check_target(fields, target)
    config = parse(fields, target.num_hidden_layers)
    tensors = _read_tensors(folder, fields)
    with torch.device("meta"):
        model = DFlash(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _check_heads(fields, tensors)
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if name in wanted or not name.startswith(_HEAD_PREFIXES)
    }
    _check_names(fields, set(wanted), set(tensors))
    _check_shapes(fields, config, target, wanted, tensors)
    # Copies: the files may be replaced while the drafter is in use.
    tensors = {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}
    _check_values(fields, tensors, dtype)
    model.load_state_dict(tensors, assign=True)
    return model


def save(
    model: DFlash,
    folder: str | Path,
    extra_config: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes | Write] | None = None,
) -> None:
    """Write a checkpoint to a folder that does not exist yet: flushed, then renamed into place.

    Args:
        model: in the dtype to be written.
        folder: raises ConfigError when there is one already.
        extra_config: further top-level fields of config.json, e.g. `{"adaflash": {...}}`.
        extra_files: further files by name, e.g. `README.md`: the content, or what writes it to a
            path, for what should not be held in memory twice.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"drafter {folder}: exists already", "Checkpoints are never overwritten")
    dtype = str(model.fc.weight.dtype).removeprefix("torch.")
    config = render(model.config, dtype)
    extra = dict(extra_config or {})
    assert not config.keys() & extra.keys(), "extra_config must not change the drafter's shape"
    tensors = {n: t.detach().cpu().contiguous() for n, t in model.state_dict().items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        write_tensors(tensors, scratch / WEIGHTS, {"format": "pt"})
        (scratch / CONFIG).write_text(json.dumps(config | extra, indent=2) + "\n", "utf-8")
        for name, content in (extra_files or {}).items():
            if isinstance(content, bytes):
                (scratch / name).write_bytes(content)
            else:
                content(scratch / name)
        for path in (*scratch.iterdir(), scratch):
            flush(path)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    flush(folder.parent)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; OSError where that fails."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:  # so it calls a full disk, too
        raise OSError(f"cannot write {path}: {error}") from error


def identity(folder: str | Path) -> str:
    """sha256 over the config and the weight files of a checkpoint, their names included."""
    folder = Path(folder)
    digest = hashlib.sha256()
    for path in sorted([folder / CONFIG, *folder.glob("*.safetensors")]):
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"drafter {folder}: cannot read {path.name}: {error}") from error
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"drafter {path.parent}: cannot read {path.name}: {error.strerror}",
            "A drafter is a folder with config.json and model.safetensors",
        ) from error
    except ValueError as error:
        raise ConfigError(f"drafter {path.parent}: {path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"drafter {path.parent}: {path.name} is not a JSON object")
    return content


def _check_target(fields: Fields, target: TargetFacts) -> None:
    """Compares what the drafter says of its target with the target."""
    for name, what, theirs in (
        ("vocab_size", "vocabulary", target.vocab_size),
        ("hidden_size", "hidden size", target.hidden_size),
        ("num_target_layers", "layer count", target.num_hidden_layers),
    ):
        ours = fields.get(name)
        if ours is not None and ours != theirs:
            raise _mismatch(fields, target, f"{name} is {ours!r}, the {what}", theirs)
    adaflash = fields.raw.get("adaflash")
    digest = adaflash.get("tokenizer_sha256") if isinstance(adaflash, Mapping) else None
    if digest and target.tokenizer_digest and digest != target.tokenizer_digest:
        raise _mismatch(
            fields, target, f"tokenizer_sha256 is {digest}, the tokenizer", target.tokenizer_digest
        )


def _mismatch(fields: Fields, target: TargetFacts, problem: str, theirs: object) -> ConfigError:
    return fields.refuse(
        f"its {problem} of the target {target.name} is {theirs}",
        "A drafter serves the one model that it was trained for: name that drafter or that model",
    )


def _read_tensors(folder: Path, fields: Fields) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    copies = _TARGET_COPIES if fields.raw["architectures"][0] in WITH_TARGET_COPIES else ()
    for path in _weight_files(folder, fields):
        with _opened(path, fields) as file:
            for name in file.keys():  # noqa: SIM118
                if name in copies:
                    _check_copy(fields, name, file.get_slice(name).get_shape())
                else:
                    tensors[name] = file.get_tensor(name)
    return tensors


@contextmanager
def _opened(path: Path, fields: Fields) -> Iterator[Any]:
    """A weight file; what cannot be read of it, also later, is a ConfigError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise fields.refuse(f"{path.name} is not a whole safetensors file: {error}") from error


def _check_copy(fields: Fields, name: str, shape: list[int]) -> None:
    """The target's own matrices serve, so their copies (half of the file) are not even read."""
    wanted = [fields.integer("vocab_size"), fields.integer("hidden_size")]
    if shape != wanted:
        raise fields.refuse(f"{name} is {shape}, config.json makes it {wanted}")


def _weight_files(folder: Path, fields: Fields) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise fields.refuse(
            f"neither {WEIGHTS} nor {INDEX} in the folder",
            "Only safetensors are loaded: pickled weights (.bin, .pt) can run code",
        )
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise fields.refuse(f"{INDEX} has no weight_map")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise fields.refuse(f"{INDEX} names {name!r}, which is not a file of the folder")
    return [folder / name for name in names]


def _check_heads(fields: Fields, names: Iterable[str]) -> None:
    """A flag that is on without its tensors means that the head was never saved."""
    for flag, prefix in _HEADS.items():
        if fields.get(flag) and not any(name.startswith(prefix) for name in names):
            raise fields.refuse(f"{flag} is on in config.json and no tensor {prefix}* is there")


def _check_names(fields: Fields, wanted: set[str], found: set[str]) -> None:
    problems = [
        f"{kind} {', '.join(sorted(names))}"
        for kind, names in (("missing", wanted - found), ("unexpected", found - wanted))
        if names
    ]
    if problems:
        raise fields.refuse(f"its tensors do not fit its config.json: {'; '.join(problems)}")


def _check_shapes(
    fields: Fields,
    config: DrafterConfig,
    target: TargetFacts,
    wanted: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
) -> None:
    if tuple(tensors["fc.weight"].shape) != wanted["fc.weight"]:
        raise fields.refuse(
            f"fc.weight is {list(tensors['fc.weight'].shape)}; {len(config.target_layer_ids)} "
            f"target_layer_ids times the hidden size {target.hidden_size} of the target "
            f"{target.name} make it {list(wanted['fc.weight'])}"
        )
    quantised = sorted(n for n, tensor in tensors.items() if not tensor.is_floating_point())
    if quantised:
        raise fields.refuse(f"not floating point: {', '.join(quantised)}")
    wrong = [
        f"{name} is {list(tensors[name].shape)}, config.json makes it {list(shape)}"
        for name, shape in wanted.items()
        if tuple(tensors[name].shape) != shape
    ]
    if wrong:
        raise fields.refuse("; ".join(wrong))


def _check_values(fields: Fields, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    broken = sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all())
    if broken:
        kind = str(dtype).removeprefix("torch.")
        raise fields.refuse(f"NaN or infinite weights (as {kind}) in {', '.join(broken)}")
