"""Where blocks begin, and which tokens stay, behind a step whose outcome only the device knows.

# B requests that are drafted for, S segments of the step before, M tokens of a request at most
"""

from __future__ import annotations

import dataclasses

import torch

from adaflash_batch.engine.step_buffers import StepInputs
from adaflash_batch.kernels.accept import Emitted
from adaflash_batch.kernels.device_step import NO_SEGMENT, DeviceStep, power_of_two
from adaflash_batch.kernels.page_size import PAGE


def page_before(table: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The page of each request's token before position `ends`, of a table [B, P]: int64 [B]."""
    at = (ends - 1).clamp(min=0) // PAGE
    return table.gather(1, at.long().unsqueeze(1)).squeeze(1).long()


def moved(blocks: StepInputs, emitted: Emitted) -> StepInputs:
    """Blocks as they are behind the step that emitted this.

    Args:
        blocks: of one length, at the places that anchors had in that step. The first `sources` say
            whose each is: its row of `emitted`, or -1 where it stands where it is given. Its row of
            `rows` is the page of the token before its anchor.
    """
    whose = blocks.sources[: len(blocks.rows)]
    stands, row = whose < 0, whose.clamp(min=0)
    # The text of one that ended goes nowhere: its block may be anything within its pages.
    shift = torch.where(stands, 0, 1 + emitted.accepted[row])
    anchors = emitted.last[row].clamp(min=0)
    context = blocks.step.context + shift
    ids, positions = (each.view(len(whose), -1) for each in (blocks.token_ids, blocks.positions))
    first = torch.where(stands, ids[:, 0], anchors).unsqueeze(1)
    pages = page_before(blocks.step.table, context).int()
    return dataclasses.replace(
        blocks,
        token_ids=torch.cat((first, ids[:, 1:]), dim=1).flatten(),
        positions=(positions + shift.unsqueeze(1)).flatten(),
        rows=torch.where(stands, blocks.rows, pages),
        step=dataclasses.replace(blocks.step, context=context),
    )


def staying(step: DeviceStep, whose: torch.Tensor, emitted: Emitted, num_tokens: int) -> DeviceStep:
    """Of a step's first tokens those that stay: anchors and accepted drafts; the rest is padding.

    Args:
        step: whose first segments choose, in the order of the rows of `emitted`.
        whose: int32 [B], the segments that are meant.
    """
    counts = torch.zeros_like(step.length)
    counts[whose.long()] = 1 + emitted.accepted[whose]
    segment = step.segment_of[:num_tokens]
    own = segment.clamp(min=0)
    each = torch.arange(num_tokens, dtype=torch.int32, device=whose.device)
    stays = (segment >= 0) & (each - step.start[own] < counts[own])
    return dataclasses.replace(
        step,
        length=counts,
        segment_of=torch.where(stays, segment, NO_SEGMENT),
        num_tokens=num_tokens,
        max_length=power_of_two(emitted.tokens.shape[1]),
    )
