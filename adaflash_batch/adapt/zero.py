"""One rank of several that train a drafter together, by DeepSpeed's ZeRO (arXiv 1910.02054).

Every rank holds the whole drafter, and a share of the float32 copy that the optimiser steps on and
of what the optimiser remembers (stage 1), of the gradients too (stage 2). All ranks make every
call here together. DeepSpeed is imported late: only who asks for several ranks needs it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adaflash_batch.adapt.batch_loss import BatchLoss
from adaflash_batch.adapt.known_gradient import with_gradient
from adaflash_batch.adapt.member_losses import MemberLoss
from adaflash_batch.adapt.optimise import LARGEST_GRADIENT, Update, clipped_apart
from adaflash_batch.adapt.optimiser import decay_groups
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.exchange import Trajectory

REMEMBERED = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps for every parameter, besides `step`."""

# DeepSpeed's own default would take 2 GB a rank.
_BUCKET = 2**24


class ZeroTrainer:
    """A rank's part of a training; torch.distributed must be up.

    Args:
        net: float32, on the rank's device, the same on all ranks; changed in place.
        batch: on that device, in the dtype of forward and backward.
        weight_decay: of matrices; norms and biases have none.
        stage: of ZeRO, 1 or 2.
    """

    def __init__(self, net: DFlash, batch: BatchLoss, *, weight_decay: float, stage: int) -> None:
        self.net, self._batch = net, batch
        compute = batch.embedding.dtype
        self._working = net if compute == torch.float32 else copy.deepcopy(net).to(compute)
        self._parameters = dict(net.named_parameters())
        # Parameters that are clipped apart are in groups of their own.
        parts = [decay_groups(each, weight_decay) for each in clipped_apart(net, net.parameters())]
        parts = [[group for group in groups if group["params"]] for groups in parts]
        ends = [0, len(parts[0]), len(parts[0]) + len(parts[1])]
        self._clipped_together = [range(*both) for both in pairwise(ends)]
        self._adam = torch.optim.AdamW([group for groups in parts for group in groups])
        self._engine = _engine(net, self._adam, stage)
        self._make_memory()

    def update(
        self, trajectories: Sequence[Trajectory], anchors: Sequence[Tensor], rate: float
    ) -> Update:
        """One step on the trajectories of all ranks.

        Args:
            trajectories: this rank's share; it may be empty.
            anchors: one tensor for each, see `make_blocks`.
            rate: the learning rate.

        Returns:
            What came of all of them, the same on every rank. A rank whose loss or gradient is not
            finite stops the step of all.
        """
        result = self._batch(self._working, trajectories, anchors, _over_ranks)
        gradients, is_finite = self._gradients(result.value)
        update, is_sound = _together(result, is_finite)
        if is_sound:
            is_sound = self._step(gradients, rate)
        return Update(
            update.loss, update.hit_rate, update.clip_rate, update.positions, not is_sound
        )

    @torch.no_grad()
    def pull(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Move the weights this share of the way to others, by name."""
        self._set({n: p.lerp(weights[n].to(p), share) for n, p in self._parameters.items()})

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by name, as copies on the CPU."""
        return {name: p.detach().cpu().clone() for name, p in self._parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """What DrafterTrainer.state gives, put together from the shares of all ranks."""
        from deepspeed.utils import safe_get_full_optimizer_state as whole

        found = {f"weight.{name}": each for name, each in self.weights().items()}
        steps = self._steps()
        if not float(steps[0]):
            return found
        for name, parameter in self._parameters.items():
            found[f"step.{name}"] = steps[0].clone()
            for kind in REMEMBERED:
                found[f"{kind}.{name}"] = whole(parameter, kind).cpu()
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        from deepspeed.utils import safe_set_full_optimizer_state as put

        self._set({name: tensors[f"weight.{name}"] for name in self._parameters})
        for name, parameter in self._parameters.items():
            for kind in REMEMBERED:
                kept = tensors.get(f"{kind}.{name}")
                put(parameter, torch.zeros_like(parameter) if kept is None else kept, kind)
        (age,) = {float(tensors.get(f"step.{name}", 0.0)) for name in self._parameters}
        for step in self._steps():
            step.fill_(age)

    def _set(self, weights: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param as put

        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                put(parameter, parameter.detach())
        self._spread_weights()

    def _make_memory(self) -> None:
        """Allocate what AdamW remembers, and take a step that moves nothing.

        In its first step DeepSpeed looks up the memory of all groups by parameter, when AdamW
        itself would have made that of the first group alone.
        """
        for group in self._adam.param_groups:
            for share in group["params"]:
                memory: dict[str, Tensor] = {kind: torch.zeros_like(share) for kind in REMEMBERED}
                self._adam.state[share] = {"step": torch.zeros(()), **memory}
        self._step([torch.zeros_like(p) for p in self._parameters.values()], rate=0.0)
        for step in self._steps():
            step.zero_()

    def _steps(self) -> list[Tensor]:
        return [memory["step"] for memory in self._adam.state.values()]

    def _gradients(self, loss: Tensor) -> tuple[list[Tensor], bool]:
        """Of the master weights, zero where a loss does not depend on them; whether all is finite.

        They are made apart from the step, since DeepSpeed's ranks must meet their gradients in one
        order, and those of a rank without blocks come in none.
        """
        masters = list(self._parameters.values())
        if not math.isfinite(float(loss.detach())):
            return [], False
        if not loss.requires_grad:
            return [torch.zeros_like(each) for each in masters], True
        inputs = list(self._working.parameters())
        found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        gradients = [each.float() for each in found]
        return gradients, all(bool(each.isfinite().all()) for each in gradients)

    def _step(self, gradients: Sequence[Tensor], rate: float) -> bool:
        """Move the weights; False, and nothing moves, where the gradient is not finite."""
        nothing = torch.zeros((), device=self._engine.device)
        known = with_gradient(nothing, list(zip(self._parameters.values(), gradients, strict=True)))
        # DeepSpeed takes the mean over ranks, and their gradients are to be added.
        self._engine.backward(known * dist.get_world_size())
        self._clip()
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._engine.step()
        self._spread_weights()
        return bool(self._engine.was_step_applied())

    @torch.no_grad()
    def _clip(self) -> None:
        """As DrafterTrainer does; what is not finite stays so, and DeepSpeed refuses the step."""
        shares: dict[int, list[Tensor]] = self._engine.optimizer.averaged_gradients
        squares = torch.zeros(len(shares), device=self._engine.device)
        for number, share in shares.items():
            if share:
                squares[number] = torch.stack([each.norm() for each in share]).square().sum()
        _over_ranks(squares)
        for numbers in self._clipped_together:
            norm = squares[list(numbers)].sum().sqrt()
            scale = (LARGEST_GRADIENT / (norm + 1e-6)).clamp(max=1.0)
            for number in numbers:
                for each in shares[number]:
                    each.mul_(scale)

    def _spread_weights(self) -> None:
        if self._working is self.net:
            return
        with torch.no_grad():
            pairs = zip(self._parameters.values(), self._working.parameters(), strict=True)
            for master, working in pairs:
                working.copy_(master)


def _over_ranks(part: Tensor) -> Tensor:
    dist.all_reduce(part)
    return part


def _together(result: MemberLoss, is_finite: bool) -> tuple[Update, bool]:
    """What all ranks came to, and whether there is a step to take."""
    numbers = [
        *(float(result.value.detach()), result.positions, result.hits),
        *(result.clip_rate * result.positions, result.value.requires_grad, not is_finite),
    ]
    sums = torch.tensor(numbers, dtype=torch.float64, device=result.value.device)
    loss, positions, hits, clipped, with_gradient, not_finite = _over_ranks(sums).tolist()
    most = max(positions, 1.0)
    update = Update(loss, hits / most, clipped / most, int(positions), True)
    return update, math.isfinite(loss) and with_gradient > 0 and not not_finite


def _engine(net: nn.Module, optimiser: torch.optim.Optimizer, stage: int) -> Any:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # 1.0 unless said, over all parts at once
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
        },
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimiser, config=settings)
    return engine
