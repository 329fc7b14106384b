"""Small arrays from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch

Upload = Callable[[npt.NDArray[Any]], torch.Tensor]


def upload_to(device: torch.device) -> Upload:
    """What takes an array there; on a CPU the tensor shares the array's memory."""
    if device.type == "cpu":
        return torch.from_numpy

    def upload(array: npt.NDArray[Any]) -> torch.Tensor:
        # PyTorch's pool of pinned memory keeps the pages until the copy is done.
        return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)

    return upload
