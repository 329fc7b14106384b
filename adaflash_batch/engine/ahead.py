"""Drafts for the next step, begun behind this one before the host knows what came of it.

The device knows the next anchor, where it stands and what the target saw of the tokens that stay,
so the drafter can run while the host lands the step and plans the next. Whom a step was drafted for
is drafted for again; what was drafted for one that ended, or is not wanted any more, is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaflash_batch.engine.device_drafting import DeviceDrafter, Made
from adaflash_batch.engine.device_passes import DevicePasses
from adaflash_batch.engine.drafting import Draft, DraftBatch
from adaflash_batch.engine.in_flight import Item
from adaflash_batch.engine.packing import PageTable
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.engine.target import Target


class DraftsAhead:
    """Those that were begun behind the last step.

    Args:
        drafter: that makes them.
        passes: whose step they are begun behind.
        target: that made the step.
        table: the requests' pages.
    """

    def __init__(
        self, drafter: DeviceDrafter, passes: DevicePasses, target: Target, table: PageTable
    ) -> None:
        self._drafter, self._passes = drafter, passes
        self._target, self._table = target, table
        self._made: Made | None = None
        self._places: dict[ScheduledSequence, int] = {}  # of each request among them
        self._drafts: list[Draft] | None = None  # once they were asked for
        self._num_taken = 0

    def begin(self, chosen: Sequence[tuple[int, Item]], num_tokens: int) -> None:
        """Draft behind the step that was just begun; what was not taken of the last is dropped.

        Args:
            chosen: parts of the step whose texts the device extends, each with its segment, which
                is also its place among those that choose. Their pages hold the next block too.
            num_tokens: of the step, up to the last of theirs.
        """
        self.drop()
        if not chosen:
            return
        items = [item for _, item in chosen]
        sequences = [item.scheduled.sequence for item in items]
        batch = DraftBatch(
            keys=[item.entry.request.key for item in items],
            anchors=[0] * len(items),  # the device knows them
            positions=np.array([each.computed for each in sequences], dtype=np.int32),
            table=self._table.rows(sequences),
        )
        whose = np.array([segment for segment, _ in chosen], dtype=np.int32)
        inputs = self._passes.inputs
        assert inputs is not None
        features = self._target.tapped(self._drafter.tapped_layers, slice(num_tokens))
        self._made = self._drafter.draft_ahead(batch, whose, inputs, features)
        self._places = {each: place for place, each in enumerate(sequences)}

    def has(self, sequence: ScheduledSequence) -> bool:
        """Whether it is drafted for, so that the drafter has what the step's target saw of it."""
        return sequence in self._places

    def take(self, sequence: ScheduledSequence) -> Draft | None:
        """The draft behind a request's anchor, if there is one; where a head judged it, it waits.

        The step has landed, and the request decodes since: no other has its pages.
        """
        place = self._places.get(sequence)
        if self._made is None or place is None:
            return None
        self._num_taken += 1
        if self._drafts is None:
            self._drafts = self._drafter.known(self._made)
        self._drafter.expect([self._drafts[place]])
        return self._drafts[place]

    def drop(self) -> None:
        """Forget those that were not taken; what they took makes the others dearer."""
        if self._made is not None:
            self._drafter.note(self._made, self._num_taken)
        self._made, self._drafts, self._places, self._num_taken = None, None, {}, 0
