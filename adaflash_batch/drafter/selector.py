"""DFlash 2's selector: a walk over the best candidates of each slot, scored in pairs.

    score of c in slot i = logit_i(c) + sum over r of A[p, r] * g_i[r] * B[c, r]
    g_i = hidden_projection(h_i);  p = the token chosen in slot i - 1, the anchor before the first

A: predecessor_codebook, B: successor_codebook. The walk is greedy from left to right (not Viterbi):
what was chosen is never taken back.

B blocks, N slots of a block that draft, K candidates, r rank, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaflash_batch.drafter.length import Watch

__all__ = ["CandidateSelector", "best_candidates"]


class CandidateSelector(nn.Module):
    """The selector's weights under their published names; the codebooks have no `.weight`."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))

    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """What the token before adds to each candidate's logit, float32 [.., K].

        Args:
            hidden: [.., H], the lm_head's input.
            previous: ids [..].
            candidates: ids [.., K].
        """
        projected: Tensor = self.hidden_projection(hidden)
        left = self.predecessor_codebook[previous].float() * projected.float()
        right = self.successor_codebook[candidates].float()
        return torch.matmul(right, left.unsqueeze(-1)).squeeze(-1)

    def walk(
        self,
        hidden: Tensor,
        logits: Tensor,
        candidates: Tensor,
        anchors: Tensor,
        watch: Watch | None = None,
    ) -> Tensor:
        """Draft ids [B, N]; among equals the candidate that stands first.

        Args:
            hidden: [B, N, H], the lm_head's input.
            logits: float32 [B, N, K], of the candidates.
            candidates: ids [B, N, K].
            anchors: ids [B].
            watch: is shown every choice.
        """
        previous, drafts = anchors, []
        for slot in range(hidden.shape[1]):
            choices = candidates[:, slot]
            scores = logits[:, slot] + self.edges(hidden[:, slot], previous, choices)
            best = scores.argmax(-1, keepdim=True)
            if watch is not None:
                watch(scores, best.squeeze(-1))
            previous = choices.gather(-1, best).squeeze(-1)
            drafts.append(previous)
        return torch.stack(drafts, dim=1)

    @torch.no_grad()
    def make_silent(self, generator: torch.Generator) -> None:
        """Weights that add nothing to any score, exactly, but learn: B is 0, the rest is not."""
        for weight in (self.hidden_projection.weight, self.predecessor_codebook):
            drawn = torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator)
            weight.copy_(drawn)
        self.successor_codebook.zero_()


def best_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(logits, ids) [.., K] of the best of [.., V], best first, the lower id first among equals.

    `topk` alone leaves the order of equals open, and bf16 logits are often equal: without it the
    first candidate might not be the argmax. Which of the equals at the cut are taken is still open.
    """
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
