"""A drafter that knows the texts, the run that it drafts in, and what was begun in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafters import DFLASH, DFLASH2, DSPARK, net_of
from tiny import VOCABULARY

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.length import Proposal
from adaflash_batch.engine.ahead import DraftsAhead
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.device_drafting import DeviceDrafter
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import DrafterWeights
from adaflash_batch.request import Completion, Request, RowKey

ENDS = frozenset([2])
HAZARD = dataclasses.replace(DFLASH, length_head="hazard", length_head_width=8)
SCALAR = dataclasses.replace(DFLASH, length_head="adaflash", length_head_width=8)
MEMBERS = {
    **{"dflash": DFLASH, "dspark": DSPARK, "dflash2": DFLASH2},
    **{"hazard": HAZARD, "scalar": SCALAR},
}
Said = dict[tuple[int, int, int], set[tuple[int, ...]]]


class Knowing:
    """In place of what a net drafts: the texts, with wrong tokens at some places.

    What the net says itself is noted by version, position and anchor: it depends on all that the
    drafter absorbed.
    """

    def __init__(self, requests: Sequence[Request], whole: dict[RowKey, list[int]]) -> None:
        self.said: Said = {}
        self._following = torch.zeros(256, VOCABULARY, 8, dtype=torch.long)
        for request in requests:
            tokens = [*request.token_ids, *whole[request.key]]
            for at in range(len(request.token_ids) - 1, len(tokens)):
                behind = torch.tensor([*tokens[at + 1 :], *[0] * 8][:8])
                behind[at % 6 :] = 1  # from there on it is wrong
                self._following[at, tokens[at]] = behind

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = BlockDrafter.propose

        def propose(drafter: BlockDrafter, ids: Any, positions: Any, *others: Any) -> Proposal:
            proposal = real(drafter, ids, positions, *others)
            num_blocks, num_drafts = proposal.drafts.shape
            first, anchors = (each.view(num_blocks, -1)[:, 0] for each in (positions, ids))
            keys = zip(first.tolist(), anchors.tolist(), proposal.drafts.tolist(), strict=True)
            for position, anchor, drafts in keys:
                key = (drafter.version, position, anchor)
                self.said.setdefault(key, set()).add(tuple(drafts))
            known = self._following[first.clamp(0, 255), anchors]
            return proposal._replace(drafts=known[:, :num_drafts])

        monkeypatch.setattr(BlockDrafter, "propose", propose)


def run(
    target: Target,
    requests: list[Request],
    config: DrafterConfig = DFLASH,
    *,
    adopts_at: tuple[int, ...] = (),
    kv_tokens: int = 4096,
    **options: Any,
) -> tuple[Decoder, dict[RowKey, Completion]]:
    decoder = Decoder(
        target,
        drafter=lambda num_pages: BlockDrafter(net_of(config, 0), target, num_pages),
        kv_tokens=kv_tokens,
        end_token_ids=ENDS,
        **options,
    )
    steps = iter(range(1000))

    def newest() -> DrafterWeights | None:
        step = next(steps)
        weights = dict(net_of(config, step).named_parameters())
        return DrafterWeights(step, weights) if step in adopts_at else None

    decoder.follow(newest)
    for request in requests:
        decoder.add(request)
    done: dict[RowKey, Completion] = {}
    while decoder.has_work:
        done |= {each.key: each for each in decoder.step()}
    return decoder, done


@dataclasses.dataclass
class Calls:
    """Batches that were begun: now, ahead, and how many drafts of the latter were used."""

    now: int = 0
    ahead: int = 0
    used: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of the decoders that run from now on."""
    found = Calls()
    draft, ahead, drop = DeviceDrafter.draft, DeviceDrafter.draft_ahead, DraftsAhead.drop

    def drafts(self: DeviceDrafter, batch: Any) -> Any:
        found.now += len(batch.anchors)
        return draft(self, batch)

    def drafts_ahead(self: DeviceDrafter, batch: Any, *others: Any) -> Any:
        found.ahead += len(batch.anchors)
        return ahead(self, batch, *others)

    def drops(self: DraftsAhead) -> None:
        if self._made is not None:
            found.used.append((self._num_taken, self._made.num_requests))
        drop(self)

    monkeypatch.setattr(DeviceDrafter, "draft", drafts)
    monkeypatch.setattr(DeviceDrafter, "draft_ahead", drafts_ahead)
    monkeypatch.setattr(DraftsAhead, "drop", drops)
    return found
