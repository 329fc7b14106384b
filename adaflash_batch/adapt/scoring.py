"""Which of two versions of a drafter is the better one, told by the same held-back texts."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash_batch.adapt.evaluate import Acceptance, evaluate
from adaflash_batch.adapt.losses import Head
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.exchange import Trajectory
from adaflash_batch.request import RowKey


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two versions over the same anchors.

    Attributes:
        before: τ with the weights that are served.
        after: with the candidate's.
        error_before, error_after: squared error of what the drafter's own head says, likewise; None
            without a head.
        first: τ with the weights that were served at first; None where that was not asked.
    """

    before: float
    after: float
    error_before: float | None = None
    error_after: float | None = None
    first: float | None = None

    @property
    def is_better(self) -> bool:
        """Whether the candidate drafts better, or the same and says better what that is worth."""
        if self.after != self.before or self.error_before is None or self.error_after is None:
            return self.after > self.before
        return self.error_after < self.error_before

    @property
    def gain(self) -> float:
        """What the candidate adds to τ, as a share of it."""
        return self.after / self.before - 1.0


class Scorer:
    """Scores weights on stored trajectories as they would be served; runs no target pass.

    Args:
        net: of the shape of the drafter, in the dtype of decoding; it is copied.
        embedding: the target's, [vocabulary, H], in that dtype.
        head: the target's lm_head, whole or restricted to a draft vocabulary, in that dtype.
        most_anchors: anchors of a trajectory that are looked at, None for all.
    """

    def __init__(
        self, net: DFlash, *, embedding: Tensor, head: Head, most_anchors: int | None = 64
    ) -> None:
        self._net = copy.deepcopy(net).requires_grad_(False).eval()
        self._embedding, self._head, self._most_anchors = embedding, head, most_anchors
        self._served: dict[RowKey, Acceptance] = {}
        self._candidate: dict[RowKey, Acceptance] = {}
        self._first: dict[RowKey, Acceptance] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of decoding."""
        return self._embedding.dtype

    def compare(
        self,
        candidate: Mapping[str, Tensor],
        served: Mapping[str, Tensor],
        trajectories: Sequence[Trajectory],
        first: Mapping[str, Tensor] | None = None,
    ) -> Generator[None, None, Comparison | None]:
        """Score both, yielding after each text; None where the texts have no anchor.

        What the served weights scored is remembered: texts are scored with them once only, until
        `accept`. So is what the first ones scored, for good.

        Args:
            first: what was served at first, to tell what all rounds together came to; those that
                are published look better than they are, since they were chosen for it.
        """
        self._candidate = {}
        yield from self._score(candidate, trajectories, self._candidate)
        self._served = yield from self._scored(served, trajectories, self._served)
        if first is not None:
            self._first = yield from self._scored(first, trajectories, self._first)
        before, after = (Acceptance.of(each.values()) for each in (self._served, self._candidate))
        taus = before.emitted_per_anchor, after.emitted_per_anchor
        if taus[0] is None or taus[1] is None:
            return None
        errors = [each.calibration.mean_squared_error for each in (before, after)]
        at_first = None if first is None else Acceptance.of(self._first.values()).emitted_per_anchor
        return Comparison(taus[0], taus[1], errors[0], errors[1], at_first)

    def _scored(
        self,
        weights: Mapping[str, Tensor],
        trajectories: Sequence[Trajectory],
        known: dict[RowKey, Acceptance],
    ) -> Generator[None, None, dict[RowKey, Acceptance]]:
        """The scores of these texts, of which those that are known stay."""
        scores = {each.key: known[each.key] for each in trajectories if each.key in known}
        unknown = [each for each in trajectories if each.key not in scores]
        yield from self._score(weights, unknown, scores)
        return scores

    def accept(self) -> None:
        """The candidate of the last comparison is served from now on."""
        self._served = self._candidate

    def forget(self) -> None:
        """Other weights are served from now on, and count as the first."""
        self._served, self._first = {}, {}

    def _score(
        self,
        weights: Mapping[str, Tensor],
        trajectories: Sequence[Trajectory],
        scores: dict[RowKey, Acceptance],
    ) -> Generator[None, None, None]:
        if trajectories:
            self._load(weights)
        for each in trajectories:
            scores[each.key] = evaluate(
                self._net,
                each,
                self._embedding,
                self._project,
                token_ids=self._head.token_ids,
                most_anchors=self._most_anchors,
            )
            yield

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._net.named_parameters():
            parameter.copy_(weights[name])

    def _project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head.weight)
