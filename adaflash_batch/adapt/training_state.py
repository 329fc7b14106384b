"""The state of a training in one file, replaced whole: a kill leaves the old one or the new."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaflash_batch.durable import put_in_place

_FILE = "state.safetensors"
_KEY = "adaflash"


@dataclass(slots=True)
class Cursor:
    """How far a training is. What comes next follows from it and from the seed alone.

    Attributes:
        round: of decoding and training; 0-based.
        step: updates done in the round.
        total_steps: updates done in all rounds.
        num_dropped: updates dropped since they were not finite.
        training_s: seconds spent on updates and evaluation, over all runs.
        decoding_s: seconds spent on decoding.
        history: (total_steps, mean loss since the last entry, held-out τ) at each evaluation.
    """

    round: int = 0
    step: int = 0
    total_steps: int = 0
    num_dropped: int = 0
    training_s: float = 0.0
    decoding_s: float = 0.0
    history: list[tuple[int, float, float]] = field(default_factory=list)


def save_state(folder: Path, tensors: Mapping[str, Tensor], cursor: Cursor) -> None:
    """Write and flush beside the old state, then rename over it."""
    scratch = folder / f".{_FILE}.partial"
    kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, scratch, metadata={_KEY: json.dumps(asdict(cursor))})
    put_in_place(scratch, folder / _FILE)


def load_state(folder: Path) -> tuple[dict[str, Tensor], Cursor] | None:
    """The state left by an earlier run, None if there is none."""
    path = folder / _FILE
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fields: dict[str, Any] = json.loads(file.metadata()[_KEY])
    return tensors, Cursor(**fields)
