"""The shape of a drafter of DFlash's family, checked for contradictions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from adaflash_batch.errors import ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"

MARKOV_HEADS = ("vanilla", "gated", "rnn")
LENGTH_HEADS = ("hazard", "adaflash")
Member = Literal["DFlash", "DSpark", "DFlash 2"]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a drafter. Raises ConfigError for values that contradict each other.

    One class for the whole family, told apart by `member`: DSpark drafts from the anchor slot on,
    DFlash 2 has the convolutions and the selector, DFlash neither.

    Attributes:
        hidden_size: of the drafter and, since it uses the target's embedding, of the target.
        rope_theta: base of the rotary frequencies (rope type "default").
        vocab_size: of the target.
        block_size: rows of a block, the anchor's included.
        mask_token_id: the token whose embedding stands at the places to fill.
        target_layer_ids: 0-based target layers whose outputs are the features, strictly increasing.
            Never the last one: transformers returns its output normed, hooks see it raw.
        num_target_layers: layers of the target.
        layer_types: `full_attention` or `sliding_attention` for each layer; () is all full.
        sliding_window: window of the sliding layers, None when there are none.
        max_position_embeddings: what other engines size their tables by; no limit here.
        from_anchor: whether slot j drafts the token at anchor + 1 + j (DSpark: block_size drafts),
            instead of slots 1, 2, ... that at anchor + 1, + 2, ... (block_size - 1 drafts).
        markov_rank: r of DSpark's Markov head, 0 without.
        markov_head_type: one of MARKOV_HEADS; says nothing without a Markov head.
        enable_confidence_head: whether DSpark's confidence head is there.
        confidence_head_with_markov: whether it reads the previous token's Markov embedding too.
        confidence_temperatures: of the confidence head's logits, one a draft; () is 1 for all.
        conv_kernel_size: taps of DFlash 2's convolutions, 0 without.
        conv_group_size: neighbouring channels that share their dynamic coefficients.
        selector_rank: of DFlash 2's codebooks.
        selector_top_k: candidates a slot that the selector chooses from.
        output_multiplier: factor of the head's logits, before the soft cap.
        final_logit_softcapping: logits become cap * tanh(logits / cap); None is off.
        input_embedding_scale: factor of the target's embedding rows.
        has_causal_windows: whether rows of sliding layers see no later row of their block.
        has_input_projection: whether input_projection.py is part of it; no published drafter's.
        length_head: "hazard" or "adaflash" (length.py), "" without; no published drafter's.
        length_head_width: of its hidden layers; 0 where it is linear.
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
    from_anchor: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    confidence_temperatures: tuple[float, ...] = ()
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    has_causal_windows: bool = False
    has_input_projection: bool = False
    length_head: str = ""
    length_head_width: int = 0

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        for is_right, problem in _rules(self):
            if not is_right:
                raise ConfigError(f"drafter: {problem}")

    @property
    def member(self) -> Member:
        """Which of the family it is, and so in which layout it is stored."""
        if self.from_anchor:
            return "DSpark"
        return "DFlash 2" if self.conv_kernel_size else "DFlash"

    @property
    def first_slot(self) -> int:
        """The first row of a block that drafts a token."""
        return 0 if self.from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens drafted by one block."""
        return self.block_size - self.first_slot

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where attention is full."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def causal(self) -> tuple[bool, ...]:
        """For each layer whether a row sees no later row of its block."""
        return tuple(self.has_causal_windows and kind == SLIDING for kind in self.layer_types)

    @property
    def num_features(self) -> int:
        """Length of a context feature: the tapped hidden states side by side."""
        return len(self.target_layer_ids) * self.hidden_size


def _rules(config: DrafterConfig) -> Iterator[tuple[bool, str]]:
    """(holds, what to say when it does not), in the order in which they are worth saying."""
    yield from _size_rules(config)
    yield from _block_rules(config)
    yield from _layer_type_rules(config)
    yield from _markov_rules(config)
    yield from _dflash2_rules(config)
    yield from _scale_rules(config)
    yield from _length_rules(config)


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
        c.num_drafts >= 1,
        f"block_size is {c.block_size}; it counts the anchor, so it must be "
        f"{1 + c.first_slot} or more",
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


def _markov_rules(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    yield c.markov_rank >= 0, f"markov_rank is {c.markov_rank}, it must be 0 or more"
    yield (
        c.markov_head_type in MARKOV_HEADS,
        f"markov_head_type is {c.markov_head_type!r}, known are {', '.join(MARKOV_HEADS)}",
    )
    yield (
        c.from_anchor or not (c.markov_rank or c.enable_confidence_head),
        "a Markov or confidence head belongs to DSpark, whose anchor slot drafts too",
    )
    yield (
        not c.confidence_head_with_markov or (c.enable_confidence_head and c.markov_rank > 0),
        "confidence_head_with_markov is on without a confidence head and a Markov head",
    )
    temperatures = list(c.confidence_temperatures)
    yield (
        not temperatures or (c.enable_confidence_head and len(temperatures) == c.num_drafts),
        f"confidence_temperatures has {len(temperatures)} values; it takes a confidence head and "
        f"one for each of the {c.num_drafts} drafts",
    )
    yield (
        all(temperature > 0 for temperature in temperatures),
        f"confidence_temperatures {temperatures} must be above 0",
    )


def _dflash2_rules(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    parts = {name: getattr(c, name) for name in names}
    yield (
        all(part > 0 for part in parts.values()) or not any(parts.values()),
        f"DFlash 2 has all of its parts or none: {parts}",
    )
    if not c.conv_kernel_size:
        yield not c.has_causal_windows, "only DFlash 2 has causal sliding layers"
        return
    yield not c.from_anchor, "a drafter is DSpark or DFlash 2, not both: the anchor slot drafts"
    yield (
        c.conv_kernel_size <= c.block_size,
        f"conv_kernel_size {c.conv_kernel_size} is longer than the block of {c.block_size}",
    )
    yield (
        c.hidden_size % c.conv_group_size == 0,
        f"conv_group_size {c.conv_group_size} does not divide hidden_size {c.hidden_size}",
    )
    yield (
        c.selector_top_k <= c.vocab_size,
        f"selector_top_k {c.selector_top_k} is above the vocabulary of {c.vocab_size}",
    )


def _scale_rules(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    scales = {
        "output_multiplier": c.output_multiplier,
        "input_embedding_scale": c.input_embedding_scale,
        "final_logit_softcapping": c.final_logit_softcapping,
    }
    for name, value in scales.items():
        yield value is None or 0 < value < math.inf, f"{name} is {value}, it must be above 0"
    yield (
        not c.from_anchor or (*scales.values(),) == (1.0, 1.0, None),
        f"DSpark knows no scales of logits and embeddings: {scales}",
    )


def _length_rules(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    yield (
        c.length_head in ("", *LENGTH_HEADS),
        f"length_head is {c.length_head!r}, known are {', '.join(LENGTH_HEADS)}",
    )
    yield (
        c.length_head_width >= (c.length_head == "adaflash"),
        f"length_head_width is {c.length_head_width}, it must be 0 or more, for adaflash above 0",
    )
    yield (
        bool(c.length_head) or not c.length_head_width,
        f"length_head_width is {c.length_head_width} without a length_head",
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
