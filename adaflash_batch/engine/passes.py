"""A step's pass of the target and the choice of tokens: begun here, ended when it is needed.

# T packed tokens, R rows that choose, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from adaflash_batch.engine.accept import Emission
from adaflash_batch.engine.packing import Int32, Packed
from adaflash_batch.engine.sampling import ChoiceBlock, decide
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.paged_attention import KVLayer, PackedStep


class Pass(Protocol):
    """One that was begun."""

    def drafted(self) -> list[int]:
        """What a LateDrafter left on the device before it; waits for it."""

    def land(self) -> list[Emission]:
        """What each block adds to its text; waits for it."""

    @property
    def seconds(self) -> float:
        """That pass and choice took, once landed."""


class Passes(Protocol):
    """Runs the steps of one decoder. Not more than one is on its way.

    Attributes:
        runs_ahead: whether a pass goes on while the host does something else.
    """

    runs_ahead: bool

    def begin(
        self, packed: Packed, table: Int32, blocks: Sequence[ChoiceBlock], sources: Int32
    ) -> Pass:
        """Launch a step.

        Args:
            packed: of at least one token.
            table: pages of its segments, int32 [S, P].
            blocks: who chooses; their `drafts` are looked at only when the pass lands.
            sources: int32 [T], where the drafter left the tokens that the host does not know (see
                StepInputs); empty where it knows all.
        """


class HostPasses:
    """On tensors of the host: a pass is over when it has begun."""

    runs_ahead = False

    def __init__(self, target: Target, kv: list[KVLayer], clock: Callable[[], float]) -> None:
        self._target, self._kv, self._clock = target, kv, clock

    def begin(
        self, packed: Packed, table: Int32, blocks: Sequence[ChoiceBlock], sources: Int32
    ) -> Pass:
        """See Passes."""
        began = self._clock()
        logits = self._target.forward(
            torch.from_numpy(packed.token_ids),
            torch.from_numpy(packed.positions),
            PackedStep(packed.start, packed.length, packed.context, table),
            self._kv,
            torch.from_numpy(packed.rows),
        )
        emissions = decide(logits, blocks)
        return _Done(emissions, self._clock() - began)


class _Done:
    def __init__(self, emissions: list[Emission], seconds: float) -> None:
        self._emissions, self.seconds = emissions, seconds

    def drafted(self) -> list[int]:
        """See Pass."""
        return []

    def land(self) -> list[Emission]:
        """See Pass."""
        return self._emissions
