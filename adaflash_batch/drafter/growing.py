"""A drafter grows parts: DFlash those of DFlash 2, any a length head."""

from __future__ import annotations

import dataclasses

import torch

from adaflash_batch.drafter.config import DrafterConfig
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
    grown = _enlarged(net, config)
    silence(grown, generator)
    return grown


def grow_length_head(net: DFlash, generator: torch.Generator, *, kind: str, width: int) -> DFlash:
    """A drafter with a length head that has learnt nothing yet, and drafts exactly the same.

    Args:
        net: has none; left as it is, the result has copies of its weights.
        generator: draws the head's first weights, on the CPU.
        kind, width: see DrafterConfig. Raises ConfigError where they do not fit.
    """
    assert net.length_head is None, "a drafter has one length head"
    config = dataclasses.replace(net.config, length_head=kind, length_head_width=width)
    grown = _enlarged(net, config)
    assert grown.length_head is not None, "no kind of head was named"
    grown.length_head.make_neutral(generator)
    return grown


def _enlarged(net: DFlash, config: DrafterConfig) -> DFlash:
    """A drafter of this shape with copies of the weights that the net has; the rest is not set."""
    with torch.device("meta"):
        grown = DFlash(config)
    grown = grown.to(net.fc.weight.dtype).to_empty(device=net.fc.weight.device)
    grown.load_state_dict(net.state_dict(), strict=False)
    return grown
