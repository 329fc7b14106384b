"""`select_widths` on the device: every draft finds its rank, then one program takes the best.

Sorting in one program would take registers that there are not. A draft's rank is the number of
drafts with larger keys, and keys are integers that are all different.

# R requests, K drafts of a request at most
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adaflash_batch.kernels.variant import LAUNCH, Variant
from adaflash_batch.kernels.widths import LEAST_SECONDS, Selected

_LEAST_SECONDS = tl.constexpr(LEAST_SECONDS)


def select_widths(
    chances: torch.Tensor,
    sizes: torch.Tensor,
    seconds: torch.Tensor,
    factors: torch.Tensor | None = None,
    *,
    are_hazards: bool = False,
) -> Selected:
    """See widths.select_widths; nothing waits for the device."""
    num_requests, num_places = chances.shape
    assert all(each.is_contiguous() for each in (chances, sizes, seconds))
    place = chances.device
    widths = torch.empty(num_requests, dtype=torch.int32, device=place)
    promised = torch.empty(2, dtype=torch.float64, device=place)
    keys = torch.empty(num_requests * num_places, dtype=torch.int64, device=place)
    steps = torch.empty(2, num_requests * num_places, dtype=torch.float64, device=place)
    rows, places = (triton.next_power_of_2(max(n, 1)) for n in (num_requests, num_places))
    tile = _tile(places)
    rank_kernel[(triton.cdiv(num_requests, tile),)](
        *(chances, sizes, seconds, chances if factors is None else factors, keys, steps),
        *(num_requests, num_places),
        HAS_FACTORS=factors is not None,
        ARE_HAZARDS=are_hazards,
        ROWS=tile,
        PLACES=places,
        **LAUNCH,
    )
    take_kernel[(1,)](
        *(keys, steps, seconds, widths, promised, num_requests, num_places),
        ROWS=rows,
        PLACES=places,
        num_warps=_num_warps(rows * places),
        **LAUNCH,
    )
    return Selected(widths, promised)


def _tile(places: int) -> int:
    """Requests whose drafts a program compares with as many others at a time."""
    return max(64 // places, 1)


def _num_warps(size: int) -> int:
    return min(max(size // 256, 1), 8)


@triton.jit
def _smaller(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.minimum(left, right)


@triton.jit
def _survivals(
    chances: tl.tensor,
    sizes: tl.tensor,
    factors: tl.tensor,
    num_requests: tl.tensor,
    num_places: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    HAS_FACTORS: tl.constexpr,
    ARE_HAZARDS: tl.constexpr,
) -> tl.tensor:
    """[ROWS, PLACES], between 0 and 1, falling along a row, 0 where no draft is."""
    size = tl.load(sizes + row, mask=row < num_requests, other=0)
    size = tl.minimum(size, num_places)
    is_there = place < size
    x = tl.load(chances + row * num_places + place, mask=is_there, other=0.0)
    if ARE_HAZARDS:
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        x = tl.exp(tl.cumsum(-softplus, axis=1))
    if HAS_FACTORS:
        x = x * tl.load(factors + place, mask=place < num_places, other=0.0)
    # Not what is above 0: neither NaN nor the sign of -0.0 may reach the bits that are sorted.
    x = tl.where(x > 0.0, tl.minimum(x, 1.0), 0.0)
    x = tl.associative_scan(x, 1, _smaller)
    return tl.where(is_there, x, 0.0)


@triton.jit
def _keys(survival: tl.tensor, row: tl.tensor, place: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """Larger for drafts that come first: by survival, then by place in the block, then by row."""
    bits = survival.to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | (0x7FFFFFFF - (place * num_rows + row)).to(tl.int64)


@triton.jit
def rank_kernel(
    chances: tl.tensor,
    sizes: tl.tensor,
    seconds: tl.tensor,
    factors: tl.tensor,
    keys: tl.tensor,
    steps: tl.tensor,
    num_requests: tl.tensor,
    num_places: tl.tensor,
    HAS_FACTORS: tl.constexpr,
    ARE_HAZARDS: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Each draft's key, and of the step that takes it and all before it: tokens; tokens a second.

    The latter is -1 where no draft is.
    """
    place = tl.arange(0, PLACES)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    own = _survivals(
        *(chances, sizes, factors, num_requests, num_places, row, place, HAS_FACTORS, ARE_HAZARDS)
    )
    key = _keys(own, row, place, num_requests)
    flat = tl.reshape(key, [ROWS * PLACES, 1])
    # Float64 holds the sum of so many float32 exactly unless they are tiny: any order will do.
    emitted = tl.zeros([ROWS * PLACES], dtype=tl.float64) + num_requests
    count = tl.zeros([ROWS * PLACES], dtype=tl.int32)
    for first in range(0, num_requests, ROWS):
        others = first + tl.arange(0, ROWS)[:, None]
        survival = _survivals(
            *(chances, sizes, factors, num_requests, num_places),
            *(others, place, HAS_FACTORS, ARE_HAZARDS),
        )
        theirs = tl.reshape(_keys(survival, others, place, num_requests), [1, ROWS * PLACES])
        # What is no draft is worth 0 and has the place of one that is worth nothing.
        is_before = theirs >= flat
        value = tl.reshape(survival, [1, ROWS * PLACES]).to(tl.float64)
        emitted += tl.sum(tl.where(is_before, value, 0.0), axis=1)
        count += tl.sum((is_before & (value > 0.0)).to(tl.int32), axis=1)
    taken = tl.load(seconds + count, mask=count <= num_requests * num_places, other=1.0)
    speed = emitted / tl.maximum(taken, _LEAST_SECONDS)
    speed = tl.where(tl.reshape(own, [ROWS * PLACES]) > 0.0, speed, -1.0)
    at = row * num_places + place
    is_there = (row < num_requests) & (place < num_places)
    tl.store(keys + at, key, mask=is_there)
    tl.store(steps + at, tl.reshape(emitted, [ROWS, PLACES]), mask=is_there)
    behind = steps + num_requests * num_places
    tl.store(behind + at, tl.reshape(speed, [ROWS, PLACES]), mask=is_there)


