"""The flags that commands about a job share: one for every key of JobSpec, the job file, --set."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from adaflash_batch.errors import ConfigError
from adaflash_batch.spec import JobSpec, section_fields
from adaflash_batch.spec_sources import flag_name

_METAVARS = {
    "input.columns": "FIELD=COLUMN",
    "output.directory": "DIR",
    "speculation.drafter": "DIR",
    "speculation.drafter_store": "DIR",
    "engine.kv_memory": "SIZE",
}


def read_spec(
    config: Path | None, overrides: Sequence[str] | None, flags: Mapping[str, Any]
) -> JobSpec:
    """The job that a command line describes; `flags` by the names of `job_parameters`.

    Raises:
        ConfigError: naming the key, where it was given, and what would be right.
    """
    given = {name.replace("__", "."): value for name, value in flags.items()}
    given["input.columns"] = _read_columns(given["input.columns"] or ())
    return JobSpec.from_sources(config, overrides or (), given)


def job_parameters() -> Iterator[inspect.Parameter]:
    """Parameters of a command: the job file, `--set`, and a flag for every key that has one."""
    yield _parameter("config", Path, typer.Option("--config", help="Job file in TOML."))
    help_text = "Set a key of the job file; flags win over it. May be repeated."
    option = typer.Option("--set", metavar="SECTION.KEY=VALUE", help=help_text)
    yield _parameter("overrides", list[str], option)
    for section in JobSpec.model_fields:
        for name, field in section_fields(section).items():
            flag = flag_name(section, name)
            if flag is not None:
                yield _flag_parameter(section, name, flag, field)


def _read_columns(pairs: Sequence[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        field, equals, column = pair.partition("=")
        if not (equals and field and column):
            raise ConfigError(f"--column {pair} is not FIELD=COLUMN", "--column temperature=temp")
        columns[field] = column
    return columns


def _flag_parameter(section: str, name: str, flag: str, field: FieldInfo) -> inspect.Parameter:
    kind, choices, is_repeated = _flag_type(field.annotation)
    annotation = list[kind] if is_repeated else kind  # type: ignore[valid-type]
    key = f"{section}__{name}"
    if not flag.startswith("--"):
        return _parameter(key, annotation, typer.Argument(metavar=flag, help=field.description))
    has_default = field.default and not field.is_required()
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=f"{field.description}"
        + (f" Default: {field.default}." if has_default else "")
        + (" May be repeated." if is_repeated else ""),
        metavar=_METAVARS.get(f"{section}.{name}", choices),
        rich_help_panel=section.capitalize(),
    )
    return _parameter(key, annotation, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    # None means "not given": what a flag defaults to is known to JobSpec alone.
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], option],  # noqa: UP045 (kind is a variable)
    )


def _flag_type(annotation: Any) -> tuple[type, str | None, bool]:
    """Type of one value, its choices if they are few, and whether the flag may be repeated."""
    origin = get_origin(annotation)
    inner = [argument for argument in get_args(annotation) if argument is not NoneType]
    if origin is None:
        return annotation, None, False
    if origin is Literal:
        return str, "|".join(inner), False
    kind, choices, is_repeated = _flag_type(inner[0])
    return kind, choices, is_repeated or origin in (tuple, dict)
