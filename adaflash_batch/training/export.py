"""A drafter for other engines: the published layout, without the parts that are our own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.vocabulary import VOCABULARY
from adaflash_batch.errors import ConfigError

# By these a drafter is still refused for another target.
_KEPT = ("tokenizer_sha256", "target")


def export(folder: Path, out: Path) -> Iterator[str]:
    """Write the drafter in a folder to another one, in bfloat16; yields what to tell people.

    Raises ConfigError where `checkpoint.load` and `checkpoint.save` do, and for a drafter that
    does not say how many layers its target has, which a published layout must.
    """
    view = checkpoint.inspect(folder)
    config = view.config
    if not view.names_target_layers:
        raise ConfigError(
            f"drafter {folder}: its config.json does not say how many layers the target has",
            "it is in a published layout already, and other engines load it as it is",
        )
    sizes = config.vocab_size, config.hidden_size, config.num_target_layers
    net = checkpoint.load(folder, TargetFacts(*sizes, name="its own"), dtype=torch.bfloat16)
    if config.has_input_projection:
        yield "left out: the input projection, so fewer drafts will be accepted"
    if config.length_head:
        yield "left out: the length head, which other engines do not know"
    net = _published(net)
    if (folder / VOCABULARY).exists():
        yield "left out: the draft vocabulary, so other engines draft from all tokens"
    own = {name: view.own[name] for name in _KEPT if name in view.own}
    checkpoint.save(net, out, {"adaflash": own} if own else None)
    yield f"a {config.member} drafter in the published layout is in {out}"


def _published(net: DFlash) -> DFlash:
    """The net without the parts that no published layout has."""
    config = dataclasses.replace(
        net.config, has_input_projection=False, length_head="", length_head_width=0
    )
    with torch.device("meta"):
        plain = DFlash(config)
    kept = plain.state_dict().keys()
    plain.load_state_dict({n: t for n, t in net.state_dict().items() if n in kept}, assign=True)
    return plain
