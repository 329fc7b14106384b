"""Learning in a process of its own, beside the decoder's.

The process is started anew (adapt/worker.py) rather than forked, which torch's threads would not
survive, and not by multiprocessing, which would run the caller's main module once more. It
publishes versions itself; the weights of one are read from disk here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from adaflash_batch.adapt.messages import receive
from adaflash_batch.adapt.publishing import TrainerCounters
from adaflash_batch.adapt.recipe import TrainerRecipe
from adaflash_batch.adapt.thread import BesideDecoding
from adaflash_batch.adapt.wire import (
    End,
    Failure,
    Line,
    Order,
    Progress,
    Published,
    Told,
    send,
)
from adaflash_batch.drafter.versions import VersionStore
from adaflash_batch.errors import AdaflashError
from adaflash_batch.exchange import DrafterWeights, TrajectoryMailbox, WeightsMailbox

# Seconds that a process has to finish the piece that it is at.
_PATIENCE_S = 5.0


class ProcessLearning(BesideDecoding):
    """Runs a trainer in a process; see Placement.

    Args:
        recipe: what the trainer is built from.
        store: of the versions; what it pins stays on disk there, too.
        inbox: trajectories, which wait here while the process does not take them.
        outbox: takes the weights of every version.
        notify: takes lines for people, in the decoder's thread only.
        threads: CPU threads of the process.

    Attributes:
        pid: of the process.
    """

    def __init__(
        self,
        recipe: TrainerRecipe,
        store: VersionStore,
        inbox: TrajectoryMailbox,
        outbox: WeightsMailbox,
        *,
        notify: Callable[[str], None],
        threads: int,
    ) -> None:
        super().__init__(notify)
        self._recipe, self._store, self._inbox, self._outbox = recipe, store, inbox, outbox
        self._order = Order(recipe, str(store.folder.absolute()), threads)
        self._progress = Progress(0.0, TrainerCounters(), 0)
        self._is_closed = False
        self._connection, self._process = _start(threads)
        self.pid = self._process.pid
        runs = (self._send_all, self._receive_all)
        self._threads = [threading.Thread(target=run, daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    @property
    def seconds(self) -> float:
        """See Placement."""
        return self._progress.seconds

    @property
    def counters(self) -> TrainerCounters:
        """See Placement."""
        return self._progress.counters

    @property
    def num_dropped(self) -> int:
        """See Placement."""
        return self._inbox.num_dropped + self._progress.num_dropped

    def close(self) -> None:
        """See Placement."""
        self._is_closed = True
        self._news.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        self._connection.close()
        self._tell()

    def _send_all(self) -> None:
        """Send what comes, for as long as the process takes it; only this thread waits for it."""
        try:
            order = self._order._replace(recipe=self._recipe.to(torch.device("cpu")))
            send(self._connection, order)
            while (news := self._news.take()) is not None:
                while (trajectory := self._inbox.take_oldest()) is not None:
                    send(self._connection, trajectory)
                send(self._connection, Told(news, self._store.pinned))
            send(self._connection, End())
        except OSError:
            pass  # The process is gone; the other thread says so.

    def _receive_all(self) -> None:
        try:
            while True:
                self._take_in(receive(self._connection))
        except (EOFError, OSError):
            pass
        code = self._process.wait()
        if not self._is_closed and self._failure is None:
            self._lines.append(
                f"the trainer's process has ended ({_ending(code)}): nothing is learnt any more, "
                "the drafter stays as it is"
            )
        self._news.close()

    def _take_in(self, message: object) -> None:
        match message:
            case Progress():
                self._progress = message
            case Line(text):
                self._lines.append(text)
            case Published(version):
                self._adopt(version)
            case Failure(text):
                self._failure = AdaflashError(text)
            case _:
                raise AssertionError(message)

    def _adopt(self, version: int) -> None:
        try:
            net = self._store.load(version, self._recipe.facts, dtype=self._recipe.dtype)
        except AdaflashError as error:
            self._lines.append(f"version {version} is not drafted with: {error}")
            return
        tensors = {name: each.detach() for name, each in net.named_parameters()}
        self._outbox.put(DrafterWeights(version, tensors))


def _start(threads: int) -> tuple[Connection[Any, Any], subprocess.Popen[bytes]]:
    own, other = Pipe()
    # It finds the same modules as this process, without a folder before them that -m would add.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["OMP_NUM_THREADS"] = str(threads)
    # Threads that wait actively would take the cores from the decoder.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    descriptor, module = other.fileno(), "adaflash_batch.adapt.worker"
    command = [sys.executable, "-P", "-m", module, str(descriptor), str(os.getpid())]
    with other:
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            own.close()
            message = f"the trainer's process cannot be started: {error}"
            raise AdaflashError(message, "give --adapt-place inline") from error
    return own, process


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
