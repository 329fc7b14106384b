"""A step's pass of the target and the choice of tokens: begun here, ended when it is needed.

# T packed tokens, R rows that choose, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from adaflash_batch.engine.packing import Int32, Packed
from adaflash_batch.engine.sampling import ChoiceBlock, choose
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.paged_attention import KVLayer, PackedStep


class Pass(Protocol):
    """One that was begun."""

    def drafted(self) -> list[int]:
        """What a LateDrafter left on the device before it; waits for it."""

    def land(self) -> tuple[list[int], list[bool]]:
        """The choice behind every row, and whether its logits were sound; waits for them."""

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
        choices, sound = choose(logits, blocks)
        return _Done(choices, sound, self._clock() - began)


class _Done:
    def __init__(self, choices: list[int], sound: list[bool], seconds: float) -> None:
        self._choices, self._sound, self.seconds = choices, sound, seconds

    def drafted(self) -> list[int]:
        """See Pass."""
        return []

    def land(self) -> tuple[list[int], list[bool]]:
        """See Pass."""
        return self._choices, self._sound
