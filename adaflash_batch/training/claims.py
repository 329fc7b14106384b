"""Folders that belong to one training or one kind of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from adaflash_batch.drafter.config import build_target_layer_ids
from adaflash_batch.durable import write_whole
from adaflash_batch.errors import ConfigError

FACTS = "facts.json"


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What a store of trajectories goes on with, whoever fills it further.

    Attributes:
        layers: of the target, whose states it holds. A training may read fewer of them: tapping a
            layer changes neither text nor the other layers' states.
        concurrency: of decoding. It decides how many prompts a chunk has, and in bfloat16 the
            rounding of the texts; chunks of two sizes would leave prompts out or decode them twice.
    """

    layers: tuple[int, ...]
    concurrency: int


def settings_of(
    store: Path, facts: Mapping[str, object], asked: StoreSettings, num_layers: int
) -> StoreSettings:
    """The settings of a store that a training may use: its own where it was begun, else `asked`.

    The bound of its disk space is no fact of a store: a shared one drops nothing, so that nothing
    in it depends on the bound.

    Args:
        store: the folder, there or not.
        facts: what decides its texts and must be equal.
        asked: the layers that are read, and the concurrency for a new store.
        num_layers: of the target.

    Raises:
        ConfigError: it was begun with other facts, or lacks a layer; both sides are named.
    """
    if not (store / FACTS).exists():
        return asked
    found = _read(store / FACTS)
    tapped = found.pop("target_layers") or build_target_layer_ids(num_layers, found["features"])
    settings = StoreSettings(tuple(tapped), found.pop("concurrency"))
    for name in ("features", "disk_bytes"):
        found.pop(name, None)
    _compare(store, found, _as_json(facts))
    if not {*asked.layers} <= {*settings.layers}:
        raise ConfigError(
            f"{store} holds target layers {_listed(settings.layers)}, "
            f"wanted are {_listed(asked.layers)}",
            "name layers that it holds with --target-layers, or another folder",
        )
    return settings


def claim_store(store: Path, facts: Mapping[str, object], settings: StoreSettings) -> None:
    """Write what the texts of a new store follow from; the folder is there."""
    if not (store / FACTS).exists():
        own = {"target_layers": settings.layers, "concurrency": settings.concurrency}
        _write(store / FACTS, {**facts, **own})


def claim(path: Path, facts: Mapping[str, object]) -> None:
    """Write what a folder is made from, or compare. Raises ConfigError naming the differences."""
    if path.exists():
        _compare(path.parent, _read(path), _as_json(facts))
    else:
        _write(path, facts)


def is_made_from(found: object, facts: Mapping[str, object]) -> bool:
    """Whether facts read from a file are these."""
    return found == _as_json(facts)


def _compare(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    names = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    if names:
        raise ConfigError(
            f"{folder} was begun with other settings: {', '.join(names)}",
            "use those again, name another folder, or remove it to begin anew",
        )


def _read(path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(path.read_text("utf-8")))


def _write(path: Path, facts: Mapping[str, object]) -> None:
    write_whole(path, (json.dumps(facts, indent=2) + "\n").encode())


def _as_json(facts: Mapping[str, object]) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps(facts)))


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
