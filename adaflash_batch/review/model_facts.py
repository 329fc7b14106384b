"""What a model's folder says of memory and lengths, without its weights in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaflash_batch import model_files
from adaflash_batch.engine.memory import longest_context
from adaflash_batch.errors import ConfigError
from adaflash_batch.spec import JobSpec

_ITEM_SIZE = {"float32": 4, "float64": 8}
_USUAL_SIZE = 2
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as a job will load it.

    Attributes:
        name: what the user calls it.
        context: tokens that prompt and completion may have together.
        made_for: the most that the model was made for.
        vocab_size: rows of its output layer.
        num_layers, hidden_size: of the decoder.
        dtype: of weights and KV memory.
        kv_bytes_per_token: of the model alone; drafters add theirs.
        weight_bytes: about what the loaded weights take.
    """

    name: str
    context: int
    made_for: int
    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: str
    kv_bytes_per_token: int
    weight_bytes: int

    @property
    def item_size(self) -> int:
        """Bytes of one number."""
        return _item_size(self.dtype)


def read_model_facts(spec: JobSpec, folder: Path) -> ModelFacts:
    """Read a model's config and the headers of its weights.

    Raises:
        ConfigError: there is no such model in them, or it was not made for the job's context.
    """
    config = _load_config(folder, spec.model.name, spec.model.trust_remote_code)
    text = config.get_text_config()
    made_for = int(getattr(text, "max_position_embeddings", 0) or 2**31 - 1)
    stored = _stored_dtype(folder)
    own = str(getattr(config, "dtype", None) or stored).removeprefix("torch.")
    dtype = own if spec.model.dtype == "auto" else spec.model.dtype
    size = sum(path.stat().st_size for path in model_files.weight_files(folder))
    return ModelFacts(
        name=spec.model.name,
        context=longest_context(spec.engine.context, made_for, spec.model.name),
        made_for=made_for,
        vocab_size=int(text.vocab_size),
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        dtype=dtype,
        kv_bytes_per_token=_kv_numbers(text) * _item_size(dtype),
        weight_bytes=size * _item_size(dtype) // _item_size(stored),
    )


def _item_size(dtype: str) -> int:
    return _ITEM_SIZE.get(dtype, _USUAL_SIZE)


def _load_config(folder: Path, name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        config.get_text_config().num_attention_heads  # noqa: B018 (what no decoder is without)
    except (ValueError, OSError, KeyError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[:1] or [repr(error)]
        raise ConfigError(f"{name} cannot be loaded: {reason[0]}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name} cannot run: it is an encoder-decoder model", "use a decoder-only model"
        )
    return config


def _kv_numbers(text_config: Any) -> int:
    """Keys and values of one token in all layers, where the layers are alike."""
    heads = int(text_config.num_attention_heads)
    kv_heads = int(getattr(text_config, "num_key_value_heads", None) or heads)
    size = getattr(text_config, "head_dim", None) or int(text_config.hidden_size) // heads
    return 2 * int(text_config.num_hidden_layers) * kv_heads * int(size)


def _stored_dtype(folder: Path) -> str:
    """Of the first weight that is a floating-point number, as transformers takes it."""
    from safetensors import SafetensorError, safe_open

    for path in model_files.weight_files(folder):
        try:
            with safe_open(str(path), framework="np") as file:
                kinds = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from error
        found = next((_NAMES[kind] for kind in kinds if kind in _NAMES), None)
        if found is not None:
            return found
    return "float32"


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What a drafter takes, nothing where there is none.

    Attributes:
        block: positions behind a request that need room in KV memory.
        numbers_per_token: that KV memory holds for it.
    """

    block: int = 0
    numbers_per_token: int = 0


def read_drafter_facts(spec: JobSpec, folder: Path) -> DrafterFacts:
    """Read the config of the drafter that a job would begin with.

    Raises:
        ConfigError: it is no drafter that can be read.
    """
    path = _drafter_folder(spec, folder)
    if path is None:
        return DrafterFacts()
    from adaflash_batch.drafter.checkpoint import inspect
    from adaflash_batch.engine.drafting import BlockDrafter

    config = inspect(path).config
    numbers = BlockDrafter.numbers_per_token(config, keeps_states=spec.shares_states)
    return DrafterFacts(config.num_drafts + 1, numbers)


def _drafter_folder(spec: JobSpec, folder: Path) -> Path | None:
    """The folder of the store's current version, or else of the drafter that is named."""
    speculation = spec.speculation
    if speculation.drafter_store is not None:
        from adaflash_batch.drafter.store import known_versions_of
        from adaflash_batch.drafter.versions import VersionStore

        store = Path(speculation.drafter_store).expanduser()
        identity = model_files.model_identity(folder)
        versions = known_versions_of(store, identity, model_files.tokenizer_digest(folder))
        current = None if versions is None else VersionStore(versions).current()
        if versions is not None and current is not None:
            return VersionStore(versions).path(current)
    return None if speculation.drafter is None else Path(speculation.drafter).expanduser()
