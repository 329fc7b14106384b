"""The status of a job as tables, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaflash_batch.report.live import duration
from adaflash_batch.review.runs import Run, RunState
from adaflash_batch.review.status import Status

_COLOURS: dict[RunState, str] = {
    "running": "green",
    "finished": "blue",
    "interrupted": "yellow",
    "failed": "red",
    "died": "red",
}
_SHOWN = 8
_WIDTH_OF_FILES = 120


def show_status(status: Status) -> None:
    """Print it on stdout."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(_view(status))


def _view(status: Status) -> RenderableType:
    parts: list[RenderableType] = [_facts(status)]
    if status.runs:
        parts += [Text(), *_runs(status.runs)]
    parts += [Text(f"note: {note}") for note in status.notes[:_SHOWN]]
    if len(status.notes) > _SHOWN:
        parts.append(Text(f"note: … and {len(status.notes) - _SHOWN} more like these"))
    if status.fresh is not None:
        parts += [
            Text("\na new output is being made, to take this one's place:"),
            _view(status.fresh),
        ]
    return Group(*parts)


def _facts(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(status):
        table.add_row(name, Text(value))
    return table


def _lines(status: Status) -> Iterator[tuple[str, str]]:
    yield "job", status.directory + (f", begun {status.created}" if status.created else "")
    state = "complete" if status.is_complete else "not complete"
    rows = f"{status.rows_committed} of {_counted(status.rows, 'row')} committed"
    yield "rows", f"{rows}{_share(status)}: {state}"
    if status.rows_in_journals:
        yield "", f"{status.rows_in_journals} more finished, in journals"
    if status.rows_missing:
        yield "", f"{status.rows_missing} missing"
    yield "parts", f"{status.parts} of {status.parts_expected}"
    yield from _progress_lines(status)
    yield (
        "tokens",
        f"{status.completion_tokens} generated, in {_counted(status.output_rows, 'output row')}",
    )
    yield "errors", _errors(status)
    if status.drafter_version is not None:
        yield "drafter", f"version {status.drafter_version}"
    sizes = format_bytes(status.part_bytes), format_bytes(status.other_bytes)
    yield "disk", f"{sizes[0]} of parts, {sizes[1]} of the job's own files"


def _progress_lines(status: Status) -> Iterator[tuple[str, str]]:
    running = sum(run.state == "running" for run in status.runs)
    if running:
        speed = (
            "not known yet"
            if status.tokens_per_s is None
            else f"{status.tokens_per_s:.1f} tokens/s"
        )
        left = status.time_left_s
        yield "speed", speed + ("" if left is None else f", about {duration(left)} left")
    elif status.rows_committed < status.rows:
        yield "speed", "nothing is running: run the same command again to go on"
    if status.idle_slices and not status.is_complete:
        shown = ", ".join(map(str, status.idle_slices[:_SHOWN]))
        more = " …" if len(status.idle_slices) > _SHOWN else ""
        yield "slices", f"{len(status.idle_slices)} that no run is at work on: {shown}{more}"


def _share(status: Status) -> str:
    # Never 100% while a row is missing.
    return f" ({int(1000 * status.rows_committed / status.rows) / 10}%)" if status.rows else ""


def _errors(status: Status) -> str:
    if not status.errors:
        return "none"
    kinds = [f"{kind} {count}" for kind, count in list(status.error_kinds.items())[:_SHOWN]]
    rest = status.errors - sum(status.error_kinds.values())
    if rest > 0:
        kinds.append(f"{rest} in parts that were not looked into")
    return f"{status.errors}: {', '.join(kinds)}" if kinds else str(status.errors)


def _runs(runs: list[Run]) -> Iterator[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("run", "state", "process", "since", "last word", "rows", "tokens/s", "left"):
        table.add_column(title, no_wrap=title in ("run", "state", "since"), overflow="fold")
    for run in runs:
        table.add_row(*_cells(run))
    yield table
    yield from (Text(f"{run.name}: {run.message}") for run in runs if run.message)


def _cells(run: Run) -> Iterator[Text]:
    yield Text(run.name)
    yield Text(run.said if run.state == "running" else run.state, style=_COLOURS[run.state])
    yield Text(f"{run.pid} on {run.host}")
    yield Text(f"{(run.began or '?')[:16].replace('T', ' ')}")
    yield Text("?" if run.age_s is None else f"{duration(run.age_s)} ago")
    yield Text(f"{run.rows_done} of {run.rows}")
    yield Text("" if not run.tokens_per_s else f"{run.tokens_per_s:.1f}")
    yield Text("" if run.time_left_s is None else duration(run.time_left_s))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def format_bytes(number: float) -> str:
    """`1.5 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
