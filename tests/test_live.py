"""Progress: when lines come, and what they estimate."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from adaflash_batch.report.live import (
    LiveReporter,
    Pace,
    PlainReporter,
    Progress,
    describe,
    duration,
    expected_output_tokens,
    open_reporter,
)
from adaflash_batch.stats import SpeculationCounts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(
    elapsed_s: float = 10.0,
    rows_done: int = 0,
    output_tokens: int = 0,
    *,
    rows_total: int = 100,
    running: int = 8,
    errors: int = 0,
    counts: SpeculationCounts | None = None,
    resumed_rows: int = 0,
    most_output_tokens: int | None = 10_000,
) -> Progress:
    return Progress(
        rows_done=rows_done,
        rows_total=rows_total,
        output_tokens=output_tokens,
        prompt_tokens=0,
        errors=errors,
        running=running,
        waiting=0,
        counts=counts or SpeculationCounts(),
        elapsed_s=elapsed_s,
        resumed_rows=resumed_rows,
        most_output_tokens=most_output_tokens,
    )


def steps(*accepted: int) -> SpeculationCounts:
    counts = SpeculationCounts()
    for number in accepted:
        counts.record(drafted=7, verified=4, accepted=number)
    return counts


def test_plain_lines_come_at_the_start_after_two_seconds_and_every_ten() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.start(["3 files"])
    seen = []
    for second in range(25):
        reporter.update(progress(float(second), second, 10 * second))
        seen.append(stream.getvalue().count("\n"))
    assert [second for second in range(1, 25) if seen[second] > seen[second - 1]] == [2, 12, 22]
    assert stream.getvalue().startswith("3 files\nrows 2/100 (2%)")


def test_the_end_tells_rows_time_tokens_and_what_was_resumed() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.finish(
        progress(50.0, 100, 2000, errors=2, counts=steps(3, 0), resumed_rows=40), ["done"]
    )
    assert stream.getvalue() == (
        "100 rows in 50s · 2 with errors · 40 of them from before · 2000 tokens, 40 tok/s"
        " · τ 2.50 (accepted 38%)\ndone\n"
    )


def test_acceptance_is_shown_only_when_drafts_were_verified() -> None:
    plain_decoding = SpeculationCounts()
    plain_decoding.record(drafted=0, verified=0, accepted=0)
    assert "τ" not in describe(progress(counts=plain_decoding), Pace())
    assert "τ 3.00 (accepted 50%)" in describe(progress(counts=steps(2, 2)), Pace())
    mixed = steps(2)
    for _ in range(3):
        mixed.record(drafted=0, verified=0, accepted=0)
    said = describe(progress(counts=mixed), Pace())
    assert "τ 3.00 (accepted 50%, drafting in 25% of the steps)" in said


def test_the_rate_is_that_of_the_last_seconds() -> None:
    pace = Pace(window_s=10.0)
    for second in range(1, 101):
        tokens = 100 * min(second, 50) + 10 * max(second - 50, 0)
        latest = progress(float(second), 0, tokens)
        pace.see(latest)
    assert pace.tokens_per_s == pytest.approx(10.0)
    assert latest.tokens_per_s == pytest.approx(55.0)


def test_before_a_row_is_finished_the_longest_text_is_expected() -> None:
    latest = progress(2.0, 0, 1000, most_output_tokens=10_000)
    pace = Pace()
    pace.see(latest)
    assert pace.remaining_s(latest) == pytest.approx(9000 / 500)


def test_when_rows_are_finished_their_length_is_expected() -> None:
    # 50 rows of 20 tokens, and 50 to come.
    assert expected_output_tokens(progress(1.0, 50, 1000, running=0)) == pytest.approx(2000)
    resumed = progress(1.0, 50, 400, running=0, resumed_rows=30)
    assert expected_output_tokens(resumed) == pytest.approx(400 / 20 * 70)


def test_nothing_is_promised_before_anything_is_known() -> None:
    assert "ETA unknown yet" in describe(progress(0.0), Pace())
    assert "ETA unknown yet" in describe(progress(1.0, most_output_tokens=None), Pace())


@given(
    done=st.integers(0, 50),
    running=st.integers(0, 50),
    length=st.integers(0, 100),
    elapsed_s=st.floats(0, 1e6),
)
def test_the_estimate_stays_within_what_is_possible(
    done: int, running: int, length: int, elapsed_s: float
) -> None:
    tokens = length * (done + running)
    latest = progress(elapsed_s, done, tokens, running=running)
    pace = Pace()
    pace.see(latest)
    left = pace.remaining_s(latest)
    assert left is None or left >= 0
    expected = expected_output_tokens(latest)
    assert expected is None or 0 <= expected <= 10_000 + 1e-6
    assert describe(latest, pace)


def test_an_empty_or_finished_job_is_described() -> None:
    assert "rows 0/0 (100%)" in describe(progress(0.0, rows_total=0, running=0), Pace())
    assert "rows 9/9 (100%)" in describe(progress(0.0, 9, rows_total=9, resumed_rows=9), Pace())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (200, "3m 20s"),
        (7500, "2h 05m"),
        (86400 * 3 + 4 * 3600, "3d 04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_live_form_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_reporter(Terminal()), LiveReporter)
    assert isinstance(open_reporter(io.StringIO()), PlainReporter)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_reporter(Terminal()), PlainReporter)


def test_the_live_form_redraws_at_most_four_times_a_second_and_keeps_notes() -> None:
    stream = Terminal()
    reporter = LiveReporter(
        Console(file=stream, force_terminal=True, width=60, highlight=False, no_color=True)
    )
    reporter.start(["a [job]"])
    for step in range(100):
        reporter.update(progress(step / 100, step, 10 * step))
    assert stream.getvalue().count("rows ") == 4
    # Longer than the terminal is wide, yet on one line for whoever copies it.
    note = "row 7 of 'a [b].parquet' " + "x" * 60
    reporter.note(note)
    reporter.finish(progress(1.0, 100, 1000))
    reporter.close()
    text = stream.getvalue()
    assert text.startswith("a [job]\n")
    assert note in text
    assert text.rstrip().endswith("100 rows in 1s · 1000 tokens, 1000 tok/s")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
