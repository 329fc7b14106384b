"""Which trajectories are trained on: the newest, and against forgetting some of the whole job's.

A share of all rows is held back: never trained on, it tells which of two versions is the better.
Chance is decided by seed and row, so a row has the same part in every run.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Sequence

from adaflash_batch.adapt.randomness import seed_of, share_of
from adaflash_batch.exchange import NewestTrajectories, Trajectory
from adaflash_batch.request import RowKey


class Reservoir:
    """A uniform sample of all trajectories that were ever added, bounded by bytes.

    Every key has a rank, drawn from [0, 1). Kept are the ranks below a bound that starts at 1 and
    falls to the highest rank whenever room runs out. So it does not matter when a trajectory came
    (its size only where it is large beside the bound), and one that comes again takes its own
    place.

    Attributes:
        num_bytes: of those that are kept, never above `max_bytes`.
    """

    def __init__(self, seed: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._seed, self._max_bytes = seed, max_bytes
        self._bound = 1.0
        self._ranked: list[tuple[float, RowKey]] = []
        self._kept: dict[RowKey, Trajectory] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Keep it, or not."""
        key = trajectory.key
        rank = share_of(self._seed, "replay", *key)
        if rank >= self._bound:
            return
        if key in self._kept:
            self.num_bytes -= self._kept[key].num_bytes
        else:
            insort(self._ranked, (rank, key))
        self._kept[key] = trajectory
        self.num_bytes += trajectory.num_bytes
        while self.num_bytes > self._max_bytes:
            self._bound, highest = self._ranked.pop()
            self.num_bytes -= self._kept.pop(highest).num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def draw(self, dice: random.Random, count: int) -> list[Trajectory]:
        """So many of them, all different; all where there are fewer."""
        chosen = dice.sample(self._ranked, min(count, len(self._ranked)))
        return [self._kept[key] for _, key in chosen]


class ReplayPool:
    """What a trainer learns from, in bounded memory.

    Args:
        seed: decides what is held back, kept and drawn.
        recent_bytes: memory for the newest.
        replay_bytes: memory for the sample of the whole job.
        held_back_bytes: memory for the newest of those held back.
        replay_share: share of the trajectories of an update that come from the whole job.
        held_back_share: share of the rows that is held back.

    Attributes:
        num_added: trajectories that came to be trained on.
    """

    def __init__(
        self,
        *,
        seed: int,
        recent_bytes: int,
        replay_bytes: int,
        held_back_bytes: int,
        replay_share: float = 0.5,
        held_back_share: float = 0.1,
    ) -> None:
        assert 0.0 <= replay_share <= 1.0
        assert 0.0 <= held_back_share <= 1.0
        self._seed = seed
        self._replay_share, self._held_back_share = replay_share, held_back_share
        self._recent = NewestTrajectories(recent_bytes)
        self._reservoir = Reservoir(seed, replay_bytes)
        self._held_back = NewestTrajectories(held_back_bytes)
        self.num_added = 0

    def add(self, trajectory: Trajectory) -> None:
        """Take one in, to train on or to hold back."""
        if self.is_held_back(trajectory.key):
            self._held_back.add(trajectory)
            return
        self.num_added += 1
        self._recent.add(trajectory)
        self._reservoir.add(trajectory)

    def is_held_back(self, key: RowKey) -> bool:
        """Whether a row is never trained on; all samples of a row go the same way."""
        return share_of(self._seed, "held back", key.shard, key.row) < self._held_back_share

    @property
    def held_back(self) -> Sequence[Trajectory]:
        """The newest of those held back, oldest first."""
        return list(self._held_back)

    def batch(self, number: int, size: int) -> list[Trajectory]:
        """The trajectories of an update, all different; fewer than `size` only if none are left.

        Args:
            number: of the update, from 0; with the seed it decides what is drawn.
        """
        dice = random.Random(seed_of(self._seed, "batch", number))
        share = size * self._replay_share
        # Over many updates the share is met also where it is no whole number in one.
        num_replayed = math.floor((number + 1) * share) - math.floor(number * share)
        chosen = self._reservoir.draw(dice, num_replayed)
        taken = {each.key for each in chosen}
        fresh = [each for each in self._recent if each.key not in taken]
        return chosen + dice.sample(fresh, min(size - len(chosen), len(fresh)))
