"""Which parameters of a drafter an update moves: all, its new parts, or low-rank additions.

    all    every parameter
    new    the parts that the published DFlash backbone lacks: Markov head, confidence head,
           selector, convolutions, input projection, length head
    heads  those that only judge drafts: confidence head, length head
    lora   W + B A for the projections of the backbone and the input projection (LoRA, arXiv
           2106.09685), and as in `new` the parts that are no such projection

What is not moved takes no gradient, no memory of the optimiser and no time of it. The master
weights always have the additions in them, so that whoever reads them need not know of any; the
factors are kept beside them. A low-rank projection costs no product with a gradient of W's shape.

N rows, O outputs, I inputs, R rank
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from adaflash_batch.adapt.randomness import seed_of
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.errors import ConfigError

AdaptedParameters = Literal["all", "new", "lora", "heads"]

_KINDS = ("all", "new", "lora", "heads")
# Where the projections are; tables of tokens and the kernels of convolutions are no projections.
_PROJECTIONS = ("fc.", "layers.", "input_projection.")
_HEADS = ("confidence_head.", "length_head.")
_NEW_PARTS = ("markov_head.", "candidate_selector.", "input_projection.", *_HEADS)
_CONVOLUTIONS = "_conv."
_A, _B = ".lora_a", ".lora_b"


def is_projection(name: str, parameter: Tensor) -> bool:
    """Whether a parameter, or a factor of an addition to it, is the matrix of a projection."""
    return parameter.dim() == 2 and name.startswith(_PROJECTIONS) and _CONVOLUTIONS not in name


def is_new(name: str) -> bool:
    """Whether a parameter belongs to a part that the published DFlash backbone lacks."""
    return name.startswith(_NEW_PARTS) or _CONVOLUTIONS in name


def is_head(name: str) -> bool:
    """Whether a parameter belongs to a head that judges drafts and changes none."""
    return name.startswith(_HEADS)


def _is_moved(name: str, kind: AdaptedParameters) -> bool:
    """Whether a parameter is moved itself, low-rank additions aside."""
    if kind == "heads":
        return is_head(name)
    return kind == "all" or is_new(name)


class MovedParameters:
    """What an optimiser moves of a drafter, and the copy of it that forward and backward run.

    Args:
        net: the master weights; changed in place by `spread`, with additions merged.
        compute: dtype of the copy. Without need for a copy it is `net` itself.
        kind: see above. Raises ConfigError for other words, and for `new` and `heads` where there
            is no such part.
        rank: of the additions.

    Attributes:
        working: the weights that the next update sees; what is not moved wants no gradient.
        masters: in the masters' dtype, by name: parameters of `net`, and factors as `NAME.lora_a`
            [R, I] and `NAME.lora_b` [O, R]. The optimiser writes to them.
    """

    def __init__(
        self, net: DFlash, *, compute: torch.dtype, kind: AdaptedParameters, rank: int
    ) -> None:
        _check(net, kind, rank)
        is_same = compute == net.fc.weight.dtype and kind == "all"
        self.working = net if is_same else copy.deepcopy(net).to(compute)
        self._net, self._rank = net, rank
        named = dict(net.named_parameters())
        low_rank = [n for n, p in named.items() if kind == "lora" and is_projection(n, p)]
        self._full = [n for n in named if _is_moved(n, kind) and n not in low_rank]
        self.masters: dict[str, Tensor] = {name: named[name] for name in self._full}
        self._leaves: dict[str, Tensor] = {
            name: leaf for name, leaf in self.working.named_parameters() if name in self.masters
        }
        if kind != "all":
            for name, parameter in self.working.named_parameters():
                parameter.requires_grad_(name in self.masters)
        self._merged: dict[str, tuple[Tensor, Tensor]] = {}
        for name in low_rank:
            self._add(name, named[name])

    def _add(self, name: str, weight: Tensor) -> None:
        a, b = _first_factors(name, weight, self._rank)
        self.masters |= {name + _A: a, name + _B: b}
        self._merged[name] = (a.clone(), b.clone())
        place, _, own_name = name.removesuffix(".weight").rpartition(".")
        parent = self.working.get_submodule(place)
        linear = LowRankLinear(cast(nn.Linear, getattr(parent, own_name)), a, b)
        setattr(parent, own_name, linear)
        self._leaves |= {name + _A: linear.a, name + _B: linear.b}

    def collect_gradients(self) -> None:
        """Move the gradients of the working copy to the masters."""
        if self.working is self._net:
            return
        for name, master in self.masters.items():
            leaf = self._leaves[name]
            master.grad = None if leaf.grad is None else leaf.grad.to(master.dtype)
            leaf.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Let `net` and the working copy follow the masters that an optimiser moved."""
        weights = dict(self._net.named_parameters())
        for name, (old_a, old_b) in self._merged.items():
            a, b = self.masters[name + _A], self.masters[name + _B]
            weights[name].addmm_(torch.cat((b, -old_b), dim=1), torch.cat((a, old_a)))
            old_a.copy_(a)
            old_b.copy_(b)
        if self.working is not self._net:
            self._refresh({*self._full, *self._merged})

    @torch.no_grad()
    def spread_all(self) -> None:
        """Let the working copy follow `net`, of which anything may have been changed."""
        if self.working is not self._net:
            self._refresh({name for name, _ in self._net.named_parameters()})

    def _refresh(self, names: set[str]) -> None:
        pairs = zip(self._net.named_parameters(), self.working.named_parameters(), strict=True)
        for (name, master), (_, working) in pairs:
            if name in names:
                working.copy_(master)
        for name in self._merged:
            for part in (name + _A, name + _B):
                self._leaves[part].copy_(self.masters[part])

    def factors(self) -> dict[str, Tensor]:
        """Those of the additions, by name; what `net` holds has them in it."""
        return {n: self.masters[n] for base in self._merged for n in (base + _A, base + _B)}

    @torch.no_grad()
    def restore_factors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `factors`, `net` having been restored.

        Where there are none that fit, fresh additions to what `net` holds now begin.
        """
        weights = dict(self._net.named_parameters())
        for name, (old_a, old_b) in self._merged.items():
            fresh = _first_factors(name, weights[name], self._rank)
            kept = (tensors.get(name + _A), tensors.get(name + _B))
            fits = all(
                k is not None and k.shape == f.shape for k, f in zip(kept, fresh, strict=True)
            )
            a, b = cast(tuple[Tensor, Tensor], kept) if fits else fresh
            for factor, ours, old in ((a, name + _A, old_a), (b, name + _B, old_b)):
                self.masters[ours].copy_(factor)
                old.copy_(factor)


def _check(net: DFlash, kind: AdaptedParameters, rank: int) -> None:
    if kind not in _KINDS:
        raise ConfigError(f"adapted parameters are {kind!r}, they must be all, new, lora or heads")
    if rank < 1:
        raise ConfigError(f"the rank of low-rank additions is {rank}, it must be 1 or more")
    if kind == "new" and not any(is_new(name) for name, _ in net.named_parameters()):
        raise ConfigError(
            "adapted parameters are 'new', and the drafter is a plain DFlash without new parts",
            "Adapt all or lora, or grow the drafter a part",
        )
    if kind == "heads" and not any(is_head(name) for name, _ in net.named_parameters()):
        raise ConfigError(
            "adapted parameters are 'heads', and the drafter has no confidence or length head",
            "Give it one: drafter train --from DIR --length-head hazard --parameters heads",
        )


def _first_factors(name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A [R, I] drawn, B [O, R] zero: the addition begins as nothing, and learns.

    A's scale makes a step of B move W by about what a step of W itself would, so that one learning
    rate serves all kinds.
    """
    generator = torch.Generator().manual_seed(seed_of("lora", name, rank))
    a = torch.randn(rank, weight.shape[1], generator=generator) * rank**-0.5
    return a.to(weight.device, weight.dtype), weight.new_zeros(weight.shape[0], rank).detach()


class LowRankLinear(nn.Linear):
    """A projection whose weight has its low-rank addition in it; gradients reach the factors alone.

    The factors are no parameters, so names and parameters stay those of a plain projection.

    Args:
        linear: without bias; its weight is shared.
        a, b: [R, I] and [O, R], copied in the weight's dtype.
    """

    def __init__(self, linear: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        dtype = linear.weight.dtype
        self.a = a.detach().to(dtype, copy=True).requires_grad_()
        self.b = b.detach().to(dtype, copy=True).requires_grad_()

    def forward(self, input: Tensor) -> Tensor:
        """[.., O] of [.., I]."""
        factors = (self.a, self.b)
        product = _LowRankProduct.apply(input, self.weight, *factors)  # type: ignore[no-untyped-call]
        return cast(Tensor, product)


class _LowRankProduct(torch.autograd.Function):
    """x W^T, where W has B A in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor]:
        x, weight, a, b = ctx.saved_tensors
        by_input = by_output @ weight if ctx.needs_input_grad[0] else None
        rows, by_rows = x.flatten(0, -2), by_output.flatten(0, -2)  # [N, I], [N, O]
        return by_input, None, (by_rows @ b).T @ rows, by_rows.T @ (rows @ a.T)
