"""`adaflash-batch status | verify | merge`: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from adaflash_batch.review.audit_report import Audit
    from adaflash_batch.review.job_output import JobOutput

_Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="Output directory of a job: a path or a URI.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def add_commands(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (status, verify, merge):
        # Typer would keep the docstring's line ends.
        app.command(help=" ".join((command.__doc__ or "").split()))(command)


def status(directory: _Directory, as_json: _Json = False) -> int:
    """Show what of a job is done, running and missing, its speed and its errors.

    Exit code: 0 if all rows are committed, 75 while some are missing.
    """
    from adaflash_batch.review.job_output import JobOutput
    from adaflash_batch.review.status import read_status

    found = read_status(JobOutput.open(directory))
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        from adaflash_batch.review.status_view import show_status

        show_status(found)
    return found.exit_code


def verify(
    directory: _Directory,
    no_inputs: Annotated[
        bool, typer.Option("--no-inputs", help="Leave the input files alone: they may be gone.")
    ] = False,
    audit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Decode N rows again, without speculation.")
    ] = 0,
    audit_seed: Annotated[int, typer.Option(metavar="SEED", help="Chooses them.")] = 0,
    model: Annotated[
        Optional[str],  # noqa: UP045 (Typer evaluates it)
        typer.Option(help="Where the model is now, if not where the job had it."),
    ] = None,
    as_json: _Json = False,
) -> int:
    """Check that a job's output holds every input row once, sound and unchanged.

    Exit code: 0 if it is sound and complete, 75 if it is sound and rows are missing, 1 if not.
    """
    from adaflash_batch.review.job_output import JobOutput
    from adaflash_batch.review.verify import verify as read_all
    from adaflash_batch.review.verify_view import audit_lines, verification_lines

    job = JobOutput.open(directory)
    with _progress("parts") as notify:
        found = read_all(job, compare_inputs=not no_inputs, notify=notify)
    audited = _audit(job, audit, audit_seed, model) if audit else None
    if as_json:
        said = found.as_dict() | {"audit": None if audited is None else audited.as_dict()}
        print(json.dumps(said))
    else:
        print(*verification_lines(found), *audit_lines(audited), sep="\n")
    is_other = audited is not None and bool(audited.differences)
    return 1 if is_other else found.exit_code


def _audit(job: JobOutput, count: int, seed: int, model: str | None) -> Audit:
    from adaflash_batch.review.audit import audit

    with _progress("rows decoded again") as notify:
        return audit(job, count, seed, model=model, notify=notify, note=_note)


def merge(
    directory: _Directory,
    out: Annotated[str, typer.Option(metavar="FILE", help="Parquet file to write: path or URI.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Merge what is there though rows are missing.")
    ] = False,
    as_json: _Json = False,
) -> int:
    """Write all parts of a job into one Parquet file, in order of the input.

    Exit code: 0 if it is written, 75 if rows are missing and --partial is not given.
    """
    from adaflash_batch.review.job_output import JobOutput
    from adaflash_batch.review.merge import merge as write

    job = JobOutput.open(directory)
    with _progress("parts") as notify:
        merged = write(job, out, force=force, partial=partial, notify=notify)
    for line in merged.notes:
        _note(line)
    if as_json:
        print(json.dumps(merged.as_dict()))
    else:
        print(f"{merged.rows} rows of {merged.parts} parts in {merged.file}")
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
