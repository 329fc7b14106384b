"""The command line: parse, call, print. torch comes in inside commands, so `--help` stays fast."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer

from adaflash_batch.cli_flags import job_parameters, read_spec
from adaflash_batch.errors import AdaflashError, LockedError
from adaflash_batch.review.check_command import add_check
from adaflash_batch.review.commands import add_commands
from adaflash_batch.spec import JobSpec
from adaflash_batch.training import commands as drafter_commands

EXIT_USAGE = 2
EXIT_INTERRUPTED = 75

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exits with a code of README, "Exit codes"; a bug ends in a traceback and 1."""
    try:
        code = app(arguments, standalone_mode=False, prog_name="adaflash-batch")
    except AdaflashError as error:
        _complain(error.message, error.hint)
        code = error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = "adaflash-batch" if context is None else context.command_path
        _complain(error.format_message().rstrip("."), f"see {command} --help")
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
    try:
        return _run_job(read_spec(config, overrides, flags))
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


run.__signature__ = inspect.Signature(list(job_parameters()))  # type: ignore[attr-defined]
# Typer would keep the docstring's line ends.
app.command(help=" ".join((run.__doc__ or "").split()))(run)
add_check(app)
app.add_typer(drafter_commands.app, name="drafter")
add_commands(app)
