"""From finished trajectories to supervised blocks: which rows, which labels, who sees what.

Every anchor of a trajectory yields a fully supervised block, since the target's last hidden state
at each committed position is stored ("hindsight"): the token at a + i was chosen by the state at
a + i - 1, whatever was drafted there.

# B blocks of all trajectories, K rows of a block, C context rows of all trajectories, H hidden
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from adaflash_batch.adapt.losses import position_weights
from adaflash_batch.drafter.config import DrafterConfig


class Trajectory(Protocol):
    """A finished request with what the target saw of it, on the CPU or a device.

    Attributes:
        token_ids: int64 [L], prompt and continuation.
        prompt_length: tokens of the prompt, at least 1.
        features: tapped states of positions 0, 1, ... [up to L, features * H]. The last token's
            are missing unless it was fed to the target.
        last_hidden: the target's last hidden states (as its lm_head takes them) of positions
            first_hidden, first_hidden + 1, ... [up to L - first_hidden, H]; None for hard labels.
        first_hidden: anchors before it are not taught; prompt_length - 1 loses none.
    """

    @property
    def token_ids(self) -> Tensor:
        """See above."""

    @property
    def prompt_length(self) -> int:
        """See above."""

    @property
    def features(self) -> Tensor:
        """See above."""

    @property
    def last_hidden(self) -> Tensor | None:
        """See above."""

    @property
    def first_hidden(self) -> int:
        """See above."""


class Span(NamedTuple):
    """Where the blocks and the context rows of one trajectory lie among those of all.

    Its context row c is its position c.
    """

    trajectory: int
    blocks: slice
    context: slice


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of one or several trajectories, packed.

    A block sees the context rows of its own trajectory at positions below its anchor, and its own
    rows (`block_attention.training_attention`). All tensors are int64 but for the weights.

    Attributes:
        token_ids: [B, K], the anchor, then mask tokens.
        positions: [B, K], absolute.
        labels: [B, K], tokens with which the trajectory went on; 0 where the weight is 0.
        weights: float32 [B, K]; 0 in slots that draft nothing and in all past the end.
        teacher_rows: [B, K], rows of `pack_teacher`; 0 where the weight is 0.
        anchors: [B], increasing within a trajectory.
        context_positions: [C], absolute positions of the rows of `pack_features`.
        spans: one for each trajectory that has blocks.
    """

    token_ids: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor
    teacher_rows: Tensor
    anchors: Tensor
    context_positions: Tensor
    spans: tuple[Span, ...]

    def to(self, device: torch.device) -> Blocks:
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["spans"]
        return replace(self, **{name: tensor.to(device) for name, tensor in values.items()})


def anchor_range(trajectory: Trajectory) -> range:
    """The positions that can be anchors.

    From the prompt's last token on, as far as the context is stored and a supervised position
    follows.
    """
    first = trajectory.prompt_length - 1
    if trajectory.last_hidden is not None:
        first = max(first, trajectory.first_hidden)
    last = min(_last_supervised(trajectory) - 1, len(trajectory.features))
    return range(first, max(first, last + 1))


def sample_blocks(
    trajectories: Sequence[Trajectory],
    config: DrafterConfig,
    gamma: float,
    num_anchors: int,
    generator: torch.Generator,
) -> Blocks:
    """Blocks at num_anchors random anchors of each trajectory, at all where it has fewer.

    Args:
        config: gives block size, mask token and whether the anchor's slot drafts.
        gamma: decay of the position weights (DFlash: 7, 5, 4 for blocks of 16, 10, 8).
        generator: on the CPU; decides alone.
    """
    anchors = pick_anchors(trajectories, num_anchors, generator)
    return make_blocks(trajectories, anchors, config, gamma)


def pick_anchors(
    trajectories: Sequence[Trajectory], num_anchors: int, generator: torch.Generator
) -> list[Tensor]:
    """The anchors of `sample_blocks`, as `make_blocks` takes them."""
    return [_pick(anchor_range(each), num_anchors, generator) for each in trajectories]


