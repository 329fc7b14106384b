"""Which member of the family a config.json describes, and the fields that only its layout has.

DFlash     `DFlashDraftModel`: z-lab's first layout, block_size at the top
DFlash 2   `DFlash2DraftModel`: z-lab's second, block_size inside dflash_config
DSpark     `Qwen3DSparkModel`: DeepSpec's, all fields at the top; with markov_rank 0 and no
           confidence head it is published as "dflash", but its anchor slot drafts: DSpark here
           `DSparkDraftModel`: SpecForge's, the fields inside dflash_config; ours are written so
"""

from __future__ import annotations

from typing import Any

from adaflash_batch.drafter.config import DrafterConfig, Member
from adaflash_batch.drafter.fields import Fields
from adaflash_batch.errors import ConfigError

MEMBERS: dict[str, Member] = {
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "Qwen3DSparkModel": "DSpark",
    "DSparkDraftModel": "DSpark",
}
WITH_TARGET_COPIES = ("Qwen3DSparkModel",)
"""Layouts that store frozen copies of the target's embedding and lm_head."""

_WRITTEN: dict[Member, str] = {
    "DFlash": "DFlashDraftModel",
    "DFlash 2": "DFlash2DraftModel",
    "DSpark": "DSparkDraftModel",
}
_PROJECTORS: dict[Member, tuple[str, ...]] = {
    "DFlash": ("dflash",),
    "DFlash 2": ("dflash", "dflash2"),
    "DSpark": ("dspark",),
}
_EVIDENCE: dict[str, Member] = {
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "enable_confidence_head": "DSpark",
    "confidence_temperatures": "DSpark",
    "conv_kernel_size": "DFlash 2",
    "conv_group_size": "DFlash 2",
    "selector_rank": "DFlash 2",
    "selector_top_k": "DFlash 2",
}
_PARTS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def identify(fields: Fields) -> Member:
    """The member. Raises ConfigError for others, and where the fields contradict each other."""
    if fields.get("speculators_model_type") is not None:
        raise _speculators(fields)
    architectures = fields.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    if len(names) != 1 or names[0] not in MEMBERS:
        raise fields.refuse(
            f"architectures in config.json is {architectures!r}, it must be one of "
            f"{', '.join(MEMBERS)}",
            "Name the folder of a drafter of DFlash's family, not that of a language model",
        )
    member = MEMBERS[names[0]]
    for name, other in _EVIDENCE.items():
        if fields.get(name) and other != member:
            raise _contradiction(fields, member, f"{name} is {fields.get(name)!r}", other)
    _check_anchor(fields, member)
    return member


def _check_anchor(fields: Fields, member: Member) -> None:
    """What else says which slot drafts first must agree with the architecture."""
    from_anchor = fields.get("sample_from_anchor")
    if from_anchor is not None and from_anchor != (member == "DSpark"):
        said = "true" if from_anchor else "false"
        other: Member = "DSpark" if from_anchor else "DFlash"
        raise _contradiction(fields, member, f"sample_from_anchor is {said}", other)
    projector = fields.get("projector_type")
    if projector is not None and str(projector).lower() not in _PROJECTORS[member]:
        known = (name for name, kinds in _PROJECTORS.items() if str(projector).lower() in kinds)
        named = next(known, str(projector))
        raise _contradiction(fields, member, f"projector_type is {projector!r}", named)


def read(fields: Fields, member: Member) -> dict[str, Any]:
    """The arguments of DrafterConfig that only this member's layout has."""
    if member == "DSpark":
        return _read_dspark(fields)
    found: dict[str, Any] = {
        name: fields.number(name)
        for name in ("output_multiplier", "input_embedding_scale", "final_logit_softcapping")
        if fields.get(name) is not None
    }
    # The reference takes 0 and less for "off".
    if found.get("final_logit_softcapping", 1.0) <= 0:
        found["final_logit_softcapping"] = None
    if member == "DFlash 2":
        found |= {name: fields.integer(name) for name in _PARTS}
        for name in _PARTS:
            if found[name] <= 0:
                raise fields.refuse(f"{name} is {found[name]}, it must be above 0")
    return found


def _read_dspark(fields: Fields) -> dict[str, Any]:
    if -1 in fields.integers("target_layer_ids"):
        raise fields.refuse(
            f"target_layer_ids {list(fields.integers('target_layer_ids'))} must lie from 0: -1, "
            "the output of the embedding, is not read by this version"
        )
    rank, has_confidence = fields.integer("markov_rank"), fields.boolean("enable_confidence_head")
    found: dict[str, Any] = {
        "from_anchor": True,
        "markov_rank": rank,
        "enable_confidence_head": has_confidence,
        "confidence_temperatures": fields.numbers("confidence_temperatures"),
    }
    if rank:
        found["markov_head_type"] = fields.text("markov_head_type")
    if has_confidence:
        found["confidence_head_with_markov"] = fields.boolean("confidence_head_with_markov")
    for name in ("output_multiplier", "input_embedding_scale", "final_logit_softcapping"):
        if fields.get(name) is not None:
            found[name] = fields.number(name)
    return found


def write(config: DrafterConfig) -> dict[str, Any]:
    """Architecture, block_size and the fields that only this member's layout has."""
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    top: dict[str, Any] = {"architectures": [_WRITTEN[config.member]]}
    if config.member == "DFlash 2":
        own |= {"block_size": config.block_size, **{name: getattr(config, name) for name in _PARTS}}
    else:
        top["block_size"] = config.block_size
    if config.member == "DSpark":
        own |= _write_dspark(config)
    for name, usual in (
        ("output_multiplier", 1.0),
        ("input_embedding_scale", 1.0),
        ("final_logit_softcapping", None),
    ):
        if getattr(config, name) != usual:
            own[name] = getattr(config, name)
    if config.has_input_projection:
        own["input_projection"] = True
    if config.length_head:
        own |= {"length_head": config.length_head, "length_head_width": config.length_head_width}
    return {**top, "dflash_config": own}


def _write_dspark(config: DrafterConfig) -> dict[str, Any]:
    own = {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }
    if config.confidence_temperatures:
        own["confidence_temperatures"] = list(config.confidence_temperatures)
    return own


def _contradiction(fields: Fields, member: Member, evidence: str, other: str) -> ConfigError:
    return fields.refuse(
        f"{evidence}, which makes it a {other} drafter; its architecture in config.json is that of "
        f"a {member} drafter, and read as the wrong one its drafts would not be accepted",
        "Ask the drafter's authors which of the two it is",
    )


def _speculators(fields: Fields) -> ConfigError:
    return fields.refuse(
        f"speculators_model_type is {fields.get('speculators_model_type')!r}; checkpoints of "
        "speculators are not read: engines differ in how they count their layer ids, and they "
        "may have a vocabulary of their own",
        f"Name a drafter whose architecture is one of {', '.join(MEMBERS)}",
    )
