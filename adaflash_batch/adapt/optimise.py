"""One update of a drafter: blocks, loss, gradient, a step on float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from adaflash_batch.adapt.batch_loss import BatchLoss
from adaflash_batch.adapt.blocks import pick_anchors
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimiser import Optimiser, OptimiserKind
from adaflash_batch.adapt.parameters import AdaptedParameters, MovedParameters, is_head
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import Trajectory

LARGEST_GRADIENT = 1.0
"""The norm that the gradients of an update are shortened to."""


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did.

    Attributes:
        loss: before it.
        hit_rate: share of the supervised positions that were drafted right; 0 without any.
        clip_rate: see LossStats.
        positions: supervised positions.
        is_dropped: nothing was changed, since there was nothing to learn from (`positions` is 0) or
            the loss or the gradient was not finite.
    """

    loss: float
    hit_rate: float
    clip_rate: float
    positions: int
    is_dropped: bool


class Trainer(Protocol):
    """A drafter's master weights with what moves them, as an OnlineTrainer drives it."""

    @property
    def net(self) -> DFlash:
        """The master weights, float32, as the last call left them; to be read only."""

    def update(
        self, trajectories: Sequence[Trajectory], generator: torch.Generator, rate: float
    ) -> Update:
        """See DrafterTrainer."""

    def pull(self, weights: Mapping[str, Tensor], share: float) -> None:
        """See DrafterTrainer."""

    def state(self) -> dict[str, Tensor]:
        """See DrafterTrainer; whole tensors, however they are held."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See DrafterTrainer."""

    def close(self) -> None:
        """Nothing of it runs any more. May be repeated."""


class DrafterTrainer:
    """Trains a drafter on trajectories; the same calls on one machine give the same weights.

    Args:
        net: float32, the master weights; changed in place. What is published.
        embedding: the target's, [vocabulary, H].
        head: the target's lm_head, whole or restricted to a draft vocabulary.
        objective: the loss.
        gamma: decay of the position weights.
        anchors: blocks of each trajectory in an update.
        optimiser, weight_decay: see Optimiser.
        compute: dtype of forward and backward.
        parameters, rank: what is moved, see parameters.py; the rest of `net` stays as it is.
    """

    def __init__(
        self,
        net: DFlash,
        *,
        embedding: Tensor,
        head: Head,
        objective: Objective,
        gamma: float,
        anchors: int,
        weight_decay: float,
        compute: torch.dtype,
        optimiser: OptimiserKind = "adamw",
        parameters: AdaptedParameters = "all",
        rank: int = 8,
    ) -> None:
        self.net = net
        check_label(net, objective)
        self._moved = MovedParameters(net, compute=compute, kind=parameters, rank=rank)
        if parameters == "heads":
            objective = replace(objective, kind="ce")  # they have no teacher but the text
        self._batch = BatchLoss(embedding, head, objective, gamma).to(embedding.device, compute)
        self._anchors = anchors
        self._optimiser = Optimiser(self._moved.masters, kind=optimiser, weight_decay=weight_decay)

    @property
    def working(self) -> DFlash:
        """The weights that the next update sees, in the dtype of forward and backward."""
        return self._moved.working

    @property
    def needs_teacher(self) -> bool:
        """Whether trajectories must come with last hidden states."""
        return self._batch.needs_teacher

    def close(self) -> None:
        """Nothing runs."""

    def update(
        self, trajectories: Sequence[Trajectory], generator: torch.Generator, rate: float
    ) -> Update:
        """One step of the optimiser.

        Args:
            trajectories: whose blocks are trained on.
            generator: picks the anchors.
            rate: the learning rate of this step.
        """
        anchors = pick_anchors(trajectories, self._anchors, generator)
        result = self._batch(self.working, trajectories, anchors)
        rate_of_hits = result.hits / result.positions if result.positions else 0.0
        loss = float(result.value.detach())
        is_sound = result.value.requires_grad and math.isfinite(loss)
        if is_sound:
            is_sound = self._step(result.value, rate)
        return Update(loss, rate_of_hits, result.clip_rate, result.positions, not is_sound)

    def _step(self, loss: Tensor, rate: float) -> bool:
        """Move the weights; False, and nothing moves, where the gradient is not finite."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._moved.collect_gradients()
        is_sound = self._clip_gradients()
        if is_sound:
            self._optimiser.step(rate)
            self._moved.spread()
        self._optimiser.zero_grad()
        return is_sound

    @torch.no_grad()
    def pull(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Move the weights this share of the way to others, by name."""
        for name, parameter in self.net.named_parameters():
            parameter.lerp_(weights[name], share)
        self._moved.spread_all()

    def _clip_gradients(self) -> bool:
        """Bound them; whether all are finite."""
        parts = clipped_apart(self.net, self._moved.masters.values())
        norms = [torch.nn.utils.clip_grad_norm_(each, LARGEST_GRADIENT) for each in parts]
        return all(bool(norm.isfinite()) for norm in norms)

    def state(self) -> dict[str, Tensor]:
        """Weights, factors of additions that are in them and the optimiser's memory, by name."""
        weights = {f"weight.{n}": p.detach() for n, p in self.net.named_parameters()}
        return weights | self._moved.factors() | self._optimiser.state()

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a `state`, exactly if it is of the same kind; else from its weights."""
        for name, parameter in self.net.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
        self._moved.restore_factors(tensors)
        self._optimiser.restore(tensors)
        self._moved.spread_all()


def clipped_apart(net: DFlash, moved: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters whose gradients are bounded together: what drafts, and the heads that judge it.

    The latter's must not shorten the steps of what drafts.
    """
    ids = {id(parameter) for name, parameter in net.named_parameters() if is_head(name)}
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in moved:
        parts[id(parameter) in ids].append(parameter)
    return parts


def check_label(net: DFlash, objective: Objective) -> None:
    """Raises ConfigError for a label that the net's length head does not learn from."""
    if objective.length_label == "truncated" and net.config.length_head != "adaflash":
        raise ConfigError(
            "length_label is 'truncated', and the drafter has no length head of AdaFlash's",
            "Only that one can be taught by what the width that it asks for would show",
        )


def learning_rate(peak: float, warm_up: float, progress: float) -> float:
    """Cosine from the peak to 0 after a linear warm-up.

    Args:
        peak: its highest value.
        warm_up: share of the training that it takes to get there.
        progress: share of the training that is done, above 0.
    """
    if progress < warm_up:
        return peak * progress / warm_up
    return peak * 0.5 * (1.0 + math.cos(math.pi * (progress - warm_up) / (1.0 - warm_up)))
