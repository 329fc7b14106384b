"""A trainer's own stream of work on a GPU that decodes, too; elsewhere nothing of the kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from adaflash_batch.exchange import DrafterWeights


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What this thread launches within goes beside what others launch."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)  # what the trainer is built from was made on another stream
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def when_made(
    put: Callable[[DrafterWeights], None], device: torch.device
) -> Callable[[DrafterWeights], None]:
    """`put` for weights that are still being computed: others may read them when it is called."""
    if device.type != "cuda":
        return put

    def wait_and_put(weights: DrafterWeights) -> None:
        torch.cuda.current_stream(device).synchronize()
        put(weights)

    return wait_and_put
