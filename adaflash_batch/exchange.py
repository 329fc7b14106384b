"""What passes between the decoder and those that learn from it: trajectories there, weights back.

Neither side ever waits for the other: trajectories that find no room push out older ones, and of
weights only the newest are kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adaflash_batch.request import RowKey

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A finished request with what the target saw of it; L tokens, F features, H hidden.

    Attributes:
        key: which request it was.
        token_ids: int64 [L], prompt and continuation, with the token that ended it.
        prompt_length: tokens of the prompt, at least 1.
        features: outputs of the tapped layers side by side, of positions 0, 1, ... [L - 1 or L, F].
            The last token's are there only if it was an accepted draft.
        last_hidden: what the target's lm_head was given at positions first_hidden,
            first_hidden + 1, ... [up to L - first_hidden, H], L - 1 - first_hidden at least;
            None where only the tokens are wanted as labels.
        first_hidden: prompt_length - 1, whose state chose the first new token.
    """

    key: RowKey
    token_ids: Tensor
    prompt_length: int
    features: Tensor
    last_hidden: Tensor | None
    first_hidden: int

    def alone(self) -> Trajectory:
        """The same to be sent: see `alone`."""
        hidden = self.last_hidden
        return replace(
            self,
            token_ids=alone(self.token_ids),
            features=alone(self.features),
            last_hidden=None if hidden is None else alone(hidden),
        )

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        tensors = (self.token_ids, self.features, self.last_hidden)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def alone(tensor: Tensor) -> Tensor:
    """On the CPU and a view of nothing larger, which would be sent as a whole."""
    tensor = tensor.detach().to("cpu")
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class NewestTrajectories:
    """The last trajectories that were added, as many as some bytes hold; oldest first.

    Attributes:
        num_bytes: of those that are kept, never above `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._kept: deque[Trajectory] = deque()

    def add(self, trajectory: Trajectory) -> int:
        """Keep one; how many were dropped, which is itself where it would not fit alone."""
        size = trajectory.num_bytes
        if size > self._max_bytes:
            return 1
        self._kept.append(trajectory)
        self.num_bytes += size
        num_dropped = 0
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popleft().num_bytes
            num_dropped += 1
        return num_dropped

    def take_oldest(self) -> Trajectory | None:
        """Keep it no longer; None where there is none."""
        if not self._kept:
            return None
        oldest = self._kept.popleft()
        self.num_bytes -= oldest.num_bytes
        return oldest

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self._kept)


class TrajectoryMailbox:
    """Trajectories on their way to a trainer; for any number of threads on both sides.

    Args:
        max_bytes: what may wait; beyond it the oldest are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting = NewestTrajectories(max_bytes)
        self._num_dropped = 0

    def put(self, trajectory: Trajectory) -> None:
        """Leave one; never waits for who takes them."""
        with self._lock:
            self._num_dropped += self._waiting.add(trajectory)

    def take_all(self) -> list[Trajectory]:
        """What has come since the last time, oldest first."""
        with self._lock:
            taken, self._waiting = self._waiting, NewestTrajectories(self._max_bytes)
        return list(taken)

    def take_oldest(self) -> Trajectory | None:
        """The one that has waited longest; None if none does."""
        with self._lock:
            return self._waiting.take_oldest()

    @property
    def num_dropped(self) -> int:
        """Trajectories that were never taken, for lack of room."""
        return self._num_dropped


@dataclass(frozen=True, slots=True, eq=False)
class DrafterWeights:
    """A version of a drafter for the decoder. Nobody writes to its tensors any more.

    Attributes:
        version: its number.
        tensors: every parameter by its name.
    """

    version: int
    tensors: Mapping[str, Tensor]


class WeightsMailbox:
    """The newest weights on their way to a decoder; for any number of threads on both sides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: DrafterWeights | None = None

    def put(self, weights: DrafterWeights) -> None:
        """Leave these, in place of any that were not taken."""
        with self._lock:
            self._newest = weights

    def take(self) -> DrafterWeights | None:
        """The newest, once; None if none have come since."""
        with self._lock:
            taken, self._newest = self._newest, None
        return taken
