"""The process of a trainer rank, and the pipe by which it is told what to do."""

from __future__ import annotations

import logging
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaflash_batch.adapt.batch_loss import BatchLoss
from adaflash_batch.adapt.messages import pack, receive
from adaflash_batch.drafter.model import DFlash


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs.

    Attributes:
        rank, num_ranks: which one of how many.
        meeting: a file that the ranks find each other by.
        device: its own.
        threads: of torch.
        timeout: seconds that it waits for the others.
    """

    rank: int
    num_ranks: int
    meeting: Path
    device: torch.device
    threads: int
    timeout: float


@dataclass(frozen=True, slots=True, eq=False)
class RankSetup:
    """What a rank trains: the arguments of ZeroTrainer, on the CPU."""

    net: DFlash
    batch: BatchLoss
    compute: torch.dtype
    weight_decay: float
    stage: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's last word, by itself.

    Attributes:
        reason: in a line.
        trace: where it happened.
    """

    reason: str
    trace: str


def run_rank(pipe: Connection, place: Place) -> None:
    """Set up what the first message says, then do what the others say until the driver is gone."""
    _be_quiet()
    try:
        _serve(pipe, place)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        pipe.send_bytes(pack(Failure(reason.splitlines()[0], traceback.format_exc())))
        raise SystemExit(1) from error


def _be_quiet() -> None:
    # The job's stdout ends in its summary, and gloo and DeepSpeed both write there.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    warnings.simplefilter("ignore")  # of libraries to their callers
    # Signals to a job reach all its processes. The driver answers them, and may need its ranks to
    # save; they end when it closes the pipe, or is gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _serve(pipe: Connection, place: Place) -> None:
    setup: RankSetup = receive(pipe)
    calls = _calls(setup, place)
    pipe.send_bytes(pack(None))
    while True:
        name, arguments = receive(pipe)
        answer = calls[name](*arguments)
        # All ranks have the same to say, one of them in full.
        pipe.send_bytes(pack(answer if place.rank == 0 else None))


def _calls(setup: RankSetup, place: Place) -> dict[str, Callable[..., Any]]:
    _join(place)
    from adaflash_batch.adapt.zero import ZeroTrainer

    trainer = ZeroTrainer(
        setup.net.to(place.device),
        setup.batch.to(place.device, setup.compute),
        weight_decay=setup.weight_decay,
        stage=setup.stage,
    )
    offered = (trainer.update, trainer.pull, trainer.weights, trainer.state, trainer.restore)
    return {call.__name__: call for call in offered}


def _join(place: Place) -> None:
    """Meet the other ranks, and let DeepSpeed know."""
    torch.set_num_threads(place.threads)
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place.device)
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    os.environ["LOCAL_RANK"] = str(place.device.index or 0 if on_gpu else place.rank)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend,
        init_method=place.meeting.as_uri(),
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=timedelta(seconds=place.timeout),
    )
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It would compile this for a minute, where a compiler is; only inference could use it.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
