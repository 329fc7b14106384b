"""Several trainer ranks that learn as one: the interface of DrafterTrainer over DeepSpeed's ZeRO.

The driver is none of the ranks. It draws the anchors, gives every rank its share of the
trajectories, and asks; so a rank that dies, or a library that writes to stdout, is no matter of the
process that decodes.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from adaflash_batch.adapt.batch_loss import BatchLoss
from adaflash_batch.adapt.blocks import pick_anchors
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.adapt.optimise import Update, check_label
from adaflash_batch.adapt.optimiser import OptimiserKind
from adaflash_batch.adapt.rank_group import RankGroup
from adaflash_batch.adapt.rank_process import RankSetup
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import Trajectory, alone

_CPU = torch.device("cpu")
_KINDS = ("weight", "step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How many ranks, and where. Raises ConfigError for what cannot be.

    Attributes:
        devices: one for each rank, all CPUs (gloo) or all different GPUs (NCCL).
        stage: of ZeRO. 1 shares out the optimiser's memory, 2 the summed gradients too.
        threads: of torch in each rank; None shares out the driver's.
        timeout: seconds that a call may take before its ranks count as dead.
    """

    devices: Sequence[torch.device]
    stage: int = 1
    threads: int | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("there is no device for a trainer rank", "name one for each rank")
        if len({device.type for device in self.devices}) > 1:
            raise ConfigError("trainer ranks are to run on CPUs and GPUs at once", "choose one")
        if self.stage not in (1, 2):
            raise ConfigError(f"the ZeRO stage is {self.stage}, it must be 1 or 2")

    @property
    def threads_of_each(self) -> int:
        """See `threads`."""
        return self.threads or max(torch.get_num_threads() // len(self.devices), 1)


class RankedTrainer:
    """A Trainer whose updates are computed by several ranks; to be closed.

    For the same calls it comes to the weights of a DrafterTrainer but for the rounding of sums.
    States go both ways between the two. Any call raises RankFailure once a rank has died.

    Args:
        net, embedding, head, objective, gamma, anchors, weight_decay, compute, optimiser: see
            DrafterTrainer; raises ConfigError for any optimiser but adamw.
        plan: how many ranks, and where.
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
        plan: RankPlan,
        optimiser: OptimiserKind = "adamw",
    ) -> None:
        check_ranks(optimiser)
        check_label(net, objective)
        self._net, self._anchors = net, anchors
        self._is_current = True
        batch = BatchLoss(embedding.detach(), head, objective, gamma).to(_CPU, compute)
        master = copy.deepcopy(net).to(_CPU)
        setup = RankSetup(master, batch, compute, weight_decay, plan.stage)
        self._group = RankGroup(
            setup, plan.devices, threads=plan.threads_of_each, timeout=plan.timeout
        )

    @property
    def net(self) -> DFlash:
        """The master weights; fetched from a rank where a call has moved them since."""
        if not self._is_current:
            self._take(self._group.call("weights"), "")
        return self._net

    def update(
        self, trajectories: Sequence[Trajectory], generator: torch.Generator, rate: float
    ) -> Update:
        """See DrafterTrainer."""
        anchors = pick_anchors(trajectories, self._anchors, generator)
        if not any(len(each) for each in anchors):
            return Update(0.0, 0.0, 0.0, 0, True)
        sent = [each.alone() for each in trajectories]
        shares = [slice(rank, None, len(self._group)) for rank in range(len(self._group))]
        self._is_current = False
        arguments = [(sent[share], anchors[share], rate) for share in shares]
        update: Update = self._group.call_each("update", arguments)
        return update

    def pull(self, weights: Mapping[str, Tensor], share: float) -> None:
        """See DrafterTrainer."""
        self._is_current = False
        self._group.call("pull", {name: alone(each) for name, each in weights.items()}, share)

    def state(self) -> dict[str, Tensor]:
        """See DrafterTrainer; on the CPU."""
        found: dict[str, Tensor] = self._group.call("state")
        self._take(found, "weight.")
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See DrafterTrainer; of a state that Muon left, the weights are taken."""
        is_muons = any(name.startswith("momentum_buffer.") for name in tensors)
        kinds = _KINDS[:1] if is_muons else _KINDS
        wanted = {n: alone(each) for n, each in tensors.items() if n.split(".", 1)[0] in kinds}
        self._is_current = False
        self._group.call("restore", wanted)

    def close(self) -> None:
        """End the ranks; may be called again."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @torch.no_grad()
    def _take(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        for name, parameter in self._net.named_parameters():
            parameter.copy_(tensors[prefix + name])
        self._is_current = True


def check_ranks(optimiser: str) -> None:
    """Raises ConfigError where several ranks cannot run with this optimiser, or at all."""
    if optimiser != "adamw":
        raise ConfigError(
            f"optimiser is {optimiser!r}, several trainer ranks have adamw alone",
            "choose adamw, or one rank",
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "several trainer ranks need DeepSpeed, which is not installed",
            "pip install 'adaflash-batch[deepspeed]'",
        )
