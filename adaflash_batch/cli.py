"""The command line: parse, call, print. torch comes in inside commands, so `--help` stays fast."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from adaflash_batch.errors import AdaflashError, ConfigError, LockedError
from adaflash_batch.spec import JobSpec, section_fields
from adaflash_batch.spec_sources import flag_name
from adaflash_batch.training import commands as drafter_commands

EXIT_USAGE = 2
EXIT_INTERRUPTED = 75

_METAVARS = {
    "input.columns": "FIELD=COLUMN",
    "output.directory": "DIR",
    "speculation.drafter": "DIR",
    "speculation.drafter_store": "DIR",
    "engine.kv_memory": "SIZE",
}

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exits with a code of README, "Exit codes"; a bug ends in a traceback and 1."""
    try:
        code = app(arguments, standalone_mode=False)
    except AdaflashError as error:
        _complain(error.message, error.hint)
        code = error.exit_code
    except typer.TyperException as error:
        _complain(error.format_message().rstrip("."), "see adaflash-batch run --help")
        code = EXIT_USAGE
    sys.exit(code)


def _complain(message: str, hint: str | None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"adaflash-batch {installed_version('adaflash-batch')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Offline batch inference: prompts in Parquet, completions in Parquet."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command(name="version")
def _version() -> None:
    """Print the version."""
    _print_version(True)


def run(config: Path | None, overrides: Sequence[str] | None, **flags: Any) -> int:
    """Complete the prompts of INPUTS and write them to Parquet.

    INPUTS are Parquet files, directories, globs or URIs. The same command again goes on where it
    stopped. The last line on stdout is a summary in JSON; everything else goes to stderr.
    """
    given = {name.replace("__", "."): value for name, value in flags.items()}
    try:
        given["input.columns"] = _read_columns(given["input.columns"] or ())
        return _run_job(JobSpec.from_sources(config, overrides or (), given))
    except KeyboardInterrupt as stop:
        _complain("interrupted", "run the same command again to go on")
        _say_last("interrupted", EXIT_INTERRUPTED, f"stopped by {str(stop) or 'SIGINT'}")
        return EXIT_INTERRUPTED
    except AdaflashError as error:
        is_locked = isinstance(error, LockedError)
        _say_last("locked" if is_locked else "failed", error.exit_code, error.message)
        raise
    except Exception as error:
        _say_last("failed", 1, f"{type(error).__name__}: {error}")
        raise


def _say_last(status: str, exit_code: int, message: str) -> None:
    """The last line of a run that has no summary."""
    line = {"status": status, "exit_code": exit_code, "message": message}
    print(json.dumps(line), flush=True)


def _run_job(spec: JobSpec) -> int:
    from adaflash_batch.job import run_job
    from adaflash_batch.report.live import open_reporter

    reporter = open_reporter(sys.stderr)
    try:
        summary = run_job(spec, reporter=reporter)
    finally:
        reporter.close()
    print(json.dumps(summary.as_dict()), flush=True)
    return summary.exit_code


def _read_columns(pairs: Sequence[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        field, equals, column = pair.partition("=")
        if not (equals and field and column):
            raise ConfigError(f"--column {pair} is not FIELD=COLUMN", "--column temperature=temp")
        columns[field] = column
    return columns


def _run_parameters() -> Iterator[inspect.Parameter]:
    """Parameters of `run`: the job file, `--set`, and a flag for every key that has one."""
    yield _parameter("config", Path, typer.Option("--config", help="Job file in TOML."))
    help_text = "Set a key of the job file; flags win over it. May be repeated."
    option = typer.Option("--set", metavar="SECTION.KEY=VALUE", help=help_text)
    yield _parameter("overrides", list[str], option)
    for section in JobSpec.model_fields:
        for name, field in section_fields(section).items():
            flag = flag_name(section, name)
            if flag is not None:
                yield _flag_parameter(section, name, flag, field)


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


run.__signature__ = inspect.Signature(list(_run_parameters()))  # type: ignore[attr-defined]
# Typer would keep the docstring's line ends.
app.command(help=" ".join((run.__doc__ or "").split()))(run)
app.add_typer(drafter_commands.app, name="drafter")
