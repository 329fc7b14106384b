"""The picture of the study: whose figures are in it, and that it is the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from length_plot import collect, draw


def row(policy: str, concurrency: int, speed: float, prompts: str = "a") -> dict[str, Any]:
    about = {"prompts": prompts, "policy": policy, "concurrency": concurrency}
    return about | {"speed": speed, "low": speed - 0.1, "high": speed + 0.1}


def test_the_first_file_counts_and_plain_decoding_is_no_policy() -> None:
    first = [row("off", 1, 1.0), row("both", 1, 1.5), row("both", 8, 1.1)]
    second = [row("both", 1, 9.0), row("adaflash", 1, 1.2), row("both", 1, 1.4, "b")]
    found = collect([first, second])
    assert found["a"].keys() == {"both", "adaflash"}
    assert {count: each["speed"] for count, each in found["a"]["both"].items()} == {1: 1.5, 8: 1.1}
    assert found["b"]["both"][1]["speed"] == 1.4


def test_a_picture_names_all_that_it_shows_and_is_the_same_each_time(tmp_path: Path) -> None:
    rows = [row(policy, count, 1.0) for policy in ("fixed:1", "survival") for count in (1, 64)]
    rows.append(row("oracle", 1, 1.2, "another set"))
    for name in ("one.svg", "two.svg"):
        draw(collect([rows]), tmp_path / name)
    text = (tmp_path / "one.svg").read_text(encoding="utf-8")
    for word in ("fixed:1", "survival", "another set", "requests at once", "64"):
        assert f">{word}<" in text
    assert text == (tmp_path / "two.svg").read_text(encoding="utf-8")
