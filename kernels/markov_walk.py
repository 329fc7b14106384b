"""Drafts along blocks, each the likeliest given the one before: DSpark's vanilla Markov head.

In PyTorch a slot is a dozen small operations, one after the other, and few requests wait longer for
those than for the drafter's layers. This makes a call of all slots, where tiles of weights are used
(tiled_linear.py). It rounds where PyTorch does, up to the order of a sum of `rank` products.

# B blocks, N slots, V candidates, r rank
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from adaflash_batch.kernels import native
from adaflash_batch.kernels.native import NativeUnavailable
from adaflash_batch.kernels.tiled_linear import TiledProduct

Walked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Drafts int64 [B, N]; log-probabilities, float32 [B, N], of each and of the next best."""


def is_available() -> bool:
    """Whether the compiled form can be had; asked only where tiled_linear.is_available."""
    try:
        _load()
    except NativeUnavailable:
        return False
    return True


def markov_walk(
    logits: torch.Tensor,
    anchors: torch.Tensor,
    embedded: torch.Tensor,
    rows: TiledProduct,
    token_ids: torch.Tensor | None,
) -> Walked:
    """Draft j is the best of logits j + rows(embedded[draft j - 1]); the anchor is before draft 0.

    Args:
        logits: bfloat16 [B, N, V].
        anchors: ids, int64 [B].
        embedded: bfloat16 [tokens, r].
        rows: without bias, [.., r] to [.., V].
        token_ids: int64 [V], the candidates; None where candidate v is token v.
    """
    blocks, slots, count = logits.shape
    assert rows.outputs == count
    assert rows.inputs == embedded.shape[1]
    assert int(anchors.max()) < len(embedded)
    logits, anchors = logits.contiguous(), anchors.contiguous()
    memory = torch.empty(blocks * (rows.inputs + count), dtype=torch.bfloat16)
    drafts = torch.empty(blocks, slots, dtype=torch.int64)
    top, second = (torch.empty(blocks, slots, dtype=torch.float32) for _ in range(2))
    _load()(
        embedded.data_ptr(),
        ctypes.byref(rows.c_struct),
        None if token_ids is None else token_ids.data_ptr(),
        *(each.data_ptr() for each in (anchors, logits, memory)),
        *(blocks, slots),
        *(each.data_ptr() for each in (drafts, top, second)),
    )
    return drafts, top, second


@cache
def _load() -> ctypes._NamedFuncPointer:
    function = native.load("markov_walk.c", "-DELEMENT=1").markov_walk
    pointers = [ctypes.c_void_p] * 6
    function.argtypes = [*pointers, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3]
    function.restype = None
    return function
