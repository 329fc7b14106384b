"""The DFlash drafter: a few transformer layers that fill a block of tokens in one pass.

DFlash, arXiv 2602.06036. The drafter reads the target's hidden states: every layer turns them
into keys and values with the same projections that serve its own block.

    context = hidden_norm(fc(features))                     once, shared by all layers
    k, v    = k_norm(k_proj(context)), v_proj(context)      per layer; no input_layernorm
    block   = [anchor, mask, mask, ...]                     embedded by the target, sees context and
                                                            itself, both ways
    logits  = target's lm_head(block output); slot i drafts the token at anchor + i

T rows (block rows of all requests, one after another), C context tokens, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash_batch.drafter.config import DrafterConfig, build_target_layer_ids

__all__ = [
    "Attend",
    "DFlash",
    "DrafterConfig",
    "build_target_layer_ids",
    "initialise",
    "reference_block",
]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads * D].

q, k and v are strided views, contiguous in D only. The scale is D ** -0.5. Rows of a block see
their request's context and their whole block; in a layer with a window (`DrafterConfig.windows`) a
key is seen iff query position - key position < window.
"""


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
    return torch.cat([F.linear(x, linear.weight) for linear in linears], dim=-1)


def _rotation(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
        return _rotate(k, *_rotation(cos, sin, k.dtype)), v


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
        return F.linear(F.silu(gate) * up, self.down_proj.weight)


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DFlash(nn.Module):
    """The drafter's weights under the names of published checkpoints, and what is done with them.

    Attention is the caller's (`Attend`), so that a serving engine with paged keys and a trainer
    with masks run the same code. Embedding and lm_head are the target's.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # No buffer: `.to(bfloat16)` would round the frequencies. Always made on the CPU, also when
        # the weights are made on the meta device.
        exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
        self._frequencies = config.rope_theta**-exponents

    def fuse(self) -> DFlash:
        """Lay q/k/v and gate/up side by side in memory: one matmul for each at inference.

        Names, values and parameters stay; `load_state_dict` and optimisers, which write in place,
        keep working. Without gradients only. Returns self.
        """
        for layer in self._layers():
            layer.self_attn.fuse()
            layer.mlp.fuse()
        return self

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of absolute positions [T], float32 [T, D] (frequencies twice over)."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def context(self, features: Tensor) -> Tensor:
        """[C, H] from the target's tapped hidden states [C, features * H]."""
        return cast(Tensor, self.hidden_norm(self.fc(features)))

    def context_kv(
        self, layer: int, context: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [C, kv_heads, D] of context [C, H] in one layer.

        cos and sin: `rotary` of the absolute positions of the context tokens.
        """
        return cast(_Layer, self.layers[layer]).self_attn.context_kv(context, cos, sin)

    def block(self, embeddings: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, H], ready for lm_head, of block rows: target embeddings [T, H] of anchors and masks.

        cos and sin: `rotary` of the absolute positions of the rows.
        """
        rotation = _rotation(cos, sin, embeddings.dtype)
        hidden = embeddings
        for index, layer in enumerate(self._layers()):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(hidden), *rotation)
            attended = attend(index, q, k, v)
            hidden = hidden + F.linear(attended, layer.self_attn.o_proj.weight)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return cast(Tensor, self.norm(hidden))

    def _layers(self) -> Sequence[_Layer]:
        return cast(Sequence[_Layer], self.layers)


def initialise(config: DrafterConfig, generator: torch.Generator) -> DFlash:
    """A float32 drafter with weights drawn from N(0, 0.02) and norms of 1, on the CPU.

    The generator alone decides: torch's global random state is neither read nor moved.
    """
    with torch.device("meta"):
        model = DFlash(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def reference_block(
    model: DFlash, context: Tensor, embeddings: Tensor, first_position: int = 0
) -> Tensor:
    """`block` for one request, written out densely from the paper's formulas; the tests' yardstick.

    Args:
        model: its weights are used, not its methods (`rotary` excepted).
        context: [C, H] as `DFlash.context` returns it, at positions first_position, +1, ...
        embeddings: [block, H], at the positions after the context.
        first_position: absolute position of the first context token.
    """
    config, weights = model.config, dict(model.named_parameters())
    positions = first_position + torch.arange(len(context) + len(embeddings))
    hidden = embeddings
    for index, window in enumerate(config.windows):
        layer = {
            name.removeprefix(f"layers.{index}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        x = _reference_norm(hidden, layer["input_layernorm.weight"], config.rms_norm_eps)
        hidden = hidden + _reference_attention(model, layer, context, x, positions, window)
        x = _reference_norm(hidden, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = x @ layer["mlp.gate_proj.weight"].T
        up = x @ layer["mlp.up_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return _reference_norm(hidden, weights["norm.weight"], config.rms_norm_eps)


def _reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _reference_attention(
    model: DFlash,
    layer: Mapping[str, Tensor],
    context: Tensor,
    x: Tensor,
    positions: Tensor,
    window: int | None,
) -> Tensor:
    config = model.config
    both = torch.cat((context, x))
    q = (x @ layer["self_attn.q_proj.weight"].T).reshape(len(x), -1, config.head_dim)
    k = (both @ layer["self_attn.k_proj.weight"].T).reshape(len(both), -1, config.head_dim)
    v = (both @ layer["self_attn.v_proj.weight"].T).reshape(len(both), -1, config.head_dim)
    q = _reference_norm(q, layer["self_attn.q_norm.weight"], config.rms_norm_eps)
    k = _reference_norm(k, layer["self_attn.k_norm.weight"], config.rms_norm_eps)
    cos, sin = (part.to(x.dtype).unsqueeze(1) for part in model.rotary(positions))

    def rotated(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * cos[-len(y) :] + torch.cat((-second, first), dim=-1) * sin[-len(y) :]

    group = config.num_attention_heads // config.num_key_value_heads
    k, v = rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / config.head_dim**0.5
    if window is not None:
        distance = positions[-len(x) :, None] - positions
        scores = scores.masked_fill(distance >= window, float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return attended @ layer["self_attn.o_proj.weight"].T
