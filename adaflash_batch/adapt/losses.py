"""The objective of drafter training: the loss and its gradient, one chunk of positions at a time.

The target's lm_head is frozen and shared by both sides, so logits are never kept: the gradient of
the drafter's hidden states is made in the forward pass, while a chunk's logits are at hand.

# N positions, C positions of a chunk, V rows of the lm_head (vocabulary), H hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash_batch.adapt.known_gradient import with_gradient
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.drafter.length import CERTAINTY, certainty_of
from adaflash_batch.kernels.opd_loss import TokenLosses, opd_loss
from adaflash_batch.kernels.vocabulary_loss import StateLosses, entries_of_chunk, vocabulary_loss

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The target's frozen lm_head, without bias, whole or cut down to a draft vocabulary.

    Attributes:
        weight: [V, H].
        row_of_token: int64 [tokens of the target], the row of each token and -1 for tokens outside
            the draft vocabulary; None when row v is token v.
        token_ids: int64 [V], the token of each row; None when row v is token v.
    """

    weight: Tensor
    row_of_token: Tensor | None = None
    token_ids: Tensor | None = None

    @staticmethod
    def restricted(weight: Tensor, token_ids: Tensor) -> Head:
        """The rows of a whole head [tokens, H] that belong to token_ids [V], all different."""
        return Head.of_rows(weight.detach()[token_ids], token_ids, len(weight))

    @staticmethod
    def of_rows(weight: Tensor, token_ids: Tensor, num_tokens: int) -> Head:
        """From the rows [V, H] of token_ids [V], all different, of so many tokens."""
        row_of_token = torch.full((num_tokens,), -1, dtype=torch.int64, device=weight.device)
        row_of_token[token_ids] = torch.arange(len(token_ids), device=weight.device)
        assert int((row_of_token >= 0).sum()) == len(token_ids), "a token occurs twice"
        return Head(weight, row_of_token, token_ids)

    def to(self, device: torch.device, dtype: torch.dtype) -> Head:
        """The same on another device, the weight in this dtype."""
        ids = [None if x is None else x.to(device) for x in (self.row_of_token, self.token_ids)]
        return Head(self.weight.to(device, dtype), *ids)

    def rows(self, token_ids: Tensor) -> Tensor:
        """The row of each token, -1 outside the draft vocabulary."""
        return token_ids if self.row_of_token is None else self.row_of_token[token_ids]


@dataclass(frozen=True, slots=True, eq=False)
class LossStats:
    """What a loss was made of. Means are weighted like the loss.

    Attributes:
        positions: supervised positions: weight above 0 and label inside the draft vocabulary.
        weight: sum of their weights.
        outside_vocabulary: positions of weight above 0 that were left out, since their label is
            outside the draft vocabulary.
        cross_entropy: mean -log q(label), nats.
        divergence: mean KL as it enters the loss (after clipping), nats; 0 for `ce`.
        clipped_positions: supervised positions with at least one clipped entry.
        clip_rate: clipped vocabulary entries over all entries of the supervised positions.
        hits: bool [N], supervised positions where the drafter's argmax is the label.
        certainty: [N, 3], of that argmax at supervised positions (length.certainty), 0 elsewhere;
            None where it was not asked for.
    """

    positions: int
    weight: float
    outside_vocabulary: int
    cross_entropy: float
    divergence: float
    clipped_positions: int
    clip_rate: float
    hits: Tensor
    certainty: Tensor | None = None


def position_weights(positions: Tensor, gamma: float) -> Tensor:
    """exp(-(i - 1) / gamma) for block positions i = 1, 2, ..., float32 (DFlash, arXiv 2602.06036).

    Position 1 is the first token drafted, also where the anchor's slot drafts it.
    """
    return torch.exp(-(positions.float() - 1.0) / gamma)


class Bias(NamedTuple):
    """What is added to the student's logits alone: latents @ table.T, of low rank r.

    latents: [N, r]; table: [V, r]. Both may want gradients.
    """

    latents: Tensor
    table: Tensor


