"""`adaflash-batch check`: parse, call, print. pyarrow and all that is heavy come in late."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaflash_batch.cli_flags import job_parameters, read_spec
from adaflash_batch.errors import AdaflashError, ConfigError
from adaflash_batch.spec import JobSpec

if TYPE_CHECKING:
    from adaflash_batch.review.check_report import CheckReport
    from adaflash_batch.review.rows_file import RowWriter

EXIT_INTERRUPTED = 75
_STDOUT = Path("-")


def check(
    config: Path | None,
    overrides: Sequence[str] | None,
    as_json: bool,
    rows: Path | None,
    **flags: Any,
) -> int:
    """Look at all rows of a job before it runs: which will fail and why, and what it will take.

    It takes the flags and the job file of `run`, loads the tokenizer and no weights, and writes
    nothing where the output goes. Exit codes: 0 all rows can be served, 2 a run would not begin,
    3 some rows will carry errors, 4 more than --max-errors allows, 5 an input cannot be read.
    """
    try:
        spec = read_spec(config, overrides, flags)
        _check_rows_file(spec, rows, as_json)
        return _show(_look(spec, rows), as_json=as_json, is_aside=rows == _STDOUT)
    except AdaflashError as error:
        if as_json:
            told = {"status": "failed", "exit_code": error.exit_code, "message": error.message}
            print(json.dumps(told), flush=True)
        raise
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check_rows_file(spec: JobSpec, rows: Path | None, as_json: bool) -> None:
    if rows is None:
        return
    if rows == _STDOUT:
        if as_json:
            raise ConfigError("--json and --rows - both write to stdout", "name a file with --rows")
        return
    if rows.suffix != ".parquet":
        raise ConfigError(f"--rows {rows} is no *.parquet", "name one, or - for JSON on stdout")
    from adaflash_batch.review.rows_file import in_the_way

    reason = in_the_way(rows.expanduser(), spec.input.paths, spec.output.directory)
    if reason is not None:
        raise ConfigError(f"--rows {rows} is {reason}", "name a file somewhere else")


def _look(spec: JobSpec, rows: Path | None) -> CheckReport:
    from adaflash_batch.review.check import run_check
    from adaflash_batch.review.listener import Listener

    writer = _open_rows(rows)
    try:
        with Listener(sys.stderr) as listener:
            report = run_check(spec, audience=listener, flag=writer.add)
        writer.close()
    finally:
        writer.abandon()
    return report


def _open_rows(rows: Path | None) -> RowWriter:
    from adaflash_batch.review.rows_file import JsonRows, NoRows, ParquetRows

    if rows is None:
        return NoRows()
    return JsonRows(sys.stdout) if rows == _STDOUT else ParquetRows(rows.expanduser())


def _show(report: CheckReport, *, as_json: bool, is_aside: bool) -> int:
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False), flush=True)
        return report.exit_code
    from rich.console import Console

    from adaflash_batch.review.check_view import print_report

    stream = sys.stderr if is_aside else sys.stdout
    print_report(report, Console(file=stream, highlight=False))
    return report.exit_code


def _parameters() -> list[inspect.Parameter]:
    as_json = typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
    rows_help = (
        "Write all rows that are not all right to a Parquet file; - is JSON lines on stdout."
    )
    rows = typer.Option("--rows", metavar="FILE", help=rows_help)
    own = [
        inspect.Parameter(
            "as_json",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, as_json],
        ),
        inspect.Parameter(
            "rows",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Optional[Path], rows],  # noqa: UP045 (evaluated by Typer)
        ),
    ]
    return [*own, *job_parameters()]


def add_check(app: typer.Typer) -> None:
    """Register the command."""
    check.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
    app.command(help=" ".join((check.__doc__ or "").split()))(check)
