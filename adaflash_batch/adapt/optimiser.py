"""Optimisers of a drafter's master weights, with a state that can be kept and restored by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from adaflash_batch.adapt.parameters import is_projection
from adaflash_batch.errors import ConfigError

OptimiserKind = Literal["adamw", "muon"]

# Muon's learning rate over AdamW's: drafters learn faster so (docs/log.md).
_MUON_RATE = 6.0
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
_MUON_STATE = ("momentum_buffer",)


class Optimiser:
    """AdamW, or Muon for the projections and AdamW for the rest.

    Muon's steps are scaled to the size of AdamW's ("match_rms_adamw", arXiv 2502.16982) and then
    by a factor of our own, so that one learning rate serves both.

    Args:
        named: what is moved, by name, changed in place; gradients are read.
        kind: which of the two; raises ConfigError for any other.
        weight_decay: of matrices; norms and biases have none.
    """

    def __init__(
        self, named: Mapping[str, Tensor], *, kind: OptimiserKind, weight_decay: float
    ) -> None:
        if kind not in ("adamw", "muon"):
            raise ConfigError(f"optimiser is {kind!r}, it must be adamw or muon")
        self._named = dict(named)
        by_muon = [p for n, p in self._named.items() if kind == "muon" and is_projection(n, p)]
        taken = {id(parameter) for parameter in by_muon}
        rest = [p for p in self._named.values() if id(p) not in taken]
        groups = decay_groups(rest, weight_decay)
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups)]
        if by_muon:
            self._parts.append(
                torch.optim.Muon(by_muon, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, rate: float) -> None:
        """One step with this learning rate, which is AdamW's."""
        for part in self._parts:
            factor = _MUON_RATE if isinstance(part, torch.optim.Muon) else 1.0
            for group in part.param_groups:
                group["lr"] = factor * rate
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """What it remembers, as `kind.parameter`."""
        found = {}
        for name, parameter in self._named.items():
            for part in self._parts:
                for kind, value in part.state.get(parameter, {}).items():
                    found[f"{kind}.{name}"] = cast(Tensor, value)
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a `state`; what another optimiser or other parameters left is not taken."""
        for part in self._parts:
            part.state.clear()  # a state from before the first step has nothing for a parameter
            kinds = _MUON_STATE if isinstance(part, torch.optim.Muon) else _ADAMW_STATE
            for group in part.param_groups:
                for parameter in group["params"]:
                    name = next(n for n, p in self._named.items() if p is parameter)
                    found = {kind: tensors.get(f"{kind}.{name}") for kind in kinds}
                    if all(_fits(value, parameter) for value in found.values()):
                        kept = cast(dict[str, Tensor], found)
                        part.state[parameter] = {k: v.clone() for k, v in kept.items()}


def _fits(value: Tensor | None, parameter: Tensor) -> bool:
    """Whether it can be an optimiser's memory of this parameter; a count of steps has no shape."""
    return value is not None and (value.dim() == 0 or value.shape == parameter.shape)


def decay_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices with weight decay, norms and biases without."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