@triton.jit
def take_kernel(
    keys: tl.tensor,
    steps: tl.tensor,
    seconds: tl.tensor,
    widths: tl.tensor,
    promised: tl.tensor,
    num_requests: tl.tensor,
    num_places: tl.tensor,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """The fastest step, of equal ones that with the fewest drafts."""
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, PLACES)[None, :]
    at = row * num_places + place
    is_there = (row < num_requests) & (place < num_places)
    key = tl.load(keys + at, mask=is_there, other=-1)
    emitted = tl.load(steps + at, mask=is_there, other=0.0)
    speed = tl.load(steps + num_requests * num_places + at, mask=is_there, other=-1.0)
    plain_speed = num_requests / tl.maximum(tl.load(seconds), _LEAST_SECONDS)
    best = tl.max(tl.max(speed, axis=1), axis=0)
    fewest = tl.where(speed == best, key, -1)
    # Above all keys where no draft pays.
    last = tl.where(best > plain_speed, tl.max(tl.max(fewest, axis=1), axis=0), 0x7FFFFFFFFFFFFFFF)
    width = tl.sum((key >= last).to(tl.int32), axis=1)
    request = tl.arange(0, ROWS)
    tl.store(widths + request, width, mask=request < num_requests)
    most = tl.sum(tl.sum(tl.where(key == last, emitted, 0.0), axis=1), axis=0)
    tl.store(promised, tl.where(best > plain_speed, most, num_requests))
    taken = tl.load(seconds + tl.sum(width, axis=0))
    tl.store(promised + 1, tl.maximum(taken, _LEAST_SECONDS))


_FLOATS = dict.fromkeys(("chances", "factors"), "*fp32")
_DOUBLES = dict.fromkeys(("seconds", "steps", "promised"), "*fp64")
_INTEGERS = {"sizes": "*i32", "widths": "*i32", "keys": "*i64"}
_NUMBERS = dict.fromkeys(("num_requests", "num_places"), "i32")
_TYPES = _FLOATS | _DOUBLES | _INTEGERS | _NUMBERS


def _ranking(places: int, *, are_hazards: bool) -> Variant:
    flags = {"HAS_FACTORS": are_hazards, "ARE_HAZARDS": are_hazards}
    sizes = {"ROWS": _tile(places), "PLACES": places}
    name = f"rank {places} drafts{' by hazards' if are_hazards else ''}"
    return Variant(name, rank_kernel, _TYPES, flags | sizes, num_warps=4, num_stages=3)


def _taking(rows: int, places: int) -> Variant:
    sizes = {"ROWS": rows, "PLACES": places}
    warps = _num_warps(rows * places)
    name = f"take of {rows} x {places} drafts"
    return Variant(name, take_kernel, _TYPES, sizes, num_warps=warps, num_stages=3)


VARIANTS = [
    _ranking(8, are_hazards=False),
    _ranking(16, are_hazards=True),
    _taking(8, 8),
    _taking(256, 16),
]
