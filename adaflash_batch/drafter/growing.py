"""A DFlash drafter grows the parts of DFlash 2."""

from __future__ import annotations

import dataclasses

import torch

from adaflash_batch.drafter.model import DFlash, silence
from adaflash_batch.errors import ConfigError


def grow_dflash2(
    net: DFlash,
    generator: torch.Generator,
    *,
    conv_kernel_size: int = 2,
    conv_group_size: int = 16,
    selector_rank: int = 256,
    selector_top_k: int = 16,
) -> DFlash:
    """A DFlash 2 drafter that drafts exactly what a DFlash drafter does, ready to train on.

    Args:
        net: left as it is; the result has copies of its weights, in their dtype and place.
        generator: draws the selector's first weights, on the CPU.
        conv_kernel_size, conv_group_size, selector_rank, selector_top_k: see DrafterConfig.

    Raises:
        ConfigError: it is no DFlash drafter, or the sizes do not fit it.
    """
    if net.config.member != "DFlash":
        raise ConfigError(f"drafter: a {net.config.member} drafter cannot grow DFlash 2's parts")
    config = dataclasses.replace(
        net.config,
        conv_kernel_size=conv_kernel_size,
        conv_group_size=conv_group_size,
        selector_rank=selector_rank,
        selector_top_k=selector_top_k,
    )
    with torch.device("meta"):
        grown = DFlash(config)
    grown = grown.to(net.fc.weight.dtype).to_empty(device=net.fc.weight.device)
    grown.load_state_dict(net.state_dict(), strict=False)
    silence(grown, generator)
    return grown
