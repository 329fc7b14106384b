"""What is wrong or worth knowing with rows: counted by kind, the first places kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from adaflash_batch.shards.inputs import Shard

NUM_FIRST = 5

Effect = Literal["error_row", "job_refused"]


@dataclass(frozen=True, slots=True)
class Place:
    """A row, and what is said of it."""

    file: str
    row: int
    message: str


@dataclass(frozen=True, slots=True)
class Flagged:
    """A row that is not all right.

    Attributes:
        kind: of its error, or `duplicate_id` or `null_id`.
        effect: a row with an error in the output, or a job that does not begin.
    """

    place: Place
    kind: str
    effect: Effect


Flag = Callable[[Flagged], None]


@dataclass(slots=True)
class Finding:
    """Rows of one kind."""

    rows: int = 0
    first: list[Place] = field(default_factory=list)

    def add(self, shard: Shard, row: int, message: str = "") -> Place:
        """Count a row; its place is kept if it is one of the first."""
        place = Place(shard.path, row, message)
        self.rows += 1
        if len(self.first) < NUM_FIRST:
            self.first.append(place)
        return place

    def to_json(self) -> dict[str, object]:
        """Count and first places."""
        places = [{"file": p.file, "row": p.row, "message": p.message} for p in self.first]
        return {"rows": self.rows, "first": places}


class Findings:
    """Findings by kind, in order of their first row.

    Args:
        effect: that all of them have.
        flag: told of every row.
    """

    def __init__(self, effect: Effect, flag: Flag) -> None:
        self._effect: Effect = effect
        self._flag = flag
        self.kinds: dict[str, Finding] = {}

    def add(self, shard: Shard, row: int, kind: str, message: str) -> None:
        """Count a row of some kind."""
        place = self.kinds.setdefault(kind, Finding()).add(shard, row, message)
        self._flag(Flagged(place, kind, self._effect))

    @property
    def rows(self) -> int:
        """Rows of all kinds; a row has one."""
        return sum(finding.rows for finding in self.kinds.values())

    def to_json(self) -> dict[str, object]:
        """By kind."""
        return {kind: finding.to_json() for kind, finding in self.kinds.items()}
