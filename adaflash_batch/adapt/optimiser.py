"""Optimisers of a drafter's master weights, with a state that can be kept and restored by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn

from adaflash_batch.errors import ConfigError

OptimiserKind = Literal["adamw", "muon"]

# Muon's learning rate over AdamW's: drafters learn faster so (docs/log.md).
_MUON_RATE = 6.0
# What they remember of a parameter.
_OF_ADAMW = ("step", "exp_avg", "exp_avg_sq")
_OF_MUON = ("momentum_buffer",)
# Where the projections are; tables of tokens and the kernels of convolutions are no projections.
_PROJECTIONS = ("fc.", "layers.", "input_projection.")


class Optimiser:
    """AdamW, or Muon for the projections and AdamW for the rest.

    Muon's steps are scaled to the size of AdamW's ("match_rms_adamw", arXiv 2502.16982) and then
    by a factor of our own, so that one learning rate serves both.

    Args:
        net: whose parameters are changed in place; their gradients are read.
        kind: which of the two; raises ConfigError for any other.
        weight_decay: of matrices; norms and biases have none.
    """

    def __init__(self, net: nn.Module, *, kind: OptimiserKind, weight_decay: float) -> None:
        if kind not in ("adamw", "muon"):
            raise ConfigError(f"optimiser is {kind!r}, it must be adamw or muon")
        self._named = dict(net.named_parameters())
        by_muon = [p for n, p in self._named.items() if kind == "muon" and _is_projection(n, p)]
        taken = {id(parameter) for parameter in by_muon}
        rest = [p for p in self._named.values() if id(p) not in taken]
        matrices = [p for p in rest if p.dim() > 1]
        others = [p for p in rest if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
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
        """Go on from a `state`.

        Nothing is there of a parameter before its first step, nor if the other kind had it.
        """
        for part in self._parts:
            part.state.clear()
            kinds = _OF_MUON if isinstance(part, torch.optim.Muon) else _OF_ADAMW
            for group in part.param_groups:
                for parameter in group["params"]:
                    name = next(n for n, p in self._named.items() if p is parameter)
                    kept = {kind: f"{kind}.{name}" for kind in kinds}
                    if all(key in tensors for key in kept.values()):
                        part.state[parameter] = {k: tensors[v].clone() for k, v in kept.items()}


def _is_projection(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and name.startswith(_PROJECTIONS) and "_conv." not in name
