"""How many drafts of each request are verified, chosen on the device that has their survivals.

The PyTorch reference, and which form runs. See engine/widths.py for the rule.

# R requests, K drafts of a request at most
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LEAST_SECONDS = 1e-12


class Selected(NamedTuple):
    """A choice, and what it promises; on the device.

    widths: int32 [R], drafts to verify of each request.
    promised: float64 [2], tokens that the step is expected to emit, and seconds that it takes.
    """

    widths: torch.Tensor
    promised: torch.Tensor


def select_widths(
    chances: torch.Tensor,
    sizes: torch.Tensor,
    seconds: torch.Tensor,
    factors: torch.Tensor | None = None,
    *,
    are_hazards: bool = False,
) -> Selected:
    """The widths of most expected tokens a second, as engine.widths.choose_widths takes them.

    Args:
        chances: float32 [R, K], of each request how likely drafts 0..i are all right; one that is
            higher than that before it counts as that one, NaN as 0.
        sizes: int32 [R], drafts that there are of each request and that it has room for.
        seconds: float64 [R * K + 1], what the step takes with n drafts; never less for more.
        factors: float32 [K], of the survivals of each place, before they are made to fall.
        are_hazards: `chances` are logits of hazards; see drafter.length.survival_of.
    """
    if chances.device.type == "cpu":
        return select_widths_reference(chances, sizes, seconds, factors, are_hazards=are_hazards)
    from adaflash_batch.kernels import triton_widths

    return triton_widths.select_widths(chances, sizes, seconds, factors, are_hazards=are_hazards)


def select_widths_reference(
    chances: torch.Tensor,
    sizes: torch.Tensor,
    seconds: torch.Tensor,
    factors: torch.Tensor | None = None,
    *,
    are_hazards: bool = False,
) -> Selected:
    """`select_widths` in PyTorch, on any device."""
    num_requests, num_places = chances.shape
    survivals = torch.nn.functional.logsigmoid(-chances).cumsum(1).exp() if are_hazards else chances
    if factors is not None:
        survivals = survivals * factors
    falling = survivals.nan_to_num(nan=0.0).clamp(0.0, 1.0)
    falling = falling.cummin(1).values if num_places else falling
    is_there = torch.arange(num_places, device=chances.device) < sizes.unsqueeze(1)
    flat = falling.where(is_there, 0.0).T.flatten()
    values, order = flat.sort(descending=True, stable=True)
    values = values.double()
    emitted = num_requests + torch.cat((values.new_zeros(1), values.cumsum(0)))
    taken = seconds.clamp(min=LEAST_SECONDS)
    speed = (emitted / taken).where(torch.cat((values.new_ones(1), values)) > 0, -1.0)
    best = speed.argmax()
    is_taken = torch.arange(len(order), device=order.device) < best
    request = order % max(num_requests, 1)
    widths = torch.zeros_like(sizes, dtype=torch.int32)
    widths.index_add_(0, request, is_taken.to(torch.int32))
    return Selected(widths, torch.stack((emitted[best], taken[best])))
