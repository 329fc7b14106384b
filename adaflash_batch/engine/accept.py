"""Lossless acceptance of deterministic drafts.

Words: a *draft* token is proposed, *verified* when it entered the target, *accepted* when the
target's own choice at its position equals it. The choice behind the last accepted draft is the
*bonus* token; it is emitted too, and never counted as accepted.

Draft tokens are point masses, so accepting exactly where the target chooses the same token is
speculative sampling (Leviathan et al., arXiv 2211.17192) with q a point mass: what is emitted is
always the target's own choice, at any temperature.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from adaflash_batch.request import FinishReason


@dataclass(frozen=True, slots=True)
class Emission:
    """What a verification adds to a text.

    Attributes:
        tokens: accepted drafts and the bonus token, up to the one that ends the text.
        accepted: drafts among them.
        reason: why the text ends with them; None where it goes on.
        is_sound: whether the logits that decided were finite; where not, there are no tokens.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    reason: FinishReason | None = None
    is_sound: bool = True

    def cut(self, count: int) -> Emission:
        """Its first tokens: the last of them ends the text."""
        return Emission(self.tokens[:count], min(self.accepted, count), "stop")


UNSOUND = Emission(is_sound=False)
"""Logits that decide are not finite."""


def accepted_length(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """How many drafts are kept: the longest prefix that equals the target's choices.

    Args:
        drafts: the w tokens that were verified behind the anchor.
        choices: the target's w + 1 choices: behind the anchor, and behind each draft.
    """
    assert len(choices) == len(drafts) + 1
    for index, draft in enumerate(drafts):
        if draft != choices[index]:
            return index
    return len(drafts)


def emitted_tokens(drafts: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The tokens that a verification adds: accepted drafts, then the bonus token."""
    return list(choices[: accepted_length(drafts, choices) + 1])


def emission(
    drafts: Sequence[int],
    choices: Sequence[int],
    sound: Sequence[bool],
    ends: Collection[int],
    room: int,
) -> Emission:
    """What a verification adds to a text; `kernels.accept` decides the same on a device.

    Args:
        drafts: that were verified.
        choices: the target's, behind the anchor and behind each draft.
        sound: whether the logits of each choice were finite.
        ends: tokens that end the text.
        room: tokens that it may have more, at least 1.
    """
    emitted = emitted_tokens(drafts, choices)
    if not all(sound[: len(emitted)]):
        return UNSOUND
    kept = emitted[:room]
    reason: FinishReason | None = "length" if len(emitted) >= room else None
    whole = Emission(kept, min(len(emitted) - 1, len(kept)), reason)
    stop = next((count for count, token in enumerate(kept, 1) if token in ends), None)
    return whole if stop is None else whole.cut(stop)
