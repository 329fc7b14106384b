"""How far drafts are worth verifying: heads that judge a block before the target does.

    hazard    h_i, how likely draft i is wrong if all before it are right; how likely drafts 0..i
              are all right is S_i = (1 - h_0) ... (1 - h_i)
    adaflash  the share of the block that is worth verifying, its anchor counted: the paper's scalar
              head (AdaFlash, arXiv 2607.19223)

Both read what the drafter computed anyway, detached: no gradient reaches what drafts. Their labels
come from the committed text, which tells of every draft of a block whether it would have been
accepted, whatever was verified of it; only the end of a text hides anything.

B blocks, N drafts of a block, K rows of a block, H hidden, V tokens to choose from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AdaFlashHead", "HazardHead", "LengthHead", "Proposal", "certainty"]

HAZARD, ADAFLASH = "hazard", "adaflash"
USUAL_WIDTHS = {HAZARD: 0, ADAFLASH: 256}
"""Hidden width where none is named; AdaFlash's is the authors'."""

CERTAINTY = 3
"""Numbers of `certainty` for each draft."""

# A lead that no second candidate is left to bound; leads above it tell nothing more either.
_LARGEST_LEAD = 30.0
_SURE = 1.0 - 1e-6
# Rows whose log-probabilities are held at once: few enough to stay in the cache.
_ROWS_AT_ONCE = 32
_EPS = 1e-6


Watch = Callable[[Tensor, Tensor], None]
"""Is shown a choice of every block: scores [B, V], which was taken [B]."""


Walk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From logits [B, N, V] and anchors [B]: drafts [B, N], and their `certainty` [B, N, 3]."""


class Proposal(NamedTuple):
    """Drafts, and what the drafter says of them.

    drafts: ids [B, N].
    survival: float32 [B, N], how likely drafts 0..i are all right; None without such a head.
    length: float32 [B], see AdaFlashHead; None without it.
    """

    drafts: Tensor
    survival: Tensor | None
    length: Tensor | None


@torch.no_grad()
def certainty(scores: Tensor, best: Tensor) -> Tensor:
    """How sure the drafter is of its choices: [.., 3], float32 at least, all in nats.

    Log-odds and log-probability of the best candidate, and its lead over the second.

    Args:
        scores: [.., V], of all candidates, as they were chosen by.
        best: [..], which of them was chosen.
    """
    flat, chosen = scores.flatten(0, -2), best.flatten().unsqueeze(-1)
    parts = zip(*(torch.split(each, _ROWS_AT_ONCE) for each in (flat, chosen)), strict=True)
    found = [_certainty(*part) for part in parts] or [flat.new_zeros(0, CERTAINTY)]
    return torch.cat(found).view(*best.shape, CERTAINTY)


def _certainty(scores: Tensor, best: Tensor) -> Tensor:
    wide = torch.promote_types(scores.dtype, torch.float32)
    logs = scores.log_softmax(-1, dtype=wide)
    top = logs.gather(-1, best)
    second = logs.scatter_(-1, best, float("-inf")).amax(-1, keepdim=True)
    return certainty_of(top.squeeze(-1), second.squeeze(-1))


@torch.no_grad()
def certainty_of(top: Tensor, second: Tensor) -> Tensor:
    """`certainty` [.., 3] from the log-probabilities [..] of the two best candidates."""
    others = torch.log1p(-top.exp().clamp(max=_SURE))
    return torch.stack((top - others, top, (top - second).clamp(max=_LARGEST_LEAD)), dim=-1)


class HazardHead(nn.Module):
    """The hazards of a block's drafts, linear in the drafter's states unless it has a width.

    What it learns is added to the drafter's own opinion, the probability of its choice, so that it
    says something sensible before it has learnt anything. It computes in float32 whatever its
    weights are kept in.

    Args:
        hidden_size: H.
        num_drafts: N; each has a bias of its own.
        width: of a hidden layer, 0 for none.
    """

    def __init__(self, hidden_size: int, num_drafts: int, width: int) -> None:
        super().__init__()
        inputs = hidden_size + CERTAINTY
        self.hidden = nn.Linear(inputs, width) if width else None
        self.out = nn.Linear(width or inputs, 1, bias=False)
        self.bias = nn.Parameter(torch.empty(num_drafts))

    def forward(self, rows: Tensor, sure: Tensor) -> Tensor:
        """Logits of the hazards [B, N].

        Args:
            rows: [B, N, H], what the lm_head was given.
            sure: [B, N, 3], from `certainty`.
        """
        x = _wide(rows.detach())
        # The length of a state says little, and would make the step of an update depend on it.
        x = F.rms_norm(x, x.shape[-1:], None, _EPS)
        sure = sure.detach().to(x.dtype)
        x = torch.cat((x, sure), dim=-1)
        if self.hidden is not None:
            x = F.silu(_linear(x, self.hidden))
        return _linear(x, self.out).squeeze(-1) + _wide(self.bias) - sure[..., 0]

    def make_neutral(self, generator: torch.Generator) -> None:
        """Weights that leave the drafter its own opinion, h = 1 - p, but that learn."""
        _make_neutral(self, self.out, generator)


