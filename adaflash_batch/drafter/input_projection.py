"""What the target saw last and the anchor, in every row of a block from the start. Our own part.

    row = embedding + proj([norm(state) ; rms(anchor's embedding)])

In a published drafter the rows of a block learn of either by attention alone, whose few key heads
are narrow in a small model and slow to learn. No published layout has this part, so it is optional.

B blocks, T rows of all blocks, H hidden.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["InputProjection"]


class InputProjection(nn.Module):
    """The weights and what is done with them."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Rows [T, H] with the projection added.

        Args:
            embeddings: [T, H], the target's, of whole blocks; the anchor's row is the first.
            states: [B, H], what the last tapped layer made of the token before each anchor.
        """
        rows = embeddings.view(len(states), -1, embeddings.shape[-1])
        anchors = F.rms_norm(rows[:, 0], rows.shape[-1:], None, self.eps)
        added = self.proj(torch.cat((self.norm(states), anchors), dim=-1))
        return cast(Tensor, (rows + added.unsqueeze(1)).flatten(0, 1))
