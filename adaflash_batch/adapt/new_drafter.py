"""A drafter for a target: its shape, its first weights, its vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.length import USUAL_WIDTHS
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.errors import ConfigError

ReadTensor = Callable[[str], Tensor | None]
"""A weight of the target by the end of its name; None where there is none."""

_USUAL_EPS = 1e-6
_USUAL_THETA = 10000.0
_CONV_TAPS = 2
_CONV_GROUP = 16
_CANDIDATES = 16
# The same in the drafter and in Llama-like targets.
_SHARED = (
    *("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    *("self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
)


def shape_like(config: Any) -> dict[str, Any]:
    """The arguments of DrafterConfig that it takes over from a target's transformers config."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return {
        "hidden_size": hidden,
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or _USUAL_EPS),
        "rope_theta": float(rope.get("rope_theta") or _USUAL_THETA),
        "vocab_size": int(config.vocab_size),
        "num_target_layers": int(config.num_hidden_layers),
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", 0) or 32768),
    }


def member_fields(
    member: str, rank: int, hidden_size: int, vocab_size: int, has_confidence: bool = False
) -> dict[str, Any]:
    """The arguments of DrafterConfig that make it a member of the family."""
    if member == "dspark":
        heads = ("enable_confidence_head", "confidence_head_with_markov")
        return {"from_anchor": True, "markov_rank": rank, **dict.fromkeys(heads, has_confidence)}
    if member == "dflash2":
        return {
            "conv_kernel_size": _CONV_TAPS,
            "conv_group_size": math.gcd(_CONV_GROUP, hidden_size),
            "selector_rank": rank,
            "selector_top_k": min(_CANDIDATES, vocab_size),
        }
    return {}


def length_fields(kind: str, width: int) -> dict[str, Any]:
    """The arguments of DrafterConfig that give it a length head; a width of 0 is the usual one."""
    return {"length_head": kind, "length_head_width": width or USUAL_WIDTHS.get(kind, 0)}


def copy_target_layers(net: DFlash, num_target_layers: int, read: ReadTensor) -> list[str]:
    """Begin with layers of the target, evenly spaced, wherever a weight has the same shape.

    `fc` passes the last tapped state on; what is not copied stays as it is, so the norms of queries
    and keys are ones where the target has none. Returns the names of the copied weights.
    """
    copied = []
    config = net.config
    parameters = dict(net.named_parameters())
    wanted = [("norm.weight", "model.norm.weight")]
    for layer in range(config.num_hidden_layers):
        source = int((layer + 0.5) * num_target_layers / config.num_hidden_layers)
        wanted += [(f"layers.{layer}.{name}", f"layers.{source}.{name}") for name in _SHARED]
    with torch.no_grad():
        for ours, theirs in wanted:
            tensor = read(theirs)
            if tensor is not None and tensor.shape == parameters[ours].shape:
                parameters[ours].copy_(tensor)
                copied.append(ours)
        net.fc.weight.zero_()
        net.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
    return copied


def frequent_tokens(
    texts: Iterable[Tensor], vocab_size: int, count: int, always: Iterable[int]
) -> Tensor:
    """The most frequent tokens of texts, ascending int64; `always` are among them.

    Among tokens that are equally frequent the lower id comes first. Raises ConfigError when the
    vocabulary has fewer.
    """
    if count > vocab_size:
        raise ConfigError(f"--draft-vocabulary is {count}, the model's has {vocab_size} tokens")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens in texts:
        counts += torch.bincount(tokens, minlength=vocab_size)
    counts[list(always)] = torch.iinfo(torch.int64).max
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def mask_token(special: Iterable[int], ends: Iterable[int], vocab_size: int) -> int:
    """The special token that stands for what is unknown: the last one that ends no text."""
    ending = set(ends)
    candidates = [t for t in special if t not in ending and t < vocab_size]
    if not candidates:
        raise ConfigError(
            "the tokenizer has no special token that could stand for unknown tokens",
            "name any token that texts never hold with --mask-token",
        )
    return max(candidates)


def build_config(**values: Any) -> DrafterConfig:
    """The config; errors hint at the options that its values came from."""
    try:
        return DrafterConfig(**values)
    except ConfigError as error:
        raise ConfigError(
            error.message, "see --block-size, --target-layers, --layers, --rank and --mask-token"
        ) from None
