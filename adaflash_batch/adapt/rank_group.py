"""The processes of several trainer ranks, and their end: asked for, or reported."""

from __future__ import annotations

import atexit
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from adaflash_batch.adapt.messages import pack, receive
from adaflash_batch.adapt.rank_process import Failure, Place, RankSetup, run_rank
from adaflash_batch.errors import AdaflashError

# Seconds that the other ranks have to say what they saw, once one has failed.
_LAST_WORDS = 3.0


class RankFailure(AdaflashError):
    """A trainer rank died, failed or does not answer; all of them have been ended."""


@dataclass(frozen=True, slots=True)
class _Member:
    process: SpawnProcess
    pipe: Connection


class RankGroup:
    """Processes that make every call together.

    Args:
        setup: what they train.
        devices: one for each rank.
        threads: of torch in each rank.
        timeout: seconds that an answer may take, and that ranks wait for each other.
    """

    def __init__(
        self, setup: RankSetup, devices: Sequence[torch.device], *, threads: int, timeout: float
    ) -> None:
        self._timeout = timeout
        self._members: list[_Member] = []
        self._folder = tempfile.TemporaryDirectory(prefix="adaflash-ranks-")
        # Before multiprocessing's own end, which would wait for ranks that wait for us.
        atexit.register(self.close)
        meeting = Path(self._folder.name, "meeting")
        for rank, device in enumerate(devices):
            place = Place(rank, len(devices), meeting, device, threads, timeout)
            self._members.append(_start(place))
        self._exchange("start", [pack(setup)] * len(devices))

    def __len__(self) -> int:
        return len(self._members)

    def call(self, name: str, *arguments: object) -> Any:
        """Have all ranks make a call with the same arguments; the answer."""
        return self._exchange(name, [pack((name, arguments))] * len(self))

    def call_each(self, name: str, arguments: Sequence[tuple[object, ...]]) -> Any:
        """Have all ranks make a call, each with its own arguments; the answer."""
        return self._exchange(name, [pack((name, each)) for each in arguments])

    def close(self) -> None:
        """End the ranks; may be called again."""
        atexit.unregister(self.close)
        for member in self._members:
            member.process.kill()  # it has nothing to save, and takes seconds to end by itself
        for member in self._members:
            member.process.join()
            member.pipe.close()
        self._members = []
        self._folder.cleanup()

    def _exchange(self, name: str, messages: Sequence[memoryview]) -> Any:
        if not self._members:
            raise RankFailure("the trainer ranks have ended", "see the message of their end")
        try:
            for member, message in zip(self._members, messages, strict=True):
                member.pipe.send_bytes(message)
        except OSError:  # it is dead; `_collect` finds out how
            pass
        answers, failures = self._collect()
        if failures or len(answers) < len(self):
            raise self._give_up(name, answers, failures)
        return answers[0]

    def _collect(self) -> tuple[dict[int, Any], dict[int, Failure]]:
        """What the ranks answer until all have, one has failed, or time is up; by rank."""
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + self._timeout
        while len(answers) + len(failures) < len(self):
            heard = answers.keys() | failures.keys()
            pending = {m.pipe: r for r, m in enumerate(self._members) if r not in heard}
            ready = wait(list(pending), max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = self._answer(pending[pipe])
                (failures if isinstance(answer, Failure) else answers)[pending[pipe]] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + _LAST_WORDS)
        return answers, failures

    def _answer(self, rank: int) -> Any:
        member = self._members[rank]
        try:
            return receive(member.pipe)
        except (EOFError, OSError):
            member.process.join(_LAST_WORDS)
            code = member.process.exitcode
            killed = f"was killed by signal {-code}" if code and code < 0 else None
            return Failure(killed or f"ended with exit code {code}", "")

    def _give_up(
        self, name: str, answers: dict[int, Any], failures: dict[int, Failure]
    ) -> RankFailure:
        num_ranks = len(self)
        self.close()
        if not failures:
            late = [str(rank) for rank in range(num_ranks) if rank not in answers]
            return RankFailure(
                f"trainer rank {', '.join(late)} of {num_ranks} did not answer `{name}` within "
                f"{self._timeout:g} s"
            )
        # One that died without a word is the cause of what the others complain about.
        ordered = sorted(failures.items(), key=lambda item: bool(item[1].trace))
        said = "; ".join(f"rank {rank}: {failure.reason}" for rank, failure in ordered)
        error = RankFailure(f"of {num_ranks} trainer ranks some failed in `{name}`: {said}")
        for rank, failure in ordered:
            if failure.trace:
                error.add_note(f"rank {rank}: {failure.trace}")
        return error


def _start(place: Place) -> _Member:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=run_rank, args=(theirs, place), name=f"trainer-rank-{place.rank}", daemon=True
    )
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return _Member(process, ours)
