"""The target's tables of tokens, which its drafters share, as plain matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError


@torch.no_grad()
def embedding_table(target: Target) -> Tensor:
    """What the target's layers are given for each token, [vocabulary, H], scaled as it does."""
    # Through the model's own modules, whatever form their weights were brought into.
    return target.embed(torch.arange(target.vocab_size, device=target.device))


@torch.no_grad()
def head_weight(target: Target, token_ids: Tensor | None = None) -> Tensor:
    """The weight of its lm_head, [vocabulary, H], or the rows of these tokens.

    Raises ConfigError if the lm_head has a bias.
    """
    device, size = target.device, target.hidden_size
    head = target.head if token_ids is None else target.head_of(token_ids)
    if head(torch.zeros(1, size, dtype=target.dtype, device=device)).any():
        raise ConfigError(f"{target.name}: its lm_head has a bias, drafters know none")
    return head(torch.eye(size, dtype=target.dtype, device=device)).T.contiguous()
