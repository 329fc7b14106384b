"""The drafter: a few transformer layers that fill a block of tokens in one pass.

DFlash, arXiv 2602.06036. The drafter reads the target's hidden states: every layer turns them
into keys and values with the same projections that serve its own block.

    context = hidden_norm(fc(features))                     once, shared by all layers
    k, v    = k_norm(k_proj(context)), v_proj(context)      per layer; no input_layernorm
    block   = [anchor, mask, mask, ...]                     embedded by the target, sees context and
                                                            itself, both ways
    logits  = target's lm_head(block output); slot i drafts the token at anchor + i

DSpark lets the anchor's slot draft too (slot j: the token at anchor + 1 + j) and adds a Markov head
(markov.py); DFlash 2 adds convolutions (convolution.py) and a selector (selector.py). A length head
(length.py) of any member says how far its drafts are worth verifying, and changes none of them.

T rows (block rows of all requests, one after another), B blocks, N slots of a block that draft,
C context tokens, H hidden, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from adaflash_batch.drafter.config import DrafterConfig, build_target_layer_ids
from adaflash_batch.drafter.convolution import BlockConvolution
from adaflash_batch.drafter.input_projection import InputProjection
from adaflash_batch.drafter.layers import DrafterLayer, signed_rotation
from adaflash_batch.drafter.length import (
    ADAFLASH,
    HAZARD,
    AdaFlashHead,
    HazardHead,
    LengthHead,
    Proposal,
    Walk,
    Watch,
    certainty,
    survival_of,
)
from adaflash_batch.drafter.markov import ConfidenceHead, MarkovHead
from adaflash_batch.drafter.selector import CandidateSelector, best_candidates

__all__ = ["Attend", "DFlash", "DrafterConfig", "Head", "build_target_layer_ids", "initialise"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads * D].

q, k and v are strided views, contiguous in D only. The scale is D ** -0.5. Rows of a block see
their request's context and their whole block; in a layer with a window (`DrafterConfig.windows`) a
key is seen iff query position - key position < window.
"""


Head = Callable[[Tensor], Tensor]
"""The target's lm_head: [.., H] to [.., V]."""