class AdaFlashHead(nn.Module):
    """The paper's head: mean of the block's rows and its last row, two hidden layers, a sigmoid.

    Args:
        hidden_size: H.
        width: of the hidden layers.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden_size, width)
        self.res = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, block: Tensor) -> Tensor:
        """The share of the block that is worth verifying, anchor counted: [B], between 0 and 1.

        Args:
            block: [B, K, H], all rows of the drafter's output, the anchor's included.
        """
        x = _wide(block.detach())
        x = torch.cat((x.mean(1), x[:, -1]), dim=-1)
        x = F.silu(_linear(x, self.down))
        x = x + F.silu(_linear(x, self.res))
        return _linear(x, self.out).squeeze(-1).sigmoid()

    def make_neutral(self, generator: torch.Generator) -> None:
        """Weights with which every share is one half, but that learn."""
        _make_neutral(self, self.out, generator)


LengthHead = HazardHead | AdaFlashHead


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


@torch.no_grad()
def _make_neutral(head: nn.Module, out: nn.Linear, generator: torch.Generator) -> None:
    for parameter in head.parameters():
        if parameter.dim() > 1 and parameter is not out.weight:
            drawn = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
            parameter.copy_(drawn)
        else:
            parameter.zero_()


def survival_of(hazard_logits: Tensor) -> Tensor:
    """S_i [B, N] of the logits of hazards [B, N]: the cumulative product of 1 - h."""
    return F.logsigmoid(-hazard_logits).cumsum(-1).exp()


def num_accepted(is_right: Tensor) -> Tensor:
    """What a verification of whole blocks accepts: int64 [B] of bool [B, N], the right drafts.

    Given the committed text: drafts past its end count as wrong here, see `is_ended`.
    """
    return is_right.long().cumprod(1).sum(1)


def is_ended(accepted: Tensor, num_known: Tensor) -> Tensor:
    """Bool [B], where the text ended before a draft was wrong: what was accepted is censored.

    Args:
        accepted: [B], from `num_accepted`.
        num_known: [B], drafts at whose place the text has a token.
    """
    return accepted >= num_known


def log_likelihood(hazard_logits: Tensor, accepted: Tensor, num_known: Tensor) -> Tensor:
    """Of what was accepted [B]: sum over i < a of log(1 - h_i), and log h_a unless censored.

    Args:
        hazard_logits: [B, N].
        accepted, num_known: [B], see `is_ended`; `num_known` above N is N.
    """
    places = torch.arange(hazard_logits.shape[1], device=hazard_logits.device)
    right = F.logsigmoid(-hazard_logits).where(places < accepted.unsqueeze(1), 0.0)
    failed = (places == accepted.unsqueeze(1)) & (places < num_known.unsqueeze(1))
    return (right + F.logsigmoid(hazard_logits).where(failed, 0.0)).sum(1)


def sufficient_share(accepted: Tensor, num_drafts: int) -> Tensor:
    """The scalar head's label [B]: the smallest width that accepts as much as the whole block.

    A share of N + 1, since the anchor is verified too; float32.
    """
    return (accepted + 1).float() / (num_drafts + 1)


def verified_drafts(shares: Tensor, num_drafts: int) -> Tensor:
    """Drafts that AdaFlash's rule verifies [B]: floor(share * k), clamped to 1..k, less the anchor.

    k is N + 1.
    """
    rows = (shares * (num_drafts + 1)).floor().clamp(1, num_drafts + 1)
    return rows.long() - 1


def truncated(accepted: Tensor, verified: Tensor) -> Tensor:
    """What is seen of `accepted` [B] where only so many drafts [B] are verified."""
    return torch.minimum(accepted, verified)
