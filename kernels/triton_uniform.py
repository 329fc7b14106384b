"""Keyed uniforms on the device, bit for bit those of the host."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keyed_uniform(
    seed: tl.tensor, identity: tl.tensor, sample: tl.tensor, position: tl.tensor
) -> tl.tensor:
    """A float64 in (0, 1) for each key, see engine.sampling.uniform.

    The four words are int64 tensors of one shape, of which the bits count.
    """
    state = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    state = _mix(state + 0x9E3779B97F4A7C15 + identity.to(tl.uint64, bitcast=True))
    state = _mix(state + 0x9E3779B97F4A7C15 + sample.to(tl.uint64, bitcast=True))
    state = _mix(state + 0x9E3779B97F4A7C15 + position.to(tl.uint64, bitcast=True))
    return ((state >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
