"""A linear layer whose every row is summed up alike, however many rows there are, in Triton.

Libraries choose how to cut a product up by its size, so a row may be rounded otherwise beside other
rows. Here tiles depend on the layer alone, and a tile is summed along the inputs in one order.

# R rows, I inputs, O outputs
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from adaflash_batch.kernels.variant import LAUNCH, Variant

__all__ = ["VARIANTS", "linear", "linear_reference"]

_ROWS, _INPUTS = 64, 64
_FEW_OUTPUTS = 8192
"""A layer with fewer gets narrower tiles, or most of a GPU would be idle."""


@triton.jit
def linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_row: tl.tensor,
    weight_row: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDENS: tl.constexpr,
) -> None:
    """A tile of what comes out. WIDENS is for Triton's interpreter, which cannot multiply bf16."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row
    weight_at = weight_ptr + output.to(tl.int64)[None, :] * weight_row
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for begin in range(0, num_inputs, INPUTS):
        at = begin + tl.arange(0, INPUTS)
        is_input = at < num_inputs
        x = tl.load(x_at + at[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        there = is_input[:, None] & is_output[None, :]
        weight = tl.load(weight_at + at[:, None], mask=there, other=0.0)
        if WIDENS:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + output, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias, sums in float32.

    Args:
        x: [.., I], the last dimension contiguous.
        weight: [O, I], likewise.
        bias: [O].

    Returns:
        [.., O].
    """
    num_outputs, num_inputs = weight.shape
    rows = x.reshape(-1, num_inputs)
    assert rows.stride(1) == weight.stride(1) == 1
    out = x.new_empty(len(rows), num_outputs)
    tile = _outputs_of(num_outputs)
    grid = (triton.cdiv(num_outputs, tile), triton.cdiv(len(rows), _ROWS))
    linear_kernel[grid](
        *(rows, weight, weight if bias is None else bias, out),
        *(len(rows), num_outputs, num_inputs, rows.stride(0), weight.stride(0)),
        **_constants(tile, has_bias=bias is not None),
        WIDENS=x.dtype == torch.bfloat16 and x.device.type == "cpu",
        num_warps=_num_warps(tile),
        num_stages=4,
        **LAUNCH,
    )
    return out.view(*x.shape[:-1], num_outputs)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear` in PyTorch; how rows are summed up is the library's choice."""
    return torch.nn.functional.linear(x, weight, bias)


def _outputs_of(num_outputs: int) -> int:
    return 32 if num_outputs < _FEW_OUTPUTS else 64


def _num_warps(tile: int) -> int:
    return 4 if tile == 32 else 8


def _constants(tile: int, *, has_bias: bool) -> dict[str, Any]:
    return {"ROWS": _ROWS, "OUTPUTS": tile, "INPUTS": _INPUTS, "HAS_BIAS": has_bias}


def _variant(num_outputs: int) -> Variant:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16")
    numbers = ("num_rows", "num_outputs", "num_inputs", "x_row", "weight_row")
    tile, name = _outputs_of(num_outputs), f"linear bf16 to {num_outputs}"
    values = _constants(tile, has_bias=False) | {"WIDENS": False}
    types = pointers | dict.fromkeys(numbers, "i32")
    return Variant(name, linear_kernel, types, values, _num_warps(tile), num_stages=4)


VARIANTS = [_variant(4096), _variant(24576)]