def draft_loss(
    objective: Objective,
    head: Head,
    student: Tensor,
    weights: Tensor,
    teacher: Tensor | None = None,
    labels: Tensor | None = None,
    total_weight: float | Tensor | None = None,
    bias: Bias | None = None,
    with_certainty: bool = False,
) -> tuple[Tensor, LossStats]:
    """The weighted mean loss over positions, with a gradient for `student` and `bias` alone.

    Args:
        student: the drafter's output [N, H], bfloat16 or float32.
        weights: [N], 0 or more. Positions of weight 0 cost nothing and may hold anything.
        teacher: the target's last hidden states [N, H] that chose the labelled tokens; not needed
            for `ce` with labels. Under a restricted head both distributions are over the draft
            vocabulary.
        labels: token ids [N]; without them the label is the teacher's argmax over the head's rows.
            Positions labelled outside the draft vocabulary are left out of all terms and of the
            normaliser.
        total_weight: what the sum is divided by instead of the weights at hand, where several
            micro-batches or ranks make one batch.
        bias: added to the student's logits.
        with_certainty: say how sure the drafter is, too.

    Returns:
        a float32 scalar (float64 where the head is float64), and the statistics.
    """
    assert labels is not None or teacher is not None, "neither labels nor a teacher"
    assert teacher is not None or objective.kind == "ce", f"{objective.kind} needs a teacher"
    inputs = (student, *(bias or ()))
    wants_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    with torch.no_grad():
        chosen = _choose(head, weights, labels)
        if total_weight is None:
            total_weight = chosen.weights.sum()
        gradients = _Gradients.of(student, bias) if wants_gradient else None
        parts = [_Rows.none(weights)]
        sides = head.weight, student, teacher
        size, is_cut = objective.positions_at_once(head.weight, has_bias=bias is not None)
        for chunk in chosen.split(size):
            found = (
                _losses_by_vocabulary(objective, *sides, chunk, wants_gradient)
                if is_cut
                else _losses(objective, *sides, chunk, bias, with_certainty)
            )
            parts.append(_Rows.of(found, with_certainty))
            if gradients is not None:
                share = (chunk.weights / total_weight).unsqueeze(-1)
                gradients.add(chunk.positions, found, share, head.weight, bias)
            del found  # before the next chunk's gradient is made
        rows = _Rows(*map(torch.cat, zip(*parts, strict=True)))
        loss, stats = _summarise(objective, chosen, rows, len(head.weight), len(student))
        loss = loss / total_weight if len(chosen.positions) else loss
    if gradients is None:
        return loss, stats
    pairs = list(zip(inputs, gradients, strict=False))
    return with_gradient(loss, pairs), stats


class _Gradients(NamedTuple):
    """Of the loss, empty where none is wanted; the table's in float32: every chunk adds to it."""

    student: Tensor
    latents: Tensor
    table: Tensor

    @staticmethod
    def of(student: Tensor, bias: Bias | None) -> _Gradients:
        nothing = student.new_zeros(0)
        own = torch.zeros_like(student) if student.requires_grad else nothing
        if bias is None or not any(each.requires_grad for each in bias):
            return _Gradients(own, nothing, nothing)
        kind = torch.promote_types(bias.table.dtype, torch.float32)
        table = torch.zeros_like(bias.table, dtype=kind)
        return _Gradients(own, torch.zeros_like(bias.latents), table)

    def add(
        self,
        positions: Tensor,
        found: TokenLosses | StateLosses,
        share: Tensor,
        weight: Tensor,
        bias: Bias | None,
    ) -> None:
        """A chunk's part, from the gradient by its logits or states before weighting."""
        if isinstance(found, StateLosses):
            self.student[positions] = (found.by_state * share).to(self.student.dtype)
            return
        by_logit = found.by_logit.to(weight.dtype)
        if len(self.student):
            self.student[positions] = (by_logit @ weight * share).to(self.student.dtype)
        if bias is not None and len(self.table):
            by_latent = by_logit.to(bias.table.dtype) @ bias.table * share
            self.latents[positions] = by_latent.to(self.latents.dtype)
            shared = (bias.latents[positions] * share).to(by_logit.dtype)
            self.table.add_(by_logit.T @ shared)


class _Chosen(NamedTuple):
    """Supervised positions.

    labels: rows of the head; None where the teacher's argmax is to be the label.
    outside: positions left out for a label outside the draft vocabulary.
    """

    positions: Tensor
    weights: Tensor
    labels: Tensor | None
    outside: int

    def split(self, chunk_rows: int) -> list[_Chosen]:
        starts = range(0, len(self.positions), chunk_rows)
        return [self._take(slice(start, start + chunk_rows)) for start in starts]

    def _take(self, which: slice | Tensor) -> _Chosen:
        labels = None if self.labels is None else self.labels[which]
        return _Chosen(self.positions[which], self.weights[which], labels, 0)


