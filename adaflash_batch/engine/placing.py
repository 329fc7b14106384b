"""What of a decoder depends on where its target runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from adaflash_batch.engine.device_drafting import DeviceDrafter, LateDrafter
from adaflash_batch.engine.device_passes import DevicePasses, device_capturer
from adaflash_batch.engine.drafting import BlockDrafter, Drafter
from adaflash_batch.engine.graphs import Capturer
from adaflash_batch.engine.passes import HostPasses, Passes
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import KVLayer


class Placed(NamedTuple):
    """A decoder's passes and drafter; `late` is the drafter where the host learns drafts late."""

    passes: Passes
    drafter: Drafter | None
    late: LateDrafter | None


def place(
    target: Target,
    kv: list[KVLayer],
    drafter: Drafter | None,
    *,
    max_running: int,
    token_budget: int,
    longest: int,
    reserve: int,
    clock: Callable[[], float],
    capturer: Callable[[], Capturer | None] | None = None,
) -> Placed:
    """Set up the passes of a decoder.

    Args:
        drafter: as it was made; None without one.
        longest: positions of a request.
        reserve: of them behind its anchor.
        capturer: makes what makes graphs; None takes the device's own.
    """
    if not target.kernels.takes_device_step:
        return Placed(HostPasses(target, kv, clock), drafter, None)
    is_block = isinstance(drafter, BlockDrafter)
    max_pages = -(-longest // PAGE)
    passes = DevicePasses(
        target,
        kv,
        max_running=max_running,
        token_budget=token_budget,
        max_pages=max_pages,
        widest=max(reserve, 1),
        num_drafted=max_running * (drafter.block_size - 1) if is_block and drafter else 0,
        clock=clock,
        capturer=device_capturer(target.device) if capturer is None else capturer(),
    )
    if not isinstance(drafter, BlockDrafter):
        return Placed(passes, drafter, None)
    late = DeviceDrafter(
        drafter,
        max_running=max_running,
        max_pages=max_pages,
        drafted=passes.drafted,
        marks=passes.marks,
        capturer=passes.capturer,
    )
    return Placed(passes, late, late)
