"""How well a drafter does on stored texts, without decoding them again.

With the target's own text known, what a verification would accept behind any token is known too,
so a drafter's whole way through a text can be followed: `walked` is what real decoding would do.

# B blocks, N drafts of a block
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaflash_batch.adapt.block_attention import forward_blocks
from adaflash_batch.adapt.blocks import anchor_range, make_blocks, pack_features
from adaflash_batch.drafter.length import Proposal, is_ended, num_accepted, sufficient_share
from adaflash_batch.drafter.model import DFlash, Head
from adaflash_batch.exchange import Trajectory
from adaflash_batch.stats import Calibration, SpeculationCounts

_BLOCKS_AT_ONCE = 64


@dataclass(slots=True)
class Acceptance:
    """What would be accepted behind the anchors looked at.

    A text's end hides what would have followed, so each position counts only where it is known:

    Attributes:
        reached: reached[i], anchors with all drafts before draft i right and the token at i known.
        right: right[i], those of them where draft i is right too.
        walked: the steps of decoding these texts with the drafter; empty unless all anchors of a
            text were looked at.
        calibration: of survival at the known places, or of the share that AdaFlash's head asks for;
            empty without a head that says either.
    """

    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    walked: SpeculationCounts = field(default_factory=SpeculationCounts)
    calibration: Calibration = field(default_factory=Calibration)

    @staticmethod
    def of(parts: Iterable[Acceptance]) -> Acceptance:
        """Several together."""
        together = Acceptance()
        for part in parts:
            together.add(part)
        return together

    def add(self, other: Acceptance) -> None:
        """Add another's counts to these."""
        pairs = itertools.zip_longest(self.reached, other.reached, fillvalue=0)
        self.reached = [a + b for a, b in pairs]
        pairs = itertools.zip_longest(self.right, other.right, fillvalue=0)
        self.right = [a + b for a, b in pairs]
        self.walked.add(other.walked)
        self.calibration.add(other.calibration)

    @property
    def survival(self) -> list[float]:
        """For each draft position how likely all drafts up to it are right."""
        shares = [r / n if n else 0.0 for r, n in zip(self.right, self.reached, strict=True)]
        return list(itertools.accumulate(shares, lambda a, b: a * b))

    @property
    def emitted_per_anchor(self) -> float | None:
        """Mean of accepted + 1 over the anchors; None without any."""
        return 1.0 + sum(self.survival) if self.reached and self.reached[0] else None


@torch.no_grad()
def evaluate(
    net: DFlash,
    trajectory: Trajectory,
    embedding: Tensor,
    head: Head,
    *,
    token_ids: Tensor | None = None,
    most_anchors: int | None = None,
) -> Acceptance:
    """Draft behind the generated tokens of a trajectory and compare.

    Args:
        net: in the dtype of `embedding`.
        embedding: the target's, [vocabulary, H].
        head, token_ids: the target's lm_head and the drafter's vocabulary, see `DFlash.propose`.
        most_anchors: look at so many, evenly spread, and do not walk; None looks at all.
    """
    # The target itself writes the first token, so no block is ever anchored before it.
    generated = trajectory.prompt_length
    candidates = [anchor for anchor in anchor_range(trajectory) if anchor >= generated]
    if most_anchors is not None and len(candidates) > most_anchors:
        stride = len(candidates) / most_anchors
        candidates = [candidates[int(i * stride)] for i in range(most_anchors)]
    anchors = torch.tensor(candidates, dtype=torch.int64)
    result, accepted = Acceptance(), list[int]()
    for part in torch.split(anchors, _BLOCKS_AT_ONCE) if len(anchors) else ():
        agrees, proposal = draft_behind(net, trajectory, part, embedding, head, token_ids)
        num_known = len(trajectory.token_ids) - 1 - part
        found = _count(agrees, num_known)
        _compare(found.calibration, proposal, num_accepted(agrees), num_known)
        result.add(found)
        accepted += num_accepted(agrees).tolist()
    if most_anchors is None:
        _walk(result.walked, accepted, net.config.num_drafts)
    return result


@torch.no_grad()
def draft_behind(
    net: DFlash,
    trajectory: Trajectory,
    anchors: Tensor,
    embedding: Tensor,
    head: Head,
    token_ids: Tensor | None,
) -> tuple[Tensor, Proposal]:
    """Draft behind some anchors of a text; the arguments are those of `evaluate`.

    Returns:
        Bool [B, N], which drafts are the tokens of the text; those past its end are not. And what
        the drafter says of its drafts.
    """
    config = net.config
    blocks = make_blocks([trajectory], [anchors], config, gamma=1.0).to(embedding.device)
    features = pack_features(blocks, [trajectory]).to(embedding.device, embedding.dtype)
    hidden = forward_blocks(net, blocks, features, embedding[blocks.token_ids.flatten()])
    proposal = net.propose_judged(hidden, blocks.token_ids[:, 0], head, token_ids)
    slots = slice(config.first_slot, None)
    is_known = blocks.weights[:, slots] > 0
    return ((proposal.drafts == blocks.labels[:, slots]) & is_known).cpu(), proposal


def _count(agrees: Tensor, num_known: Tensor) -> Acceptance:
    """The counts by position."""
    right = agrees.int().cumprod(1)
    places = torch.arange(agrees.shape[1])
    is_reached = (places <= right.sum(1, keepdim=True)) & (places < num_known.unsqueeze(1))
    return Acceptance(is_reached.sum(0).tolist(), right.sum(0).tolist())


def _compare(
    calibration: Calibration, proposal: Proposal, accepted: Tensor, num_known: Tensor
) -> None:
    """What the drafter said of its blocks with what came."""
    num_drafts = proposal.drafts.shape[1]
    if proposal.survival is not None:
        columns = (proposal.survival, accepted, num_known)
        for block in zip(*(column.tolist() for column in columns), strict=True):
            calibration.observe_block(*block)
    elif proposal.length is not None:
        is_clear = ~is_ended(accepted, num_known) | (accepted == num_drafts)
        shares = sufficient_share(accepted, num_drafts)
        for said, share in zip(proposal.length.cpu()[is_clear], shares[is_clear], strict=True):
            calibration.observe(float(said), float(share))


def _walk(counts: SpeculationCounts, accepted: Sequence[int], num_drafts: int) -> None:
    place = 0
    while place < len(accepted):
        # Of the tokens behind an anchor one is always the target's own, at the end of the text too.
        taken = min(accepted[place], len(accepted) - 1 - place)
        counts.record(num_drafts, num_drafts, taken)
        place += accepted[place] + 1
