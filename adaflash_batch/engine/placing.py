"""What a decoder is made of; some of it depends on where its target runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.device_drafting import DeviceDrafter, LateDrafter
from adaflash_batch.engine.device_passes import DevicePasses, device_capturer
from adaflash_batch.engine.drafting import BlockDrafter, Drafter
from adaflash_batch.engine.keeping import Keeping
from adaflash_batch.engine.late_context import LateContext
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.packing import PageTable
from adaflash_batch.engine.pages import PagePool
from adaflash_batch.engine.passes import HostPasses, Passes
from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.scheduler import Scheduler
from adaflash_batch.engine.sizes import Sizes
from adaflash_batch.engine.speculation import Speculator
from adaflash_batch.engine.target import Target


class Placed(NamedTuple):
    """A decoder's passes and drafter; `late` is the drafter where the host learns drafts late."""

    passes: Passes
    drafter: Drafter | None
    late: LateDrafter | None


class Sources(NamedTuple):
    """Where drafts come from, and what is done with them."""

    drafter: Drafter | None
    lookup: Lookup | None
    policy: Policy
    cost: StepCost


class Parts(NamedTuple):
    """What a decoder is made of."""

    placed: Placed
    scheduler: Scheduler
    table: PageTable
    keeping: Keeping
    speculator: Speculator


def parts_of(target: Target, sources: Sources, sizes: Sizes, clock: Callable[[], float]) -> Parts:
    """Those of a decoder that has computed nothing yet."""
    placed = place(target, sources.drafter, sizes, clock)
    drafter, table = placed.drafter, PageTable(sizes.max_running, sizes.longest)
    scheduler = Scheduler(
        PagePool(sizes.num_pages),
        max_running=sizes.max_running,
        token_budget=sizes.token_budget,
        reserve=sizes.reserve,
    )
    late = None if drafter is None else LateContext(drafter, table, target.upload)
    layers = () if drafter is None else drafter.tapped_layers
    target.tap(layers)
    speculator = Speculator(
        sources.policy,
        drafter=drafter,
        late=late,
        lookup=sources.lookup,
        cost=sources.cost,
        table=table,
        clock=clock,
        times_drafts=placed.late is None,
    )
    keeping = Keeping(target, scheduler.prefixes, late, layers)
    return Parts(placed, scheduler, table, keeping, speculator)


def place(
    target: Target, drafter: Drafter | None, sizes: Sizes, clock: Callable[[], float]
) -> Placed:
    """The passes of a decoder and its drafter, which is given as it was made."""
    kv = target.new_kv(sizes.num_pages)
    if not target.kernels.takes_device_step:
        return Placed(HostPasses(target, kv, clock), drafter, None)
    block = drafter.block_size if isinstance(drafter, BlockDrafter) else 1
    capturer = device_capturer(target.device)
    num_drafted = sizes.max_running * (block - 1)
    passes = DevicePasses(target, kv, sizes, num_drafted, clock, capturer)
    if not isinstance(drafter, BlockDrafter):
        return Placed(passes, drafter, None)
    late = DeviceDrafter(drafter, sizes, passes.drafted, passes.marks, capturer)
    return Placed(passes, late, late)
