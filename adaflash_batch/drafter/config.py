"""The shape of a DFlash drafter, checked for contradictions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from adaflash_batch.errors import ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a DFlash drafter. Raises ConfigError for values that contradict each other.

    Attributes:
        hidden_size: of the drafter and, since it uses the target's embedding, of the target.
        rope_theta: base of the rotary frequencies (rope type "default").
        vocab_size: of the target.
        block_size: rows of a block. It counts the anchor: block_size - 1 tokens are drafted.
        mask_token_id: the token whose embedding stands at the places to fill.
        target_layer_ids: 0-based target layers whose outputs are the features, strictly increasing.
            Never the last one: transformers returns its output normed, hooks see it raw.
        num_target_layers: layers of the target.
        layer_types: `full_attention` or `sliding_attention` for each layer; () is all full.
        sliding_window: window of the sliding layers, None when there are none.
        max_position_embeddings: what other engines size their tables by; no limit here.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        for is_right, problem in _rules(self):
            if not is_right:
                raise ConfigError(f"drafter: {problem}")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where attention is full."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def num_features(self) -> int:
        """Length of a context feature: the tapped hidden states side by side."""
        return len(self.target_layer_ids) * self.hidden_size


def _rules(config: DrafterConfig) -> Iterator[tuple[bool, str]]:
    """(holds, what to say when it does not), in the order in which they are worth saying."""
    yield from _size_rules(config)
    yield from _block_rules(config)
    yield from _layer_type_rules(config)


def _size_rules(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        yield getattr(c, name) > 0, f"{name} is {getattr(c, name)}, it must be above 0"
    yield (
        c.num_key_value_heads > 0 and c.num_attention_heads % c.num_key_value_heads == 0,
        f"num_attention_heads ({c.num_attention_heads}) is not a multiple of "
        f"num_key_value_heads ({c.num_key_value_heads})",
    )
    yield (
        c.head_dim > 0 and c.head_dim % 2 == 0,
        f"head_dim is {c.head_dim}, it must be even and above 0",
    )
    yield c.rope_theta > 0, f"rope_theta is {c.rope_theta}, it must be above 0"
    yield c.rms_norm_eps >= 0, f"rms_norm_eps is {c.rms_norm_eps}, it must be 0 or more"


def _block_rules(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    yield (
        c.block_size >= 2,
        f"block_size is {c.block_size}; it counts the anchor, so it must be 2 or more",
    )
    yield (
        0 <= c.mask_token_id < c.vocab_size,
        f"mask_token_id {c.mask_token_id} is outside the vocabulary of {c.vocab_size}",
    )
    ids = list(c.target_layer_ids)
    yield bool(ids), "target_layer_ids is empty"
    yield (
        all(low < high for low, high in itertools.pairwise(ids)),
        f"target_layer_ids {ids} must increase strictly",
    )
    yield (
        all(0 <= layer < c.num_target_layers - 1 for layer in ids),
        f"target_layer_ids {ids} must lie from 0 to {c.num_target_layers - 2}: the target has "
        f"{c.num_target_layers} layers and the last is never used",
    )


def _layer_type_rules(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    kinds = list(c.layer_types)
    yield (
        len(kinds) == c.num_hidden_layers,
        f"layer_types names {len(kinds)} layers, num_hidden_layers is {c.num_hidden_layers}",
    )
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    yield not unknown, f"layer_types has {unknown}, known are {FULL} and {SLIDING}"
    yield (
        SLIDING not in kinds or (c.sliding_window or 0) > 0,
        f"layer_types has {SLIDING}, sliding_window is {c.sliding_window}",
    )


def build_target_layer_ids(num_layers: int, n: int) -> tuple[int, ...]:
    """n target layers spread as DFlash does it: from layer 1 to the third from the end.

    Raises ConfigError when the target has too few layers for that many.
    """
    if n == 1:
        ids = [num_layers // 2]
    else:
        ids = [round(1 + i * (num_layers - 4) / (n - 1)) for i in range(n)]
    if n < 1 or len(set(ids)) < n or sorted(ids) != ids or ids[-1] >= num_layers - 1:
        raise ConfigError(
            f"drafter: {n} feature layers cannot be spread over a target of {num_layers} layers",
            "Ask for fewer feature layers or name them yourself",
        )
    return tuple(ids)
