"""config.json of a DFlash checkpoint, read into a DrafterConfig and written from one.

What would draft differently under the same tensor names is refused by name: read as DFlash it gives
the right text at no acceptance, which nobody notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaflash_batch.drafter.config import FULL, SLIDING, DrafterConfig
from adaflash_batch.errors import ConfigError

ARCHITECTURE = "DFlashDraftModel"

_OTHER_ARCHITECTURES = {
    "DSparkDraftModel": "DSpark",
    "Qwen3DSparkModel": "DSpark",
    "DFlash2DraftModel": "DFlash 2",
}
_OTHER_FIELDS = {
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "enable_confidence_head": "DSpark",
    "conv_kernel_size": "DFlash 2",
    "selector_rank": "DFlash 2",
}
_ONE_VALUE: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "is_causal": (False,),
    "input_embedding_scale": (1,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "quantization": (),
    "speculators_model_type": (),
}
"""Fields whose other values change what is computed, with the values that this version computes."""


@dataclass(frozen=True, slots=True)
class Fields:
    """config.json with its two places for DFlash's own fields: top level and `dflash_config`.

    Attributes:
        raw: the parsed file.
        where: the folder, for messages.
    """

    raw: Mapping[str, Any]
    where: str

    def refuse(self, problem: str, hint: str | None = None) -> ConfigError:
        """The error to raise."""
        return ConfigError(f"drafter {self.where}: {problem}", hint)

    def get(self, name: str) -> Any:
        """The field's value or None. Raises ConfigError when the two places differ."""
        nested = self.raw.get("dflash_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise self.refuse(f"dflash_config in config.json is {nested!r}, not an object")
        inner, outer = (nested or {}).get(name), self.raw.get(name)
        if inner is not None and outer is not None and inner != outer:
            raise self.refuse(
                f"{name} is {outer!r} at the top of config.json and {inner!r} in dflash_config"
            )
        return outer if inner is None else inner

    def integer(self, name: str) -> int:
        """A field that must be there and be a whole number."""
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"{name} in config.json is {value!r}, not a whole number")
        return value

    def number(self, name: str) -> float:
        """A field that must be there and be a number."""
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{name} in config.json is {value!r}, not a number")
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A field that must be there and be a list of whole numbers."""
        value = self._present(name)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.refuse(f"{name} in config.json is {value!r}, not a list of whole numbers")
        return tuple(value)

    def _present(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.refuse(
                f"config.json has no {name}", "It is never guessed: ask the drafter's authors"
            )
        return value


def parse(fields: Fields) -> DrafterConfig:
    """The drafter's shape. Raises ConfigError for layouts that this version does not read."""
    _refuse_other_members(fields)
    _refuse_other_values(fields)
    layer_types, sliding_window = _attention_kinds(fields)
    shape = {
        name: fields.integer(name)
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "vocab_size", "block_size", "mask_token_id"),
            "num_target_layers",
        )
    }
    if fields.get("max_position_embeddings") is not None:
        shape["max_position_embeddings"] = fields.integer("max_position_embeddings")
    try:
        return DrafterConfig(
            **shape,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=_rope_theta(fields),
            target_layer_ids=fields.integers("target_layer_ids"),
            layer_types=layer_types,
            sliding_window=sliding_window,
        )
    except ConfigError as error:
        raise ConfigError(f"{error.message} (config.json of {fields.where})", error.hint) from None


def render(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json with the published field names, for this and other engines.

    Args:
        config: the drafter's shape.
        dtype: of the tensors, e.g. `bfloat16`.
    """
    same = {
        name: getattr(config, name)
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "vocab_size"),
            *("block_size", "num_target_layers", "sliding_window", "max_position_embeddings"),
        )
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **same,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "layer_types": list(config.layer_types),
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        # transformers 4 reads rope_theta, transformers 5 rope_parameters.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "is_causal": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _refuse_other_members(fields: Fields) -> None:
    architectures = fields.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    found = next((name for name in names if name in _OTHER_ARCHITECTURES), None)
    if found:
        raise _other_member(fields, _OTHER_ARCHITECTURES[found], f"architecture {found}")
    for name, member in _OTHER_FIELDS.items():
        value = fields.get(name)
        if value:
            raise _other_member(fields, member, f"{name} is {value!r}")
    if fields.get("sample_from_anchor"):
        raise _other_member(fields, "anchor-sampling (DSpark)", "sample_from_anchor is true")
    if str(fields.get("projector_type")).lower() == "dspark":
        raise _other_member(fields, "DSpark", "projector_type is dspark")
    if names != [ARCHITECTURE]:
        raise fields.refuse(
            f"architectures in config.json is {architectures!r}, it must be [{ARCHITECTURE!r}]",
            "Name the folder of a DFlash drafter, not that of a language model",
        )


def _other_member(fields: Fields, member: str, evidence: str) -> ConfigError:
    return fields.refuse(
        f"a {member} drafter ({evidence}); this version reads DFlash drafters only, and read as "
        "DFlash its drafts would not be accepted",
        f"Name a DFlash checkpoint (architecture {ARCHITECTURE}) or run without a drafter",
    )


def _refuse_other_values(fields: Fields) -> None:
    for name, allowed in _ONE_VALUE.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(repr(item) for item in allowed) or "absent"
            raise fields.refuse(f"{name} in config.json is {value!r}, this version reads {wanted}")
    reduced = fields.get("draft_vocab_size")
    if reduced is not None and reduced != fields.get("vocab_size"):
        raise fields.refuse(
            f"draft_vocab_size {reduced!r} is not vocab_size {fields.get('vocab_size')!r}; "
            "drafters with a vocabulary of their own are not read"
        )


def _attention_kinds(fields: Fields) -> tuple[tuple[str, ...], int | None]:
    """(layer_types, sliding_window)."""
    kinds = fields.get("layer_types")
    if kinds is None and fields.get("use_sliding_window"):
        raise fields.refuse("use_sliding_window is true and layer_types is missing in config.json")
    if kinds is None:
        kinds = [FULL] * fields.integer("num_hidden_layers")
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise fields.refuse(f"layer_types in config.json is {kinds!r}, not a list of names")
    if SLIDING not in kinds:
        return tuple(kinds), None
    # Engines differ in what they take an absent is_causal for in a sliding layer.
    if fields.get("is_causal") is None:
        raise fields.refuse(
            f"layer_types has {SLIDING} and config.json has no is_causal",
            'Add "is_causal": false if its blocks were trained to see themselves both ways',
        )
    return tuple(kinds), fields.integer("sliding_window")


def _rope_theta(fields: Fields) -> float:
    """The base, from the top level (older files) or rope_parameters; only the default rope type."""
    found = [] if fields.get("rope_theta") is None else [fields.number("rope_theta")]
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name) or {}
        if not isinstance(rope, Mapping):
            raise fields.refuse(f"{name} in config.json is {rope!r}, not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        unread = {
            key: value
            for key, value in rope.items()
            if key not in {"rope_type", "type", "rope_theta"} and value is not None
        }
        if unread.get("partial_rotary_factor") == 1:
            del unread["partial_rotary_factor"]
        if kind != "default" or unread:
            raise fields.refuse(
                f"{name} in config.json is {dict(rope)!r}, this version reads rope type 'default' "
                "with a rope_theta only"
            )
        if rope.get("rope_theta") is not None:
            found.append(Fields(rope, fields.where).number("rope_theta"))
    if len(set(found)) > 1:
        raise fields.refuse(f"rope_theta is given as {found[0]} and as {found[1]} in config.json")
    return found[0] if found else fields.number("rope_theta")
