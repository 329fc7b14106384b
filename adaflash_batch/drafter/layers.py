"""A transformer layer of the drafter: attention over context and block, MLP, convolutions.

T rows (block rows of all requests, one after another), C context tokens, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.convolution import BlockConvolution

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`Attend` (model.py) of one layer."""


def _pack(linears: Sequence[nn.Linear]) -> Tensor:
    """Move the weights of several projections into one storage, of which each stays a view."""
    packed = torch.cat([linear.weight.detach() for linear in linears])
    parts = torch.split(packed, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part
    return packed


def _project(x: Tensor, linears: Sequence[nn.Linear], packed: Tensor | None) -> Tensor:
    """The projections of x side by side, by one matmul where the weights lie packed.

    Whoever replaces weights instead of writing into them (`.to(...)`, deepcopy, `assign=True`)
    leaves the packed copy behind: the address differs, and the projections run one by one.
    """
    if (
        packed is not None
        and not torch.is_grad_enabled()
        and packed.data_ptr() == linears[0].weight.data_ptr()
    ):
        return F.linear(x, packed)
    return torch.cat([linear(x) for linear in linears], dim=-1)


def signed_rotation(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin as `_rotate` wants them: [T, 1, D], minus sign folded into sin's first half."""
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    return cos.unsqueeze(1).to(dtype), signed.unsqueeze(1).to(dtype)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        self.packed: Tensor | None = None
        self.packed_kv: Tensor | None = None

    def fuse(self) -> None:
        self.packed = _pack((self.q_proj, self.k_proj, self.v_proj))
        self.packed_kv = self.packed[self.q_proj.out_features :]

    def qkv(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        joined = _project(x, (self.q_proj, self.k_proj, self.v_proj), self.packed)
        joined = joined.view(x.shape[0], heads + 2 * kv_heads, dim)
        # Queries and keys are normed and rotated together: half the operations on small tensors.
        scale = torch.cat(
            (self.q_norm.weight.expand(heads, dim), self.k_norm.weight.expand(kv_heads, dim))
        )
        qk = F.rms_norm(joined[:, : heads + kv_heads], (dim,), None, self.eps) * scale
        qk = _rotate(qk, cos, signed_sin)
        return qk[:, :heads], qk[:, heads:], joined[:, heads + kv_heads :]

    def context_kv(self, context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        joined = _project(context, (self.k_proj, self.v_proj), self.packed_kv)
        joined = joined.view(context.shape[0], 2 * self.num_kv_heads, self.head_dim)
        k, v = joined.chunk(2, dim=1)
        k = F.rms_norm(k, (self.head_dim,), None, self.eps) * self.k_norm.weight
        return _rotate(k, *signed_rotation(cos, sin, k.dtype)), v


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.packed: Tensor | None = None

    def fuse(self) -> None:
        self.packed = _pack((self.gate_proj, self.up_proj))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = _project(x, (self.gate_proj, self.up_proj), self.packed).chunk(2, dim=-1)
        return cast(Tensor, self.down_proj(F.silu(gate) * up))


class DrafterLayer(nn.Module):
    """The weights of a layer and what is done with them; `self_attn` makes the context's keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = _convolution(config)
        self.mlp_conv = _convolution(config)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Mix) -> Tensor:
        """[T, H] of [T, H]; rotation: see `signed_rotation`."""

        def attention(x: Tensor) -> Tensor:
            attended = attend(*self.self_attn.qkv(x, *rotation))
            return cast(Tensor, self.self_attn.o_proj(attended))

        x = self.input_layernorm(hidden)
        hidden = hidden + self._around(self.attention_conv, attention, x)
        x = self.post_attention_layernorm(hidden)
        return hidden + self._around(self.mlp_conv, self.mlp, x)

    def _around(
        self, convolution: BlockConvolution | None, sublayer: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        if convolution is None:
            return sublayer(x)
        return convolution.around(sublayer, x, self.block_size)


def _convolution(config: DrafterConfig) -> BlockConvolution | None:
    if not config.conv_kernel_size:
        return None
    return BlockConvolution(config.hidden_size, config.conv_kernel_size, config.conv_group_size)