class DFlash(nn.Module):
    """The drafter's weights under the names of published checkpoints, and what is done with them.

    Attention is the caller's (`Attend`), so that a serving engine with paged keys and a trainer
    with masks run the same code. Embedding and lm_head are the target's.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.markov_head = _markov_head(config)
        self.confidence_head = _confidence_head(config)
        self.candidate_selector = _candidate_selector(config)
        self.input_projection = _input_projection(config)
        self.length_head = _length_head(config)
        # No buffer: `.to(bfloat16)` would round the frequencies. Always made on the CPU, also when
        # the weights are made on the meta device.
        exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
        self._frequencies = config.rope_theta**-exponents
        self._temperatures: Tensor | None = None

    def fuse(self) -> DFlash:
        """Lay q/k/v and gate/up side by side in memory: one matmul for each at inference.

        Names, values and parameters stay; `load_state_dict` and optimisers, which write in place,
        keep working. Without gradients only. Returns self.
        """
        for layer in self._layers():
            layer.self_attn.fuse()
            layer.mlp.fuse()
        return self

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of absolute positions [T], float32 [T, D] (frequencies twice over)."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def context(self, features: Tensor) -> Tensor:
        """[C, H] from the target's tapped hidden states [C, features * H]."""
        return cast(Tensor, self.hidden_norm(self.fc(features)))

    def context_kv(
        self, layer: int, context: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [C, kv_heads, D] of context [C, H] in one layer.

        cos and sin: `rotary` of the absolute positions of the context tokens.
        """
        return cast(DrafterLayer, self.layers[layer]).self_attn.context_kv(context, cos, sin)

    def rows(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """What `block` takes [T, H]: the embeddings, with the input projection where there is one.

        Args:
            embeddings: the target's [T, H], of anchors and masks.
            states: [B, H], what the last tapped layer made of the token before each anchor; 0
                before the first token.
        """
        if self.input_projection is None:
            return embeddings
        return cast(Tensor, self.input_projection(embeddings, states))

    def block(self, embeddings: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, H], ready for lm_head, of block rows [T, H], see `rows`.

        T is whole blocks of `config.block_size` rows.
        cos and sin: `rotary` of the absolute positions of the rows.
        """
        rotation = signed_rotation(cos, sin, embeddings.dtype)
        scale = self.config.input_embedding_scale
        hidden = embeddings if scale == 1 else embeddings * scale
        for index, layer in enumerate(self._layers()):
            hidden = layer(hidden, rotation, partial(attend, index))
        return cast(Tensor, self.norm(hidden))

    def drafting_rows(self, hidden: Tensor) -> Tensor:
        """[B, N, H], of the slots that draft, of `block`'s output [T, H]."""
        blocks = hidden.view(-1, self.config.block_size, hidden.shape[-1])
        return blocks[:, self.config.first_slot :]

    def propose(
        self, hidden: Tensor, anchors: Tensor, head: Head, token_ids: Tensor | None = None
    ) -> Tensor:
        """Draft ids [B, num_drafts]: draft i of a block stands at its anchor + 1 + i.

        Deterministic: the argmax of each slot; with a Markov head the argmax given the draft
        before; with a selector its greedy walk.

        Args:
            hidden: [T, H], from `block`.
            anchors: ids [B].
            head: the target's lm_head, [rows, H] to [rows, V]; of its draft vocabulary alone where
                the drafter has one.
            token_ids: [V], the draft vocabulary, ascending; None where logit v is that of token v.
        """
        return self._walk(self.drafting_rows(hidden), anchors, head, token_ids, None)

    def propose_judged(
        self,
        hidden: Tensor,
        anchors: Tensor,
        head: Head,
        token_ids: Tensor | None = None,
        walk: Walk | None = None,
    ) -> Proposal:
        """What `propose` drafts, with what the net's own heads say of it.

        Survival is the hazard head's, without one DSpark's confidence head's.

        Args:
            walk: does what the net does with the head's logits, faster; it knows `token_ids`.
        """
        rows = self.drafting_rows(hidden)
        if walk is not None:
            drafts, sure = walk(head(rows.flatten(0, 1)).view(*rows.shape[:2], -1), anchors)
        else:
            drafts, sure = self._watched_walk(rows, anchors, head, token_ids)
        survival = length = None
        if isinstance(self.length_head, HazardHead):
            survival = survival_of(self.length_head(rows, sure))
        elif self.confidence_head is not None:
            previous = torch.cat((anchors.unsqueeze(1), drafts[:, :-1]), dim=1)
            survival = self._trust(self.confidence(rows, previous))
        if isinstance(self.length_head, AdaFlashHead):
            length = self.length(hidden)
        return Proposal(drafts, survival, length)

    def _watched_walk(
        self, rows: Tensor, anchors: Tensor, head: Head, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Drafts [B, N], and their certainty where a head wants it."""
        seen = list[tuple[Tensor, Tensor]]()

        def watch(scores: Tensor, best: Tensor) -> None:
            seen.append((scores, best))

        if not isinstance(self.length_head, HazardHead):
            return self._walk(rows, anchors, head, token_ids, None), rows
        drafts = self._walk(rows, anchors, head, token_ids, watch)
        # Of all slots at once: a slot of few requests is too little for so many operations.
        scores, best = (torch.stack(each, dim=1) for each in zip(*seen, strict=True))
        return drafts, certainty(scores, best)

    def _walk(
        self,
        rows: Tensor,
        anchors: Tensor,
        head: Head,
        token_ids: Tensor | None,
        watch: Watch | None,
    ) -> Tensor:
        """`propose`; `watch` is shown every choice, slot by slot."""
        logits = head(rows.flatten(0, 1)).view(*rows.shape[:2], -1)
        if self.markov_head is not None:
            return self.markov_head.walk(rows, logits, anchors, token_ids, watch)
        if self.candidate_selector is not None:
            best, candidates = best_candidates(logits, self.config.selector_top_k)
            candidates = candidates if token_ids is None else token_ids[candidates]
            scores = self.scaled(best)
            return self.candidate_selector.walk(rows, scores, candidates, anchors, watch)
        drafts = logits.max(-1).indices  # argmax takes several times as long in bfloat16
        if watch is not None:
            for slot in range(rows.shape[1]):
                watch(logits[:, slot], drafts[:, slot])
        return drafts if token_ids is None else token_ids[drafts]

    def length(self, hidden: Tensor) -> Tensor:
        """AdaFlash's scalar head [B] of `block`'s output [T, H]; gradients reach it alone."""
        assert isinstance(self.length_head, AdaFlashHead)
        blocks = hidden.view(-1, self.config.block_size, hidden.shape[-1])
        return cast(Tensor, self.length_head(blocks))

    def _trust(self, logits: Tensor) -> Tensor:
        """Survival [B, N] of the confidence head's logits."""
        temperatures = self.config.confidence_temperatures
        logits = logits.float()
        if temperatures:
            # Kept: a graph of the pass may not bring it from the host every time.
            if self._temperatures is None:
                self._temperatures = torch.tensor(temperatures, device=logits.device)
            logits = logits / self._temperatures
        return survival_of(-logits)

    def scaled(self, logits: Tensor) -> Tensor:
        """The head's logits with multiplier and soft cap, float32; their order is the same."""
        scaled = logits.float() * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    def confidence(self, rows: Tensor, previous: Tensor) -> Tensor:
        """The confidence head's logits [B, N]; gradients reach that head alone.

        Args:
            rows: [B, N, H], from `drafting_rows`.
            previous: ids [B, N] of the token before each draft; the anchor first.
        """
        assert self.confidence_head is not None
        if self.config.confidence_head_with_markov:
            assert self.markov_head is not None
            rows = torch.cat((rows, self.markov_head.markov_w1(previous)), dim=-1)
        # How sure the drafter is must not change what it drafts.
        return cast(Tensor, self.confidence_head(rows.detach()))

    def _layers(self) -> Sequence[DrafterLayer]:
        return cast(Sequence[DrafterLayer], self.layers)


def _markov_head(config: DrafterConfig) -> MarkovHead | None:
    if not config.markov_rank:
        return None
    sizes = (config.vocab_size, config.hidden_size, config.markov_rank)
    return MarkovHead(*sizes, kind=config.markov_head_type)


def _confidence_head(config: DrafterConfig) -> ConfidenceHead | None:
    if not config.enable_confidence_head:
        return None
    rank = config.markov_rank if config.confidence_head_with_markov else 0
    return ConfidenceHead(config.hidden_size, rank)


def _candidate_selector(config: DrafterConfig) -> CandidateSelector | None:
    if not config.selector_rank:
        return None
    return CandidateSelector(config.vocab_size, config.hidden_size, config.selector_rank)


def _length_head(config: DrafterConfig) -> LengthHead | None:
    if config.length_head == HAZARD:
        return HazardHead(config.hidden_size, config.num_drafts, config.length_head_width)
    if config.length_head == ADAFLASH:
        return AdaFlashHead(config.hidden_size, config.length_head_width)
    return None


def _input_projection(config: DrafterConfig) -> InputProjection | None:
    if not config.has_input_projection:
        return None
    return InputProjection(config.hidden_size, config.rms_norm_eps)


def initialise(config: DrafterConfig, generator: torch.Generator) -> DFlash:
    """A float32 drafter on the CPU: weights from N(0, 0.02), norms of 1, biases of 0.

    Markov head, convolutions and selector begin without effect, and so does what a length head
    learns. The generator alone decides:
    torch's global random state is neither read nor moved.
    """
    with torch.device("meta"):
        model = DFlash(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("length_head."):
                continue  # drawn last, so that with and without it all else is the same
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        if model.markov_head is not None:
            model.markov_head.markov_w2.weight.zero_()
    silence(model, generator)
    if model.length_head is not None:
        model.length_head.make_neutral(generator)
    return model


def silence(model: DFlash, generator: torch.Generator) -> None:
    """Give DFlash 2's parts weights with which they change no draft, exactly, but learn."""
    for part in model.modules():
        if isinstance(part, BlockConvolution):
            part.make_identity()
        elif isinstance(part, CandidateSelector):
            part.make_silent(generator)
