"""DFlash 2's convolution over the slots of a block: few taps, coefficients made from the input.

It stands around a sublayer (attention or MLP) and lets neighbouring slots see each other cheaply:

    delta          = kernel_projection(x)                     x: the sublayer's normed input
    conv(z, side)  = sum over t of (base[side, t] + delta[side, t]) * (z, t slots earlier)
    sublayer'(x)   = conv(sublayer(conv(x, side 0)), side 1)

Both sides take their delta from x. Slots before the anchor are zeros, so no block sees another.

B blocks, N slots of a block, K taps, G groups of channels, H channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BlockConvolution"]


class BlockConvolution(nn.Module):
    """The weights of one convolution under their published names."""

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        num_coefficients = 2 * kernel_size * (hidden_size // group_size)
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, num_coefficients, bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], x: Tensor, block_size: int) -> Tensor:
        """[T, H]: the sublayer of x [T, H] between the two sides; T is whole blocks."""
        kernels = self._kernels(x.view(-1, block_size, x.shape[-1]))
        return _convolve(kernels[:, :, 1], sublayer(_convolve(kernels[:, :, 0], x)))

    @torch.no_grad()
    def make_identity(self) -> None:
        """Weights with which `around` changes nothing, exactly."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def _kernels(self, x: Tensor) -> Tensor:
        """Coefficients [B, N, 2, K, H] of blocks [B, N, H]."""
        num_blocks, block_size, hidden_size = x.shape
        _, taps, _ = self.base_kernel.shape
        delta: Tensor = self.kernel_projection(x)
        delta = delta.view(num_blocks, block_size, 2, taps, hidden_size // self.group_size, 1)
        base = self.base_kernel.view(2, taps, -1, self.group_size)
        return (base + delta).view(num_blocks, block_size, 2, taps, hidden_size)


def _convolve(kernels: Tensor, rows: Tensor) -> Tensor:
    """[T, H] of rows [T, H] with coefficients [B, N, K, H]."""
    num_blocks, block_size, taps, hidden_size = kernels.shape
    slots = rows.view(num_blocks, block_size, hidden_size)
    result = kernels[:, :, 0] * slots
    for tap in range(1, taps):
        earlier = F.pad(slots[:, :-tap], (0, 0, tap, 0))
        result = torch.addcmul(result, kernels[:, :, tap], earlier)
    return result.view_as(rows)
