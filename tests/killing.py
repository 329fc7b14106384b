"""Processes that die by SIGKILL at a chosen call of a function, or whenever they are told to."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any


def die() -> None:
    """The end, with nothing flushed and nobody told."""
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(owner: Any, name: str, number: int, *, after: bool = False) -> Callable[[], None]:
    """Makes this process die at such a call of a function, the first being 0, or right after it."""

    def arm() -> None:
        real, calls = getattr(owner, name), itertools.count()

        def watched(*arguments: Any, **named: Any) -> Any:
            is_last = next(calls) == number
            if is_last and not after:
                die()
            result = real(*arguments, **named)
            if is_last:
                die()
            return result

        setattr(owner, name, watched)

    return arm


def in_a_child(work: Callable[[], object]) -> int:
    """The process id of a copy of this process that does some work."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_turns(works: Sequence[Callable[[], object]], wanted: int) -> None:
    """All of them, two at once; each process must end in the wanted way."""
    for begin in range(0, len(works), 2):
        children = [in_a_child(work) for work in works[begin : begin + 2]]
        assert [exit_code(child) for child in children] == [wanted] * len(children), begin
