"""All decoder layers of a Llama-like model in one call, on CPUs.

The C form makes the calls that `engine.fused_layer.FusedLayer` makes, in the same order and with
the same rounding, which is its reference; only Python is not between them.

# T tokens, H hidden, D head dim
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from adaflash_batch.kernels import native
from adaflash_batch.kernels.native import NativeUnavailable
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import KVLayer, PackedStep
from adaflash_batch.kernels.tiled_linear import CLinear, TiledProduct

# In the order of the C file.
_TIMED = ("matrix products", "attention", "norms, SiLU")


class _CLayer(ctypes.Structure):
    """The C struct `StackLayer`."""

    _fields_ = (
        *((name, CLinear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("k_pages", "v_pages", "tap")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("causal", ctypes.c_int32),
    )


class _CShape(ctypes.Structure):
    """The C struct `Shape`."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_layers", "tokens", "hidden", "heads", "kv_heads", "tap_stride")
    )


@dataclass(frozen=True, slots=True)
class StackLayer:
    """A layer: RMSNorm, attention, residual, RMSNorm, gated SiLU, residual.

    Attributes:
        qkv, out, gate_up, down: its products.
        norm, mlp_norm: weights [H].
        head_norms: weights [D] for queries and for keys, where there are such.
        window, causal: see paged_attention.Attention.
        scale: of scores.
        eps: of all norms.
    """

    qkv: TiledProduct
    out: TiledProduct
    gate_up: TiledProduct
    down: TiledProduct
    norm: torch.Tensor
    mlp_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int
    scale: float
    eps: float
    causal: bool = True

    def c_struct(self) -> _CLayer:
        """For the call, without pages and tap."""
        q_norm, k_norm = self.head_norms or (None, None)
        linears = (each.c_struct for each in (self.qkv, self.out, self.gate_up, self.down))
        norms = (_at(each) for each in (self.norm, self.mlp_norm, q_norm, k_norm))
        numbers = (self.window, self.scale, self.eps, self.causal)
        return _CLayer(*linears, *norms, None, None, None, *numbers)


def is_available(head_dim: int) -> bool:
    """Whether the compiled form can be had; asked only where tiled_linear.is_available."""
    try:
        _load(head_dim)
    except NativeUnavailable:
        return False
    return True


class DecoderStack:
    """Layers that are run together.

    Args:
        layers: of one shape.
        num_heads, num_kv_heads, head_dim: of their attention.
    """

    def __init__(
        self, layers: Sequence[StackLayer], num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self._layers = list(layers)  # holds what is pointed to
        self._structs = (_CLayer * len(layers))(*(each.c_struct() for each in layers))
        first = layers[0]
        self._shape = _CShape(len(layers), 0, first.norm.shape[0], num_heads, num_kv_heads)
        heads = (2 * num_heads + num_kv_heads) * head_dim
        products = first.qkv.outputs + first.gate_up.outputs + first.gate_up.outputs // 2
        self._width = heads + products + 3 * first.norm.shape[0]
        self._memory = torch.empty(0, dtype=torch.bfloat16)
        self._run = _load(head_dim)
        self._pages: list[KVLayer] = []
        self._seconds = (ctypes.c_double * len(_TIMED))()

    @property
    def seconds(self) -> dict[str, float]:
        """That all calls together spent, by part."""
        return dict(zip(_TIMED, self._seconds, strict=True))

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: PackedStep,
        kv: list[KVLayer],
        taps: Mapping[int, torch.Tensor],
    ) -> None:
        """Run all layers over the packed tokens of a step; keys and values are stored.

        Args:
            x: bfloat16 [T, H], contiguous; overwritten with the last layer's output.
            cos, sin: bfloat16 [T, D], contiguous.
            step: how the tokens belong to requests.
            kv: pages of each layer.
            taps: by layer, bfloat16 [T, H] that takes its output; of one stride.
        """
        assert x.is_contiguous()
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        num_tokens = x.shape[0]
        self._point(kv, taps)
        if self._memory.numel() < num_tokens * self._width:
            self._memory = torch.empty(num_tokens * self._width, dtype=torch.bfloat16)
        self._shape.tokens = num_tokens
        failed = self._run(
            ctypes.byref(step.c_struct),
            self._structs,
            ctypes.byref(self._shape),
            *map(_at, (x, cos, sin, self._memory)),
            self._seconds,
        )
        if failed:
            raise MemoryError("decoder_stack: out of memory")

    def _point(self, kv: list[KVLayer], taps: Mapping[int, torch.Tensor]) -> None:
        if kv is not self._pages:
            self._pages = kv
            for struct, pages in zip(self._structs, kv, strict=True):
                struct.k_pages, struct.v_pages = _at(pages.k_pages), _at(pages.v_pages)
        for index, struct in enumerate(self._structs):
            struct.tap = _at(taps.get(index))
        self._shape.tap_stride = next((each.stride(0) for each in taps.values()), 0)


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _load(head_dim: int) -> ctypes._NamedFuncPointer:
    defines = ("-DELEMENT=1", f"-DHEAD_DIM={head_dim}", f"-DPAGE={PAGE}")
    function = native.load("decoder_stack.c", *defines).decoder_stack
    function.argtypes = [ctypes.c_void_p] * 8
    function.restype = ctypes.c_int32
    return function
