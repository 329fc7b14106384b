"""DSpark's heads: what the token before says about the next, and how sure the drafter is of it.

DSpark, arXiv 2607.05147. The block is filled in one pass, so its slots do not know which tokens
their neighbours become; the Markov head adds that where it is cheap, behind the lm_head:

    logits of slot j += W2 latent_j                                x_0 = anchor, x_j = draft j - 1
    vanilla   latent = W1[x_j]
    gated     latent = sigmoid(gate([h_j ; W1[x_j]])) * W1[x_j]
    rnn       g, c, o = joint([state ; W1[x_j] ; h_j]);  latent = tanh(o)
              state = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c), 0 before the block

B blocks, N slots of a block that draft, r rank, H hidden, V tokens to choose from.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash_batch.drafter.length import Watch

__all__ = ["ConfidenceHead", "MarkovHead"]


class MarkovHead(nn.Module):
    """The weights of a Markov head of any kind under their published names."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, kind: str) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self._kept: tuple[Tensor, Tensor] | None = None
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(hidden_size + 2 * rank, 3 * rank) if kind == "rnn" else None

    def bias(self, hidden: Tensor, previous: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """What is added to the logits when the tokens before are known: [B, N, V].

        Args:
            hidden: [B, N, H], the lm_head's input.
            previous: ids [B, N]; the anchor first.
            token_ids: [V], the tokens of the logits; None for all.
        """
        return F.linear(self.latents(hidden, previous), self.rows(token_ids))

    def latents(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[B, N, r], see `bias`."""
        state = hidden.new_zeros(hidden.shape[0], self.rank)
        latents = []
        for slot in range(hidden.shape[1]):
            latent, state = self._step(hidden[:, slot], previous[:, slot], state)
            latents.append(latent)
        return torch.stack(latents, dim=1)

    def rows(self, token_ids: Tensor | None) -> Tensor:
        """W2's rows of these tokens [V, r]; all for None."""
        weight = self.markov_w2.weight
        if token_ids is None:
            return weight
        if self._kept is not None and self._kept[0] is token_ids and not torch.is_grad_enabled():
            return self._kept[1]
        return weight[token_ids]

    @torch.no_grad()
    def keep_rows(self, token_ids: Tensor | None) -> None:
        """Have `rows` of these tokens at hand, without gradients, until the weight is changed.

        Whoever changes it calls this again.
        """
        if token_ids is None:
            self._kept = None
        elif self._kept is not None and self._kept[0] is token_ids:
            self._kept[1].copy_(self.rows(None)[token_ids])  # in place: graphs hold its address
        else:
            self._kept = token_ids, self.rows(None)[token_ids]

    def walk(
        self,
        hidden: Tensor,
        logits: Tensor,
        anchors: Tensor,
        token_ids: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Draft ids [B, N], each the argmax given the one before.

        Args:
            hidden: [B, N, H], the lm_head's input.
            logits: [B, N, V], its output.
            anchors: ids [B].
            token_ids: [V], the tokens of the logits; None for all.
            watch: is shown every choice.
        """
        previous, drafts, rows = anchors, [], self.rows(token_ids)
        state = hidden.new_zeros(hidden.shape[0], self.rank)
        for slot in range(hidden.shape[1]):
            latent, state = self._step(hidden[:, slot], previous, state)
            scores = logits[:, slot] + F.linear(latent, rows)
            best = scores.max(-1).indices  # argmax takes several times as long in bfloat16
            if watch is not None:
                watch(scores, best)
            previous = best if token_ids is None else token_ids[best]
            drafts.append(previous)
        return torch.stack(drafts, dim=1)

    def _step(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(latent, next state) [B, r] of one slot: hidden [B, H], previous [B]."""
        embedded = self.markov_w1(previous)
        if self.gate_proj is not None:
            gate = self.gate_proj(torch.cat((hidden, embedded), dim=-1)).sigmoid()
            return gate * embedded, state
        if self.joint_proj is not None:
            joined = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
            gate, candidate, output = joined.chunk(3, dim=-1)
            gate = gate.sigmoid()
            return output.tanh(), gate * state + (1 - gate) * candidate.tanh()
        return embedded, state


class ConfidenceHead(nn.Module):
    """DSpark's guess at the probability that a draft is accepted, if those before it were."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [..] of features [.., hidden_size + markov_rank]: [h_j ; W1[x_j]]."""
        return cast(Tensor, self.proj(features)).squeeze(-1)
