"""Versions on disk first, then to the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from adaflash_batch.adapt.control import LearningControl
from adaflash_batch.adapt.publishing import TrainerCounters, TrainerState
from adaflash_batch.adapt.scoring import Comparison
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.versions import Learnt, TrainingState, VersionStore
from adaflash_batch.exchange import DrafterWeights


class StorePublisher:
    """Keeps versions on disk, then hands their weights over.

    Args:
        folder: of the checkpoint that the first version goes on from.
        version: its number, None where it is not in the store yet.
        facts: of the target.
        dtype: of decoding.
        job: who learns, in words.
        store: of the versions.
        control: whose state is kept with them.
        hand_over: takes every version when it is whole on disk.

    Attributes:
        net: of the drafter's shape, in the dtype of decoding; written to.
    """

    def __init__(
        self,
        folder: Path,
        version: int | None,
        facts: TargetFacts,
        dtype: torch.dtype,
        job: str,
        store: VersionStore,
        control: LearningControl,
        hand_over: Callable[[DrafterWeights], None],
    ) -> None:
        self._folder, self._version, self._facts, self._job = folder, version, facts, job
        self._store, self._control, self._hand_over = store, control, hand_over
        self._before: Mapping[str, int] = {}
        self.net = checkpoint.load(folder, facts, dtype=dtype)
        self.net.requires_grad_(False)

    def begin_from(self, counters: Mapping[str, int]) -> None:
        """Count what the next version learnt from here on."""
        self._before = counters

    @torch.no_grad()
    def publish(
        self, weights: Mapping[str, Tensor], state: TrainerState, comparison: Comparison
    ) -> int:
        """See Publisher. A version is whole on disk before anything is drafted with it."""
        if self._version is None:
            self._version = self._store.import_checkpoint(self._folder, self._facts, self._job)
        for name, parameter in self.net.named_parameters():
            parameter.copy_(weights[name])
        facts = {"counters": dict(state.counters), "control": self._control.state()}
        self._version = self._store.publish(
            self.net,
            self._learnt(state, comparison),
            TrainingState(state.tensors, facts),
            parent=self._version,
        )
        self.begin_from(state.counters)
        self._hand_over(DrafterWeights(self._version, weights))
        return self._version

    def _learnt(self, state: TrainerState, comparison: Comparison) -> Learnt:
        now = TrainerCounters(**state.counters)
        before = TrainerCounters(**self._before)
        return Learnt(
            job=self._job,
            rows=now.texts - before.texts,
            tokens=now.tokens - before.tokens,
            updates=now.updates - before.updates,
            tau_before=comparison.before,
            tau_after=comparison.after,
        )
