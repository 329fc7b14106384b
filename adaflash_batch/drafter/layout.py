"""config.json of a drafter, read into a DrafterConfig and written from one.

What would draft differently under the same tensor names is refused by name: read wrongly it gives
the right text at no acceptance, which nobody notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaflash_batch.drafter import members
from adaflash_batch.drafter.config import FULL, SLIDING, DrafterConfig, Member
from adaflash_batch.drafter.fields import Fields
from adaflash_batch.errors import ConfigError

_ONE_VALUE: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "is_causal": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "quantization": (),
    "attention_mode": ("gqa",),
}
"""Fields whose other values change what is computed, with the values that this version computes."""


def parse(fields: Fields, num_target_layers: int) -> DrafterConfig:
    """The drafter's shape. Raises ConfigError for layouts that this version does not read.

    Args:
        fields: of config.json.
        num_target_layers: of the target that it is to serve; not every layout says it.
    """
    member = members.identify(fields)
    _refuse_other_values(fields)
    layer_types, sliding_window = _attention_kinds(fields, member)
    shape: dict[str, Any] = {
        name: fields.integer(name)
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "vocab_size", "block_size", "mask_token_id"),
        )
    }
    shape["num_target_layers"] = num_target_layers
    for name in ("max_position_embeddings", "num_target_layers"):
        if fields.get(name) is not None:
            shape[name] = fields.integer(name)
    if SLIDING in layer_types and fields.get("is_causal") is None:
        shape["has_causal_windows"] = True
    if fields.get("input_projection") is not None:
        shape["has_input_projection"] = fields.boolean("input_projection")
    if fields.get("length_head") is not None:
        shape["length_head"] = fields.text("length_head")
        shape["length_head_width"] = fields.integer("length_head_width")
    try:
        return DrafterConfig(
            **shape,
            **members.read(fields, member),
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
            *("num_target_layers", "sliding_window", "max_position_embeddings"),
        )
    }
    causal: dict[str, Any] = {} if config.has_causal_windows else {"is_causal": False}
    return {
        "model_type": "qwen3",
        **same,
        **members.write(config),
        **causal,
        "layer_types": list(config.layer_types),
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        # transformers 4 reads rope_theta, transformers 5 rope_parameters.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


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


def _attention_kinds(fields: Fields, member: Member) -> tuple[tuple[str, ...], int | None]:
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
    # DFlash 2's authors define an absent is_causal in a sliding layer as causal. For the others
    # engines differ in what they take it for.
    if fields.get("is_causal") is None and member != "DFlash 2":
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
