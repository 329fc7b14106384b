"""Attention of packed queries over paged keys and values: the PyTorch reference and the CPU form.

# T packed tokens, S segments, N pages, P pages a request, H query heads, G kv heads, D head dim
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adaflash_batch.kernels import native
from adaflash_batch.kernels.elementwise import rotate_reference
from adaflash_batch.kernels.native import NativeUnavailable
from adaflash_batch.kernels.page_size import PAGE

Int32 = npt.NDArray[np.int32]


class _CStep(ctypes.Structure):
    """The C struct `Step`."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
    )


class _CLayer(ctypes.Structure):
    """The C struct `Layer`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "k_pages", "v_pages")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
                *("num_heads", "num_kv_heads", "window"),
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("causal", ctypes.c_int32),
    )


@dataclass(slots=True)
class PackedStep:
    """Where the packed tokens of one step belong.

    Segment s is `length[s]` consecutive tokens of one request: rows start[s].. of the packed
    tensors, positions context[s].. of the request, whose pages are table[s].

    Attributes:
        start, length, context: int32 [S].
        table: int32 [S, P] page numbers, C-contiguous.
    """

    start: Int32
    length: Int32
    context: Int32
    table: Int32
    c_struct: _CStep = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.table.flags.c_contiguous
        self.c_struct = _CStep(
            start=self.start.ctypes.data,
            length=self.length.ctypes.data,
            context=self.context.ctypes.data,
            table=self.table.ctypes.data,
            num_segments=len(self.start),
            table_stride=self.table.shape[1],
        )

    def filled(self, num_tokens: int, missing: int, page: int) -> PackedStep:
        """The step of so many tokens with the missing ones behind them, on a page of nobody."""
        table = np.zeros((len(self.table) + 1, self.table.shape[1]), dtype=np.int32)
        table[:-1], table[-1, 0] = self.table, page
        return PackedStep(
            np.append(self.start, num_tokens).astype(np.int32),
            np.append(self.length, missing).astype(np.int32),
            np.append(self.context, 0).astype(np.int32),
            table,
        )


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's pages. Keys lie transposed within a page: see paged_attention.c.

    Attributes:
        k_pages: [N, G, D, PAGE].
        v_pages: [N, G, PAGE, D].
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor

    @staticmethod
    def empty(
        num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVLayer:
        """Uninitialised pages: what no request wrote is never read."""
        return KVLayer(
            torch.empty(num_pages, num_kv_heads, head_dim, PAGE, dtype=dtype, device=device),
            torch.empty(num_pages, num_kv_heads, PAGE, head_dim, dtype=dtype, device=device),
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """How a layer attends.

    Attributes:
        scale: factor of the scores.
        window: a query sees keys less than this many positions back; 0 sees all.
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.
        causal: a query sees no later position; otherwise it sees its whole segment.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    causal: bool = True


def unavailable_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the compiled form cannot run on this CPU; None when it can."""
    if dtype not in native.ELEMENTS:
        return f"no compiled form for {dtype}"
    try:
        _load(dtype, head_dim)
    except NativeUnavailable as error:
        return str(error)
    return None


def store_kv(step: PackedStep, kv: KVLayer, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write keys and values [T, G, D] of the step's tokens into their pages."""
    library = _library(kv)
    if library is None:
        store_kv_reference(step, kv, k, v)
        return
    layer = _layer(kv, k, k, v, k, Attention(1.0))
    library.store_kv(ctypes.byref(step.c_struct), ctypes.byref(layer))


def paged_attention(
    step: PackedStep, kv: KVLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention
) -> torch.Tensor:
    """Store the step's keys and values, then attend.

    Args:
        q: [T, H, D], any strides with D contiguous; head h reads kv head h // (H / G).
        k, v: [T, G, D], likewise.

    Returns:
        [T, H * D] in q's dtype; sums are float32.
    """
    library = _library(kv)
    if library is None:
        store_kv_reference(step, kv, k, v)
        return paged_attention_reference(step, kv, q, how)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
    layer = _layer(kv, q, k, v, out, how)
    step_pointer, layer_pointer = ctypes.byref(step.c_struct), ctypes.byref(layer)
    library.store_kv(step_pointer, layer_pointer)
    if library.paged_attention(step_pointer, layer_pointer) != 0:
        raise MemoryError("paged_attention: out of memory")
    return out


