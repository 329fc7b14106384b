"""How far a check is, on stderr: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import os
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaflash_batch.report.live import FIRST_LINE_S, LINE_EVERY_S


class Listener:
    """An Audience of a check. Short inputs make no line. Use it in a `with` statement.

    Args:
        stream: a terminal or not.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = self._done = 0
        self._next = 0.0
        self._bar: Progress | None = None
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            columns = (TextColumn("checking rows"), BarColumn(), MofNCompleteColumn())
            console = Console(file=stream)
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """See Audience."""
        print(text, file=self._stream, flush=True)

    def begin(self, num_rows: int) -> None:
        """See Audience."""
        self._total = num_rows
        self._next = time.monotonic() + FIRST_LINE_S
        if self._bar is not None:
            self._bar.add_task("", total=num_rows)
            self._bar.start()

    def advance(self, num_rows: int) -> None:
        """See Audience."""
        self._done += num_rows
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif (now := time.monotonic()) >= self._next:
            self._next = now + LINE_EVERY_S
            self.note(f"checked {self._done:,} of {self._total:,} rows")