class _Rows(NamedTuple):
    """The losses of positions, all [positions]; clipped counts vocabulary entries."""

    cross_entropy: Tensor
    divergence: Tensor
    clipped: Tensor
    hits: Tensor
    certainty: Tensor  # [positions, 3], or [0, 3]

    @staticmethod
    def none(like: Tensor) -> _Rows:
        empty = like.new_empty(0)
        return _Rows(empty, empty, empty.long(), empty.bool(), like.new_empty(0, CERTAINTY))

    @staticmethod
    def of(found: TokenLosses | StateLosses, with_certainty: bool) -> _Rows:
        sure = found.cross_entropy.new_empty(0, CERTAINTY)
        if with_certainty:
            sure = certainty_of(found.top, found.second)
        return _Rows(found.cross_entropy, found.divergence, found.clipped, found.hits, sure)


def _choose(head: Head, weights: Tensor, labels: Tensor | None) -> _Chosen:
    (positions,) = torch.nonzero(weights > 0, as_tuple=True)
    chosen = _Chosen(positions, weights[positions], None, 0)
    if labels is None:
        return chosen
    # Looked up after the selection: the labels of other positions need not be tokens.
    rows = head.rows(labels[positions])
    chosen = chosen._replace(labels=rows)
    if head.row_of_token is None:
        return chosen
    return chosen._take(rows >= 0)._replace(outside=int((rows < 0).sum()))


def _losses(
    objective: Objective,
    weight: Tensor,
    student: Tensor,
    teacher: Tensor | None,
    chunk: _Chosen,
    bias: Bias | None,
    with_certainty: bool,
) -> TokenLosses:
    """Losses of a chunk, and their gradient by the student's logits [C, V]."""
    logits = _logits(weight, student[chunk.positions], _rows_of(bias, chunk.positions))
    taught = None
    if teacher is not None and (objective.kind != "ce" or chunk.labels is None):
        taught = _logits(weight, teacher[chunk.positions])
    return opd_loss(logits, taught, chunk.labels, objective.terms, with_likeliest=with_certainty)


def _losses_by_vocabulary(
    objective: Objective,
    weight: Tensor,
    student: Tensor,
    teacher: Tensor | None,
    chunk: _Chosen,
    wants_gradient: bool,
) -> StateLosses:
    """The same by the student's states, without a row of logits."""
    size = entries_of_chunk(len(chunk.positions), weight.element_size(), objective.logit_bytes)
    return vocabulary_loss(
        weight,
        student[chunk.positions],
        None if teacher is None else teacher[chunk.positions],
        *(chunk.labels, objective.terms, size),
        wants_gradient=wants_gradient,
    )


def _rows_of(bias: Bias | None, positions: Tensor) -> Bias | None:
    return None if bias is None else Bias(bias.latents[positions], bias.table)


def _logits(weight: Tensor, hidden: Tensor, bias: Bias | None = None) -> Tensor:
    logits = F.linear(hidden.to(weight.dtype), weight)
    if bias is not None:
        logits += F.linear(bias.latents, bias.table)
    return logits


def _summarise(
    objective: Objective, chosen: _Chosen, rows: _Rows, num_entries: int, num_positions: int
) -> tuple[Tensor, LossStats]:
    """The weighted sum of the loss, and the statistics."""
    weight = chosen.weights.sum()
    ce_sum = (rows.cross_entropy * chosen.weights).sum()
    kl_sum = (rows.divergence * chosen.weights).sum()
    clipped_positions = (rows.clipped > 0).sum()
    # One transfer from the device for all of them.
    numbers = torch.stack(
        [x.double() for x in (weight, ce_sum, kl_sum, clipped_positions, rows.clipped.sum())]
    ).tolist()
    total, cross_entropy, divergence, positions_clipped, entries_clipped = numbers
    count = len(chosen.positions)
    hits = rows.hits.new_zeros(num_positions)
    hits[chosen.positions] = rows.hits
    sure = None
    if len(rows.certainty) == count:
        sure = rows.certainty.new_zeros(num_positions, CERTAINTY)
        sure[chosen.positions] = rows.certainty
    ce_share, kl_share = objective.shares
    stats = LossStats(
        positions=count,
        weight=total,
        outside_vocabulary=chosen.outside,
        cross_entropy=cross_entropy / total if count else 0.0,
        divergence=divergence / total if count else 0.0,
        clipped_positions=int(positions_clipped),
        clip_rate=entries_clipped / (count * num_entries) if count else 0.0,
        hits=hits,
        certainty=sure,
    )
    return ce_share * ce_sum + kl_share * kl_sum, stats
