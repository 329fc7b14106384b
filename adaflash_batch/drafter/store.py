"""Drafters of many models in one folder: versions for each, found by what the model is.

    STORE/smollm2-135m-instruct-1f0c62d9a4b7/model.json, current, v000000/, ...

The digits are of the model's weights and tokenizer, so a model that is called by another name
finds its drafter, and one that was trained further does not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaflash_batch.durable import locked, write_whole
from adaflash_batch.errors import ConfigError

MODEL = "model.json"
CURRENT = "current"
# Versions of a model that stay: the newest, and as many ancestors of the current one.
KEEP = 8

_DIGITS = 12
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._]+")
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that a store has a folder for.

    Attributes:
        folder: of its versions.
        name: what the model was called when the folder was made.
    """

    folder: Path
    name: str


def stored_models(store: str | Path) -> list[StoredModel]:
    """The models of a store by the names of their folders; none where the store is not there."""
    return [
        StoredModel(path.parent, str(_read(path).get("name")))
        for path in sorted(Path(store).glob(f"*/{MODEL}"))
    ]


def versions_of(
    store: str | Path, name: str, identity: Mapping[str, str], tokenizer_digest: str | None
) -> Path:
    """The folder of a model's versions, made if the store has none for it.

    Args:
        store: the folder for all models, there or not.
        name: what the user calls the model.
        identity: `model_files.model_identity`; its `weights` count.
        tokenizer_digest: `model_files.tokenizer_digest`.
    """
    store = Path(store)
    facts, digits = _facts(identity, tokenizer_digest)
    found = _folder_with(store, digits, facts)
    if found is not None:
        return found
    with locked(store, wait_s=_WAIT_S):
        found = _folder_with(store, digits, facts)
        if found is None:
            found = store / f"{_readable(name)}-{digits}"
            found.mkdir(exist_ok=True)
            said = json.dumps({"name": name, **facts}, indent=2) + "\n"
            write_whole(found / MODEL, said.encode())
        return found


def known_versions_of(
    store: str | Path, identity: Mapping[str, str], tokenizer_digest: str | None
) -> Path | None:
    """The same folder where it is there; None where it would have to be made."""
    facts, digits = _facts(identity, tokenizer_digest)
    return _folder_with(Path(store), digits, facts)


def is_store(path: str | Path) -> bool:
    """Whether a folder holds versions of drafters, of one model or of several."""
    path = Path(path)
    is_of_one = (path / MODEL).exists() or (path / CURRENT).exists()
    return is_of_one or bool(stored_models(path))


def find_versions(store: str | Path, model: str | None = None) -> Path:
    """The folder of versions that a person means.

    Args:
        store: a folder of versions, or one for all models.
        model: its name, or the name of its folder; not needed where there is one model.

    Raises:
        ConfigError: there is none, or several.
    """
    store = Path(store)
    if not is_store(store):
        raise ConfigError(
            f"{store} is no drafter store", "name the folder that --drafter-store of run names"
        )
    if (store / MODEL).exists() or (store / CURRENT).exists():
        return store
    models = stored_models(store)
    fitting = [m for m in models if model in (None, m.name, m.folder.name)]
    if len(fitting) == 1:
        return fitting[0].folder
    known = ", ".join(f"{m.name} ({m.folder.name})" for m in models)
    if model is not None:
        raise ConfigError(f"{store} has {len(fitting)} models called {model}", f"it has {known}")
    raise ConfigError(f"{store} has {len(models)} models", f"say which with --model: {known}")


def _facts(
    identity: Mapping[str, str], tokenizer_digest: str | None
) -> tuple[dict[str, str | None], str]:
    """What a model is known by in a store, and the digits of it in the name of its folder."""
    facts = {"weights": identity["weights"], "tokenizer_sha256": tokenizer_digest}
    return facts, hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_DIGITS]


def _folder_with(store: Path, digits: str, facts: Mapping[str, object]) -> Path | None:
    for path in sorted(store.glob(f"*-{digits}/{MODEL}")):
        if facts.items() <= _read(path).items():
            return path.parent
    return None


def _readable(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2]
    return _NOT_IN_NAMES.sub("-", last).strip("-.").lower() or "model"


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"{path} is damaged: no JSON object")
    return facts
