"""What passes between the decoder and those that learn from it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from adaflash_batch.request import RowKey


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A finished request with what the target saw of it; L tokens, F features, H hidden.

    Attributes:
        key: which request it was.
        token_ids: int64 [L], prompt and continuation, with the token that ended it.
        prompt_length: tokens of the prompt, at least 1.
        features: outputs of the tapped layers side by side, of positions 0, 1, ... [L - 1 or L, F].
            The last token's are there only if it was an accepted draft.
        last_hidden: what the target's lm_head was given at positions first_hidden,
            first_hidden + 1, ... [up to L - first_hidden, H], L - 1 - first_hidden at least;
            None where only the tokens are wanted as labels.
        first_hidden: prompt_length - 1, whose state chose the first new token.
    """

    key: RowKey
    token_ids: Tensor
    prompt_length: int
    features: Tensor
    last_hidden: Tensor | None
    first_hidden: int
