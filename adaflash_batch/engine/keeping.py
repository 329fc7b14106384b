"""What a step leaves behind for later ones: for the drafter, for those that learn, for others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from adaflash_batch.engine.ahead import DraftsAhead
from adaflash_batch.engine.capture import Capture
from adaflash_batch.engine.in_flight import Entry, Item, piece_of
from adaflash_batch.engine.late_context import LateContext
from adaflash_batch.engine.packing import Int64, Packed, ranges
from adaflash_batch.engine.prefixes import PrefixCache
from adaflash_batch.engine.scheduler import Sequence as ScheduledSequence
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.page_size import PAGE


class Keeping:
    """Takes what is wanted of every step, while all requests of the step hold their pages.

    Args:
        target: that made the step.
        prefixes: whole pages of prompts, for requests that begin alike.
        late: context for the drafter; None without one.
        layers: that the drafter reads.
        ahead: for whom the drafter has taken in what a step left; None where it never has.

    Attributes:
        capture: states for those that learn; None where nobody does.
    """

    def __init__(
        self,
        target: Target,
        prefixes: PrefixCache,
        late: LateContext | None,
        layers: tuple[int, ...],
        ahead: DraftsAhead | None = None,
    ) -> None:
        self.capture: Capture | None = None
        self._target, self._prefixes = target, prefixes
        self._late, self._layers, self._ahead = late, layers, ahead

    def begin(self, entry: Entry) -> None:
        """A request comes."""
        if self.capture is not None and self.capture.wants():
            entry.recording = self.capture.begin(entry.num_prompt, entry.sequence.limit)

    def recall(self, entry: Entry) -> None:
        """Take over what others computed whose pages this request shares from now on."""
        recording, sequence = entry.recording, entry.sequence
        if recording is None or self.capture is None:
            return
        if recording.num_features < sequence.computed:
            self.capture.recall(recording, sequence.pages, sequence.computed)

    def keep(self, items: list[Item], packed: Packed, kept: Sequence[int]) -> None:
        """A step was committed.

        Args:
            kept: how many tokens of each item's stay, or were of use to others.
        """
        self._absorb(items, packed, kept)
        self._record(items, packed)
        self._share(items, packed, kept)

    def forget(self, entry: Entry) -> None:
        """A request ended: its pages are another's from now on."""
        if self._late is not None:
            self._late.forget(entry.sequence)

    def flush(self) -> None:
        """Nothing runs any more: wait for what is still on its way to those that learn."""
        if self.capture is not None:
            self.capture.flush()

    def _absorb(self, items: list[Item], packed: Packed, kept: Sequence[int]) -> None:
        """Keep for the drafter what the target saw of the tokens that stay."""
        ahead = self._ahead
        staying = [
            index
            for index, (item, count) in enumerate(zip(items, kept, strict=True))
            if count > 0 and not (ahead is not None and ahead.has(item.scheduled.sequence))
        ]
        if self._late is None or not staying:
            return
        counts = [kept[index] for index in staying]
        features = self._target.tapped(self._layers, self._rows(packed, staying, counts))
        sequences = [items[index].scheduled.sequence for index in staying]
        self._late.add(sequences, packed.context[staying].tolist(), counts, features)

    def _rows(self, packed: Packed, staying: list[int], counts: list[int]) -> torch.Tensor | slice:
        num_tokens = len(packed.token_ids)
        if sum(counts) == num_tokens:  # as in every step without drafts
            return slice(num_tokens)
        return self._target.upload(ranges(packed.start[staying], np.array(counts)))

    def _record(self, items: list[Item], packed: Packed) -> None:
        """Keep what the target saw, of the texts that end in this step too."""
        if self.capture is None:
            return
        choice_rows = accumulate((item.num_choices for item in items[:-1]), initial=0)
        columns = (items, packed.start.tolist(), packed.context.tolist(), choice_rows)
        pieces = [
            piece_of(recording, item, *place)
            for item, *place in zip(*columns, strict=True)
            if (recording := item.entry.recording) is not None
        ]
        self.capture.record(pieces)
        for item in items:
            entry = item.entry
            if entry.recording is not None and entry.reason in ("stop", "length"):
                self.capture.finish(entry.recording, entry.request, entry.tokens)

    def _share(self, items: list[Item], packed: Packed, kept: Sequence[int]) -> None:
        """Give names to the pages of prompts that became whole."""
        sharing = [index for index, item in enumerate(items) if item.num_shareable and kept[index]]
        if not sharing:
            return
        sequences = [items[index].scheduled.sequence for index in sharing]
        begins = packed.context[sharing]
        counts = np.array([items[index].num_shareable for index in sharing])
        if self.capture is not None:
            rows = ranges(packed.start[sharing], counts)
            places = [_places(*each) for each in zip(sequences, begins, counts, strict=True)]
            upload = self._target.upload
            self.capture.share(upload(rows), upload(np.concatenate(places)))
        whole = list(map(slice, begins // PAGE, (begins + counts) // PAGE))
        named = [(each.keys[at], each.pages[at]) for each, at in zip(sequences, whole, strict=True)]
        if self._late is not None and any(keys for keys, _ in named):
            self._late.hand_over(sequences)  # whoever shares a page drafts from it, too
        for keys, pages in named:
            self._prefixes.put(keys, pages)


def _places(sequence: ScheduledSequence, begin: int, count: int) -> Int64:
    """Where `count` tokens from position `begin` on are in KV memory: page times PAGE, and on."""
    positions = np.arange(begin, begin + count, dtype=np.int64)
    return np.array(sequence.pages, dtype=np.int64)[positions // PAGE] * PAGE + positions % PAGE