def _library(kv: KVLayer) -> ctypes.CDLL | None:
    pages = kv.k_pages
    if pages.device.type != "cpu" or pages.dtype not in native.ELEMENTS:
        return None
    try:
        return _load(pages.dtype, pages.shape[2])
    except NativeUnavailable:
        return None


@cache
def _load(dtype: torch.dtype, head_dim: int) -> ctypes.CDLL:
    defines = (f"-DELEMENT={native.ELEMENTS[dtype]}", f"-DHEAD_DIM={head_dim}", f"-DPAGE={PAGE}")
    library = native.load("paged_attention.c", *defines)
    arguments: Any = [ctypes.POINTER(_CStep), ctypes.POINTER(_CLayer)]
    library.store_kv.argtypes, library.store_kv.restype = arguments, None
    library.paged_attention.argtypes = arguments
    library.paged_attention.restype = ctypes.c_int32
    return library


def _layer(
    kv: KVLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    how: Attention,
) -> _CLayer:
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert q.dtype == k.dtype == v.dtype == kv.k_pages.dtype
    return _CLayer(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        k_pages=kv.k_pages.data_ptr(),
        v_pages=kv.v_pages.data_ptr(),
        q_token=q.stride(0),
        q_head=q.stride(1),
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=v.stride(0),
        v_head=v.stride(1),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        window=how.window,
        scale=how.scale,
        softcap=how.softcap,
        causal=how.causal,
    )


def store_kv_reference(step: PackedStep, kv: KVLayer, k: torch.Tensor, v: torch.Tensor) -> None:
    """`store_kv` in PyTorch, on any device."""
    for start, length, context, table in _segments(step):
        positions = torch.arange(context, context + length, device=k.device)
        pages = table.to(k.device)[positions // PAGE]
        offsets = positions % PAGE
        kv.k_pages[pages, :, :, offsets] = k[start : start + length]
        kv.v_pages[pages, :, offsets, :] = v[start : start + length]


def rotate_and_store_reference(
    step: PackedStep,
    kv: KVLayer,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """`triton_store.rotate_and_store` in PyTorch, on any device."""
    num_kv_heads = kv.v_pages.shape[1]
    rotated = rotate_reference(qkv, cos, sin, num_heads, num_kv_heads, norms, eps)
    values = qkv.view(cos.shape[0], -1, cos.shape[1])[:, num_heads + num_kv_heads :]
    store_kv_reference(step, kv, rotated[:, num_heads:], values)
    return rotated[:, :num_heads]


def paged_attention_reference(
    step: PackedStep, kv: KVLayer, q: torch.Tensor, how: Attention
) -> torch.Tensor:
    """`paged_attention` in PyTorch on any device, keys and values being stored already."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv.k_pages.shape[1]
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    for start, length, context, table in _segments(step):
        total = context + length
        pages = table[: -(-total // PAGE)].to(q.device)
        keys = kv.k_pages[pages].permute(1, 2, 0, 3).flatten(2)[:, :, :total]  # [G, D, total]
        values = kv.v_pages[pages].permute(1, 0, 2, 3).flatten(1, 2)[:, :total]  # [G, total, D]
        rows = q[start : start + length].float() * how.scale
        rows = rows.view(length, -1, group, head_dim).permute(1, 2, 0, 3)  # [G, group, length, D]
        scores = rows @ keys.float().unsqueeze(1)
        if how.softcap > 0:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        scores = scores.masked_fill(~_visible(context, length, how, q.device), float("-inf"))
        mixed = scores.softmax(-1) @ values.float().unsqueeze(1)
        out[start : start + length] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out.flatten(1)


def _visible(context: int, length: int, how: Attention, device: torch.device) -> torch.Tensor:
    """[length, context + length]: which keys each query sees."""
    queries = torch.arange(context, context + length, device=device).unsqueeze(1)
    keys = torch.arange(context + length, device=device).unsqueeze(0)
    visible = keys <= queries if how.causal else torch.ones_like(keys <= queries)
    return visible & (keys > queries - how.window) if how.window > 0 else visible


def _segments(step: PackedStep) -> list[tuple[int, int, int, torch.Tensor]]:
    tables = torch.from_numpy(step.table.astype(np.int64))
    columns = (step.start.tolist(), step.length.tolist(), step.context.tolist(), tables)
    return list(zip(*columns, strict=True))
