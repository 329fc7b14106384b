"""Memory and the price of a commit do not grow with the rows that are done."""

from pathlib import Path

import pytest
from folders import tiny_model_folder
from many_rows import Commit, measure, prompt, quarters

# Of 480 MiB; what the allocator holds back differs by a few MiB from one moment to another.
MARGIN_MIB = 16


@pytest.mark.slow
def test_memory_is_flat_over_the_rows(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    first, *_, last = measure(model, tmp_path, 20_000, 200, 2)
    assert last.rows == 20_000
    assert last.peak_rss_mib < first.peak_rss_mib + MARGIN_MIB


def test_prompts_differ() -> None:
    assert len({prompt(row) for row in range(5000)}) == 5000


def test_quarters_tell_what_grew() -> None:
    commits = [Commit(10.0 + at, 10 * (at + 1), 0.001 * (at + 1)) for at in range(8)]
    memory = [(float(at), (100 + at) * 2**20) for at in range(20)]
    found = quarters(commits, memory, began=10.0)
    assert [quarter.rows for quarter in found] == [20, 40, 60, 80]
    assert [round(quarter.worst_commit_ms) for quarter in found] == [2, 4, 6, 8]
    assert [quarter.peak_rss_mib for quarter in found] == [101, 103, 105, 107]
    assert {round(quarter.rows_per_s) for quarter in found} == {10}
