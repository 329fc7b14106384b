"""The trainer's process: `python -m adaflash_batch.adapt.worker SOCKET PARENT`.

It lives no longer than its parent: the socket ends with that, and Linux kills it besides.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from adaflash_batch.adapt.inline import InlineLearning
from adaflash_batch.adapt.messages import receive
from adaflash_batch.adapt.thread import NewsMailbox, learn_until_closed
from adaflash_batch.adapt.wire import (
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
from adaflash_batch.exchange import Trajectory, TrajectoryMailbox

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Learn until the parent closes the socket or is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    # Whoever stops the job stops its decoder, which then ends this process between two pieces.
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    # Where the parent is gone there is nobody to tell.
    with suppress(EOFError, ConnectionError):
        _serve(connection)


def _die_with(parent: int) -> None:
    """Be killed when the parent dies, or its thread that started this: that of the decoder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _serve(connection: Connection[Any, Any]) -> None:
    order = receive(connection)
    assert isinstance(order, Order)
    torch.set_num_threads(order.threads)
    inbox, news = TrajectoryMailbox(order.recipe.plan.waiting_bytes // 2), NewsMailbox()
    store = VersionStore(order.store)
    reader = threading.Thread(target=_read, args=(connection, inbox, news, store), daemon=True)
    reader.start()
    try:
        learner = order.recipe.build(
            inbox,
            store,
            lambda weights: send(connection, Published(weights.version)),
            lambda line: send(connection, Line(line)),
        )
        learn_until_closed(learner, news, lambda: _report(connection, learner))
        _report(connection, learner)
    except ConnectionError:
        raise
    except (AdaflashError, OSError) as error:
        send(connection, Failure(str(error)))


def _report(connection: Connection[Any, Any], learner: InlineLearning) -> None:
    send(connection, Progress(learner.seconds, learner.counters, learner.num_dropped))


def _read(
    connection: Connection[Any, Any],
    inbox: TrajectoryMailbox,
    news: NewsMailbox,
    store: VersionStore,
) -> None:
    """Take in what the parent says, until it ends or is gone."""
    try:
        while True:
            message = receive(connection)
            if isinstance(message, Trajectory):
                inbox.put(message)
            elif isinstance(message, Told):
                store.pinned = message.pinned
                for counts in message.news.counts:
                    news.observe(counts)
                news.put(message.news.ahead)
            else:
                break
    except (EOFError, OSError):
        pass
    finally:
        news.close()


if __name__ == "__main__":
    main()
