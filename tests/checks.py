"""The call that checks a job made by `folders.spec_of`, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from folders import spec_of

from adaflash_batch.review.check import run_check
from adaflash_batch.review.check_report import CheckReport
from adaflash_batch.review.findings import Flagged


@dataclass(slots=True)
class Heard:
    """An Audience and a Flag that keep what they hear."""

    lines: list[str] = field(default_factory=list)
    flagged: list[Flagged] = field(default_factory=list)
    total: int = 0
    done: int = 0

    def note(self, text: str) -> None:
        self.lines.append(text)

    def begin(self, num_rows: int) -> None:
        self.total = num_rows

    def advance(self, num_rows: int) -> None:
        self.done += num_rows

    def errors(self) -> list[tuple[str, int, str, str]]:
        """(file, row, kind, message) of rows that will carry errors."""
        return [
            (Path(each.place.file).name, each.place.row, each.kind, each.place.message)
            for each in self.flagged
            if each.effect == "error_row"
        ]


def check(
    paths: Path | Sequence[Path],
    model: Path,
    out: Path,
    keys: Mapping[str, object] | None = None,
    *,
    heard: Heard | None = None,
) -> CheckReport:
    """Check the job that `folders.run` would run."""
    heard = heard or Heard()
    spec = spec_of(paths, model, out, keys)
    return run_check(spec, audience=heard, flag=heard.flagged.append)
