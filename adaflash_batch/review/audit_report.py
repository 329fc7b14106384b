"""What decoding rows again came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Redone:
    """A row that is not the same when it is decoded again.

    Attributes:
        file, row: part, and row of it.
        input, input_row, sample: where it comes from.
        reason: in words.
        gap: by how much the token that was chosen now is ahead of the one that the stored text
            needs, where they part: in logits; of sampled text, how far the random number is from
            that token's share. Of several such places the largest. None where no token that is
            at all likely leads to the stored text.
    """

    file: str
    row: int
    input: str
    input_row: int
    sample: int
    reason: str
    gap: float | None


@dataclass(slots=True)
class Audit:
    """Rows decoded again, one at a time and without drafts.

    Attributes:
        num_rows: how many.
        seed: that chose them.
        matches: with the same text, finish reason and number of tokens.
        near_ties: that are another text since tokens about equally likely changed places.
        differences: all others.
    """

    num_rows: int
    seed: int
    matches: int = 0
    near_ties: list[Redone] = field(default_factory=list)
    differences: list[Redone] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self)
