"""The loss of a drafter over blocks of trajectories: of a whole batch, or of a rank's share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash_batch.adapt.block_attention import forward_blocks
from adaflash_batch.adapt.blocks import make_blocks, pack_features, pack_teacher
from adaflash_batch.adapt.head_losses import OverRanks, alone
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.member_losses import MemberLoss, member_loss, no_loss
from adaflash_batch.adapt.objective import Objective
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.exchange import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class BatchLoss:
    """What the loss of a batch needs besides a drafter and trajectories.

    Attributes:
        embedding: the target's, [vocabulary, H].
        head: the target's lm_head, whole or restricted to a draft vocabulary.
        objective: the loss.
        gamma: decay of the position weights.
    """

    embedding: Tensor
    head: Head
    objective: Objective
    gamma: float

    def to(self, device: torch.device, dtype: torch.dtype) -> BatchLoss:
        """The same on another device, in the dtype of forward and backward."""
        head, embedding = self.head.to(device, dtype), self.embedding.to(device, dtype)
        return dataclasses.replace(self, embedding=embedding, head=head)

    @property
    def needs_teacher(self) -> bool:
        """Whether trajectories must come with last hidden states."""
        return self.objective.kind != "ce"

    def __call__(
        self,
        net: DFlash,
        trajectories: Sequence[Trajectory],
        anchors: Sequence[Tensor],
        over_ranks: OverRanks = alone,
    ) -> MemberLoss:
        """The loss at these anchors (see `make_blocks`); without a gradient where there are none.

        Args:
            net: in the dtype and on the device of the embedding.
            over_ranks: see member_loss; all ranks call this together, whatever share they have.
        """
        place, dtype = self.embedding.device, self.embedding.dtype
        blocks = make_blocks(trajectories, anchors, net.config, self.gamma)
        if not blocks.spans:
            return no_loss(net, torch.zeros((), device=place), over_ranks)
        features = pack_features(blocks, trajectories).to(place, dtype)
        teacher = pack_teacher(trajectories) if self.needs_teacher else None
        blocks = blocks.to(place)
        embeddings = self.embedding[blocks.token_ids.flatten()]
        hidden = forward_blocks(net, blocks, features, embeddings)
        if teacher is not None:
            teacher = teacher.to(place, dtype)
        return member_loss(net, self.objective, self.head, hidden, blocks, teacher, over_ranks)
