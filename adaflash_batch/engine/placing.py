"""What a decoder is made of; some of it depends on where its target runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from adaflash_batch.engine.ahead import DraftsAhead
from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.device_drafting import DeviceDrafter, LateDrafter
from adaflash_batch.engine.device_passes import DevicePasses, device_capturer
from adaflash_batch.engine.drafting import BlockDrafter, Drafter
from adaflash_batch.engine.graphs import Graphs
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
    """A decoder's passes and drafter.

    late: the drafter where the host learns drafts late.
    ahead: drafts begun before the host knows where.
    graphs: kept passes; none where there are no such.
    """

    passes: Passes
    drafter: Drafter | None
    late: LateDrafter | None
    ahead: DraftsAhead | None
    graphs: tuple[Graphs[Any], ...] = ()


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
    table = PageTable(sizes.max_running, sizes.longest)
    placed = place(target, sources.drafter, sizes, table, clock)
    drafter, ahead = placed.drafter, placed.ahead
    scheduler = Scheduler(
        PagePool(sizes.num_pages),
        max_running=sizes.max_running,
        token_budget=sizes.token_budget,
        reserve=sizes.reserve,
        ahead=0 if ahead is None else sizes.reserve,
    )
    late = None if drafter is None else LateContext(drafter, table, target.upload)
    layers = () if drafter is None else drafter.tapped_layers
    target.tap(layers)
    speculator = Speculator(
        sources.policy,
        drafter=drafter,
        late=late,
        ahead=ahead,
        lookup=sources.lookup,
        cost=sources.cost,
        table=table,
        clock=clock,
        times_drafts=placed.late is None,
    )
    keeping = Keeping(target, scheduler.prefixes, late, layers, ahead)
    return Parts(placed, scheduler, table, keeping, speculator)


def place(
    target: Target,
    drafter: Drafter | None,
    sizes: Sizes,
    table: PageTable,
    clock: Callable[[], float],
) -> Placed:
    """The passes of a decoder and its drafter, which is given as it was made."""
    kv = target.new_kv(sizes.num_pages)
    if not target.kernels.takes_device_step:
        return Placed(HostPasses(target, kv, clock), drafter, None, None)
    block = drafter.block_size if isinstance(drafter, BlockDrafter) else 1
    # What is drafted for a step, and ahead of the next.
    num_drafted = 2 * sizes.max_running * (block - 1)
    capturer = device_capturer(target.device)
    passes = DevicePasses(target, kv, sizes, num_drafted, clock, capturer)
    if not isinstance(drafter, BlockDrafter):
        return Placed(passes, drafter, None, None, (passes.graphs,))
    # Its graphs run while what the target's left is still wanted: they share no memory with those.
    own = device_capturer(target.device)
    late = DeviceDrafter(drafter, sizes, passes.drafted, passes.emitted, passes.marks, own)
    ahead = DraftsAhead(late, passes, target, table)
    return Placed(passes, late, late, ahead, (passes.graphs, late.graphs))
