"""Journals: what comes back is what went in, whatever became of the file's end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.errors import AdaflashError
from adaflash_batch.request import Completion, RowError, RowKey, Timing
from adaflash_batch.shards.journal import (
    Journal,
    JournalHeader,
    JournalRow,
    journal_name,
    read_journal,
)
from adaflash_batch.shards.schema import OutputRow
from adaflash_batch.stats import SpeculationCounts

HEADER = JournalHeader("job", "digest", 120, 10)
counters = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e6)


@st.composite
def rows(draw: st.DrawFn) -> tuple[RowKey, JournalRow]:
    key = RowKey(3, draw(st.integers(120, 129)), draw(st.integers(0, 3)))
    counts = SpeculationCounts(
        steps=draw(counters),
        accepted_hist=draw(st.lists(counters, max_size=3)),
        drafter_first=draw(st.none() | counters),
    )
    served = Completion(
        key=key,
        token_ids=draw(st.lists(counters, max_size=4)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        prompt_tokens=draw(counters),
        counts=counts,
        timing=Timing(draw(seconds), draw(seconds), draw(seconds)),
    )
    # Line ends of all kinds, and text that looks like a line of the journal.
    text = draw(st.text() | st.sampled_from(["\n", "\r\n\x85\u2028", '00000000 {"row":1}\n']))
    return key, JournalRow(OutputRow(text, served), draw(st.none() | counters), draw(counters))


many = st.lists(rows(), max_size=6, unique_by=lambda pair: pair[0])


def written(folder: Path, pairs: list[tuple[RowKey, JournalRow]]) -> Path:
    path = folder / journal_name(3, 12)
    kept = Journal(path, HEADER)
    for key, row in pairs:
        kept.add(key, row)
    return path


@given(pairs=many)
def test_what_went_in_comes_back(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[RowKey, JournalRow]]
) -> None:
    path = written(tmp_path_factory.mktemp("journal"), pairs)
    found = read_journal(path)
    assert (found.header, found.rows) == (HEADER, dict(pairs))
    again = Journal(path, HEADER, found.rows)
    assert read_journal(path).rows == found.rows
    again.remove()
    assert not path.exists()


@given(pairs=many, data=st.data())
def test_a_torn_end_costs_the_torn_line_alone(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[RowKey, JournalRow]],
    data: st.DataObject,
) -> None:
    path = written(tmp_path_factory.mktemp("journal"), pairs)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    left = whole[:cut] + data.draw(st.sampled_from([b"", b"\x00" * 9, b"\n"]))
    path.write_bytes(left)
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    lines = sum(left[:end] == whole[:end] for end in ends)
    found = read_journal(path)
    if lines == 0:
        assert (found.header, found.rows) == (None, {})
        return
    kept = list(found.rows.items())
    assert kept == pairs[: lines - 1]
    # What goes on from it loses nothing either.
    on = Journal(path, HEADER, found.rows)
    key, row = RowKey(3, 121, 7), pairs[0][1] if pairs else None
    if row is not None:
        on.add(key, row)
        assert read_journal(path).rows.keys() == {*found.rows, key}


@given(pairs=many, data=st.data())
def test_a_damaged_line_costs_itself(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[RowKey, JournalRow]],
    data: st.DataObject,
) -> None:
    path = written(tmp_path_factory.mktemp("journal"), pairs)
    whole = bytearray(path.read_bytes())
    head = whole.index(b"\n") + 1
    if not pairs:
        return
    place = data.draw(st.integers(head, len(whole) - 1).filter(lambda at: whole[at] != 10))
    whole[place] ^= 1
    if whole[place] == 10:
        return
    path.write_bytes(bytes(whole))
    struck = bytes(whole[head:place]).count(b"\n")
    wanted = dict(pair for index, pair in enumerate(pairs) if index != struck)
    assert read_journal(path).rows == wanted


def test_samples_make_a_row_finished(tmp_path: Path) -> None:
    served = Completion(RowKey(3, 120, 0), [1], "stop", 1)
    row = JournalRow(OutputRow("x", served))
    pairs = [(RowKey(3, number, sample), row) for number, sample in [(120, 0), (120, 1), (121, 1)]]
    found = read_journal(written(tmp_path, pairs))
    assert (found.num_finished(1), found.num_finished(2), found.num_finished(3)) == (2, 1, 0)


def test_errors_are_not_kept(tmp_path: Path) -> None:
    kept = Journal(tmp_path / journal_name(3, 12), HEADER)
    with pytest.raises(AssertionError, match="may be served"):
        kept.add(RowKey(3, 120, 0), JournalRow(OutputRow(None, RowError("e", "m"))))


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    kept = Journal(tmp_path / journal_name(3, 12), HEADER)
    kept._path = Path("/dev/full")
    served = Completion(RowKey(3, 120, 0), [1], "stop", 1)
    with pytest.raises(AdaflashError, match="no space left for /dev/full"):
        kept.add(RowKey(3, 120, 0), JournalRow(OutputRow("x", served)))
