"""A check's report for eyes: a few short tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adaflash_batch.report.live import duration
from adaflash_batch.report.show import shorten
from adaflash_batch.review.check_report import CheckReport
from adaflash_batch.review.findings import Finding, Place

_BAR_WIDTH = 30
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SAMPLE_CHARACTERS = 160
_MOST_DAMAGE = 5
_OUTCOMES = {
    "ok": ("green", "all rows can be served"),
    "row_errors": ("yellow", "some rows will carry errors"),
    "error_limit": ("red", "more rows will carry errors than --max-errors allows"),
    "unreadable": ("red", "some rows cannot be read: a run would end there"),
    "refused": ("red", "a run would not begin"),
}

Row = tuple[str, str | Text]


def print_report(report: CheckReport, console: Console) -> None:
    """Print all of it."""
    for title, rows in _sections(report):
        if rows:
            _say(title, "bold", console)
            _print_rows(rows, console)
    for kind, finding in _findings(report):
        _say(f"{kind}: {_rows(finding.rows)}", "bold", console)
        _print_rows(_places(finding.first, finding.rows), console)
    for line in report.warnings:
        _say(f"warning: {line}", "yellow", console)
    for line in report.refusals:
        _say(f"refused: {line}", "red", console)
    style, words = _OUTCOMES[report.status]
    _say(f"{words} (exit code {report.exit_code})", f"bold {style}", console)


def _say(line: str, style: str, console: Console) -> None:
    console.print(Text(line, style=style), soft_wrap=True)


def _sections(report: CheckReport) -> Iterator[tuple[str, list[Row]]]:
    yield "input", list(_input(report))
    yield "prompts", list(_prompts(report))
    yield "tokens of a prompt", list(_histogram(report))
    yield "what the job takes", list(_needs(report))
    yield "output", list(_output(report))


def _input(report: CheckReport) -> Iterator[Row]:
    files = "1 file" if report.num_files == 1 else f"{report.num_files:,} files"
    yield "rows", f"{report.num_rows:,} in {files}"
    yield "prompts from", f"column {report.content.name!r} ({report.content.kind})"
    yield "with errors", f"{report.errors.rows:,}"
    for damage in report.damage[:_MOST_DAMAGE]:
        column = f", column {damage.column!r}" if damage.column is not None else ""
        rows = f"rows {damage.first_row} to {damage.end_row - 1}"
        yield "unreadable", Text(f"{damage.file} {rows}{column}: {damage.message}", style="red")
    if len(report.damage) > _MOST_DAMAGE:
        yield "unreadable", f"and {len(report.damage) - _MOST_DAMAGE} more places"
    if report.num_unread:
        yield "not looked at", f"{_rows(report.num_unread)}, for they share chunks with damage"


def _prompts(report: CheckReport) -> Iterator[Row]:
    yield "model", f"{report.model.name} ({report.model.dtype})"
    yield "context", f"{report.model.context:,} tokens for prompt and completion"
    yield "chat template", "used" if report.uses_template else "not used"
    if report.sample is not None:
        yield "first prompt", shorten(report.sample, _SAMPLE_CHARACTERS)
    if report.num_repeated_prompts:
        yield "repeated", f"{_rows(report.num_repeated_prompts)} with the prompt of an earlier one"
    if report.special.rows:
        policy = "stays text" if report.special_policy == "text" else "becomes tokens"
        where = _where(report.special.first[0])
        yield "special tokens", f"spelt in {_rows(report.special.rows)}, first {where}; {policy}"
    if report.truncated.rows:
        where = _where(report.truncated.first[0])
        tokens = f"{report.truncated_tokens:,} tokens"
        yield "truncated", f"{_rows(report.truncated.rows)}, first {where}; {tokens} are cut"


def _histogram(report: CheckReport) -> Iterator[Row]:
    prompts = report.work.prompts
    if not prompts.count:
        return
    figures = prompts.to_json()
    yield "", ", ".join(f"{name} {value:,}" for name, value in figures.items())
    bars = prompts.bars()
    most = max(bar.count for bar in bars)
    for bar in bars:
        yield f"{bar.first:,} to {bar.last:,}", f"{_drawn(bar.count / most)} {bar.count:,}"


def _needs(report: CheckReport) -> Iterator[Row]:
    left, kv, disk = report.left, report.kv, report.disk
    yield "requests", f"{left.requests:,}, {left.prompt_tokens:,} tokens of prompts"
    yield "completions", f"{left.completion_tokens:,} tokens at the most"
    by = "--kv-memory" if kv.is_given else "about what a run would take of what is free"
    yield "KV memory", f"{_bytes(kv.available)} ({by}), {_bytes(kv.bytes_per_token)} a token"
    if report.work.requests:
        for name, share in (("half of", 0.5), ("99% of", 0.99), ("all", 1.0)):
            at = report.kv_at(share)
            once = f"{at['requests_at_once']:,} of {kv.concurrency:,} at once"
            size = f"{at['tokens']:,} tokens, {_bytes(at['bytes'])} for {kv.concurrency:,}"
            yield f"  {name} requests", f"up to {size}: {once}"
    yield "time", _time(report)
    room = "" if disk.free is None else f", {_bytes(disk.free)} are free"
    yield "disk", f"about {_bytes(disk.at_most)}{'' if disk.is_measured else ' at the most'}{room}"


def _time(report: CheckReport) -> str:
    time, left = report.time, report.left
    if time.at_most_s is None:
        return f"unknown: {time.reason}"
    if not left.requests:
        return "none, nothing is left to do"
    words = f"{duration(time.at_most_s)} if every completion takes all its max_new_tokens"
    if time.likely_s is not None and time.mean_tokens is not None:
        mean = f"{time.mean_tokens:.0f} tokens each as in the rows that are done"
        words = f"{duration(time.likely_s)} with {mean}; {words}"
    return f"{words}; without drafts, on this machine as busy as it was, loading not counted"


def _output(report: CheckReport) -> Iterator[Row]:
    previous = report.previous
    if not previous.exists:
        yield "directory", f"{previous.directory}, not there yet"
        return
    yield "directory", previous.directory
    done = previous.totals.num_rows
    yield "done before", f"{_rows(done)} in {len(previous.done):,} parts"
    for line in previous.differences:
        yield "differs", Text(line, style="red")


def _findings(report: CheckReport) -> Iterator[tuple[str, Finding]]:
    yield from report.errors.kinds.items()
    if report.ids is not None:
        yield from report.ids.found.kinds.items()


def _places(first: list[Place], count: int) -> list[Row]:
    rows: list[Row] = [(_where(place), place.message) for place in first]
    if count > len(first):
        rows.append(("", f"and {count - len(first):,} more; --rows FILE lists all"))
    return rows


def _print_rows(rows: list[Row], console: Console) -> None:
    if not console.is_terminal:  # a line each, so that other programs find what they look for
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            console.print(f"  {label:<{width}}  {value}", markup=False, soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(f"  {label}"), value if isinstance(value, Text) else Text(value))
    console.print(grid)


def _where(place: Place) -> str:
    return f"{place.file} row {place.row}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _drawn(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()) or "▏"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
