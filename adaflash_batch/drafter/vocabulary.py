"""The tokens that a drafter chooses from, where they are not all: `draft_vocabulary.safetensors`.

The lm_head is most of a small drafter's work, and a few thousand tokens are most of what is
written. Drafts come from those alone, the target still chooses among all: no text changes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.errors import ConfigError

VOCABULARY = "draft_vocabulary.safetensors"
"""Beside the weights: `token_ids`, int64 [V], ascending."""

_TENSOR = "token_ids"


def load_vocabulary(folder: str | Path, config: DrafterConfig) -> Tensor | None:
    """The draft vocabulary in a drafter's folder, int64 [V], ascending; None without one.

    Raises ConfigError for a file that is not whole or does not fit the drafter of `config`.
    """
    path = Path(folder) / VOCABULARY
    if not path.exists():
        return None
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        problem = f"is not a whole safetensors file: {error}"
    else:
        found = _problem(tensors, config)
        if found is None:
            return tensors[_TENSOR]
        problem = found
    raise ConfigError(
        f"drafter {folder}: {VOCABULARY} {problem}",
        "Without that file the drafter chooses from all tokens",
    )


def _problem(tensors: dict[str, Tensor], config: DrafterConfig) -> str | None:
    """What is wrong, None if nothing is."""
    if tensors.keys() != {_TENSOR}:
        return f"must hold {_TENSOR} alone, it holds {', '.join(sorted(tensors)) or 'nothing'}"
    ids = tensors[_TENSOR]
    if ids.dtype != torch.int64 or ids.dim() != 1:
        kind = str(ids.dtype).removeprefix("torch.")
        return f"must hold {_TENSOR} as int64 in one row, they are {kind} {list(ids.shape)}"
    if not len(ids):
        return "names no token"
    if not (ids[1:] > ids[:-1]).all():
        place = int((ids[1:] <= ids[:-1]).int().argmax())
        return f"is not in ascending order: {ids[place + 1]} comes after {ids[place]}"
    if ids[0] < 0 or ids[-1] >= config.vocab_size:
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        return f"names token {wrong}, outside the target's vocabulary of {config.vocab_size}"
    if len(ids) < config.selector_top_k:
        return f"has {len(ids)} tokens, the selector chooses among {config.selector_top_k}"
    return None
