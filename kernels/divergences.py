"""Divergences between drafter and target over the vocabulary, with their gradients by the logits.

# C positions, V rows of the lm_head (vocabulary)
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward_kl(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Divergence [C] and gradient [C, V]; both inputs are used up."""
    p = log_p.exp()
    divergence = log_p.sub_(log_q).mul_(p).sum(-1)
    return divergence, log_q.exp_().sub_(p)


def opd(
    log_q: Tensor, log_p: Tensor, shares: tuple[float, float], clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped reverse KL [C], clipped entries [C] and the gradient [C, V] of the whole mixture
    but for the label's own entry; both inputs are used up.

    With e(v) = q(v) log(q(v) / p(v)) and m(v) = 1 where e(v) is not clipped,
    d/dz(j) sum_v min(e(v), clip) = g(j) - q(j) sum_v g(v), where g(v) = m(v) (e(v) + q(v)).
    """
    ce_share, kl_share = shares
    entries = torch.sub(log_q, log_p, out=log_p)
    q = log_q.exp_()
    entries.mul_(q)
    if clip is None:
        divergence, clipped = entries.sum(-1), torch.zeros_like(entries[:, 0], dtype=torch.int64)
        entries.add_(q)
    else:
        above = entries > clip
        clipped = above.sum(-1)
        divergence = entries.masked_fill_(above, 0.0).sum(-1) + clipped.to(q.dtype) * clip
        entries.add_(q).masked_fill_(above, 0.0)
    # ce_share * q + kl_share * (g - q * sum g), in place.
    factor = ce_share - kl_share * entries.sum(-1, keepdim=True)
    return divergence, clipped, entries.mul_(kl_share).addcmul_(q, factor)
