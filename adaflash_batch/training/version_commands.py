"""`adaflash-batch drafter list | show | rollback | export`: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Optional

import typer

from adaflash_batch.drafter.store import find_versions, is_store, stored_models
from adaflash_batch.errors import ConfigError

_Store = Annotated[Path, typer.Argument(metavar="STORE", help="Folder that --drafter-store names.")]
_Source = Annotated[
    Path, typer.Argument(metavar="DIR|STORE", help="Folder of a drafter, or a drafter store.")
]
_Model = Annotated[
    Optional[str],  # noqa: UP045 (Typer evaluates it)
    typer.Option(metavar="NAME", help="Which model's drafter, where the store has several."),
]
_Version = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(metavar="N", help="Version of a store; the current one unless given."),
]


def list_versions(store: _Store, model: _Model = None) -> None:
    """List the versions in a drafter store; the current one is marked with a star."""
    from adaflash_batch.training.view import describe_versions

    models = stored_models(store)
    if model is None and len(models) > 1:
        for each in models:
            print(f"{each.name} ({each.folder.name})")
            _print(describe_versions(each.folder))
    else:
        _print(describe_versions(find_versions(store, model)))


def show(source: _Source, version: _Version = None, model: _Model = None) -> None:
    """Print what a drafter is."""
    from adaflash_batch.training.view import describe

    _print(describe(_folder(source, version, model)))


def rollback(
    store: _Store,
    to: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="Version; the parent of the current one unless given."),
    ] = None,
    model: _Model = None,
) -> None:
    """Let another version draft, in jobs that begin from now on. No version is removed."""
    from adaflash_batch.drafter.versions import VersionStore

    versions = VersionStore(find_versions(store, model))
    if to is None:
        current = versions.current()
        to = None if current is None else versions.read(current).parent
        if to is None:
            raise ConfigError(
                f"{versions.folder}: version {current} has no parent"
                if current is not None
                else f"{versions.folder} has no version yet",
                "name a version with --to; drafter list shows them",
            )
    before = versions.roll_back(to)
    print(f"{'?' if before is None else before} -> {to}")


def export(
    source: _Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to be made.")],
    version: _Version = None,
    model: _Model = None,
) -> None:
    """Write a drafter for other engines, without the parts that only ours knows."""
    from adaflash_batch.training.export import export as write

    for line in write(_folder(source, version, model), out):
        print(line, file=sys.stderr, flush=True)


def _folder(source: Path, version: int | None, model: str | None) -> Path:
    """The folder of the drafter that is meant."""
    if not is_store(source):
        if version is not None or model is not None:
            raise ConfigError(
                f"{source} is no drafter store", "only a store has --version and --model"
            )
        return source
    from adaflash_batch.drafter.versions import VersionStore

    versions = VersionStore(find_versions(source, model))
    number = versions.current() if version is None else version
    if number is None:
        raise ConfigError(f"{versions.folder} has no version yet")
    return versions.path(number)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
