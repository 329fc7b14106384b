"""Messages between processes of ours, as bytes through a pipe or a socket.

Plain bytes rather than torch's own way, tensors in shared memory: each of those takes a file
descriptor or a file in /dev/shm, which containers give little of.
"""

from __future__ import annotations

import io
from multiprocessing.connection import Connection
from typing import Any

import torch


def pack(message: object) -> memoryview:
    """A message as bytes, for `send_bytes`; its tensors are to be `exchange.alone`."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getbuffer()


def receive(pipe: Connection[Any, Any]) -> Any:
    """The next message; EOFError or OSError where the other side is gone."""
    # Whatever is in it comes from a process of our own.
    return torch.load(io.BytesIO(pipe.recv_bytes()), map_location="cpu", weights_only=False)
