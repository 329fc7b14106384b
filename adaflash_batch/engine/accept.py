"""Lossless acceptance of deterministic drafts.

Words: a *draft* token is proposed, *verified* when it entered the target, *accepted* when the
target's own choice at its position equals it. The choice behind the last accepted draft is the
*bonus* token; it is emitted too, and never counted as accepted.

Draft tokens are point masses, so accepting exactly where the target chooses the same token is
speculative sampling (Leviathan et al., arXiv 2211.17192) with q a point mass: what is emitted is
always the target's own choice, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence


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