def make_blocks(
    trajectories: Sequence[Trajectory],
    anchors: Sequence[Tensor],
    config: DrafterConfig,
    gamma: float,
) -> Blocks:
    """Blocks at given anchors, int64 tensors on the CPU, increasing, inside `anchor_range`."""
    rows, first_teacher_row = [_Rows.none(config.block_size)], 0
    for trajectory, where in zip(trajectories, anchors, strict=True):
        rows.append(_rows(trajectory, where, config, gamma, first_teacher_row))
        first_teacher_row += _num_hidden(trajectory)
    spans = tuple(_spans(anchors))
    context = [torch.arange(span.context.stop - span.context.start) for span in spans]
    nothing = torch.empty(0, dtype=torch.int64)
    joined = _Rows(*map(torch.cat, zip(*rows, strict=True)))
    return Blocks(
        **joined._asdict(),
        anchors=torch.cat([nothing, *anchors]),
        context_positions=torch.cat([nothing, *context]),
        spans=spans,
    )


def pack_features(blocks: Blocks, trajectories: Sequence[Trajectory]) -> Tensor:
    """[C, features * H]: the context rows, as far as blocks see them; there must be a block."""
    return torch.cat(
        [
            trajectories[span.trajectory].features[: span.context.stop - span.context.start]
            for span in blocks.spans
        ]
    )


def pack_teacher(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """The last hidden states of all trajectories, one after another; None for hard labels only."""
    hidden = [each.last_hidden for each in trajectories if each.last_hidden is not None]
    assert len(hidden) in (0, len(trajectories)), "some trajectories have a teacher, some have not"
    return torch.cat(hidden) if hidden else None


class _Rows(NamedTuple):
    """The fields of Blocks that are rows of slots."""

    token_ids: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor
    teacher_rows: Tensor

    @staticmethod
    def none(block_size: int) -> _Rows:
        ids = torch.empty(0, block_size, dtype=torch.int64)
        return _Rows(ids, ids, ids, ids.float(), ids)


def _last_supervised(trajectory: Trajectory) -> int:
    """The last position whose token is known, and its teacher where there are teachers."""
    last = len(trajectory.token_ids) - 1
    if trajectory.last_hidden is None:
        return last
    return min(last, trajectory.first_hidden + len(trajectory.last_hidden))


def _num_hidden(trajectory: Trajectory) -> int:
    return 0 if trajectory.last_hidden is None else len(trajectory.last_hidden)


def _pick(candidates: range, num_anchors: int, generator: torch.Generator) -> Tensor:
    order = torch.randperm(len(candidates), generator=generator)[:num_anchors]
    return candidates.start + order.sort().values


def _rows(
    trajectory: Trajectory,
    anchors: Tensor,
    config: DrafterConfig,
    gamma: float,
    first_teacher_row: int,
) -> _Rows:
    allowed = anchor_range(trajectory)
    assert all(anchor in allowed for anchor in anchors.tolist()), "an anchor out of range"
    slots = torch.arange(config.block_size)
    positions = anchors.unsqueeze(1) + slots
    # Slot j drafts the token `ahead` after the anchor, counted from 1; 0 drafts nothing.
    ahead = slots + 1 - config.first_slot
    labelled = anchors.unsqueeze(1) + ahead
    is_taught = (ahead > 0) & (labelled <= _last_supervised(trajectory))
    known = trajectory.token_ids.cpu()
    labelled = labelled.where(is_taught, 0)
    token_ids = torch.full_like(positions, config.mask_token_id)
    token_ids[:, 0] = known[anchors]
    teacher_rows = first_teacher_row + labelled - 1 - trajectory.first_hidden
    if trajectory.last_hidden is None:
        teacher_rows = torch.zeros_like(labelled)
    return _Rows(
        token_ids=token_ids,
        positions=positions,
        labels=known[labelled].where(is_taught, 0),
        weights=position_weights(ahead, gamma).where(is_taught, 0.0),
        teacher_rows=teacher_rows.where(is_taught, 0),
    )


def _spans(anchors: Sequence[Tensor]) -> Iterator[Span]:
    first_block = first_row = 0
    for number, where in enumerate(anchors):
        if len(where):
            next_block, next_row = first_block + len(where), first_row + int(where[-1])
            yield Span(number, slice(first_block, next_block), slice(first_row, next_row))
            first_block, first_row = next_block, next_row
