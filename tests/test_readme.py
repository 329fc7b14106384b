"""The README's file tree is the repository's, and what docs name is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTED = ("adaflash_batch", "kernels", "benchmarks", "data", "jobs", "docs")


def listed_paths() -> set[str]:
    """Every path of the tree, the package's with `adaflash_batch/` before it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("## Files", 1)[1].split("## Output", 1)[0]
    paths, folder = set(), ""
    for indent, path in re.findall(r"^( {4}| {6})(\S+)", tree, re.MULTILINE):
        if path.endswith("/"):
            folder = path
        paths.add(path if len(indent) == 4 else folder + path)
    return paths


def test_every_file_is_in_the_tree_and_every_line_is_a_file() -> None:
    listed = listed_paths()
    for path in listed:
        assert (ROOT / path).exists(), f"{path} is in the README, but not there"
    command = ["git", "ls-files", *LISTED]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = [
        path
        for path in tracked.splitlines()
        if path.endswith((".py", ".c", ".h", ".toml", ".md", ".parquet"))
        and not path.endswith("__init__.py")
        and path not in listed
        and not path.startswith("data/drafters/")  # a line stands for the whole folder
    ]
    assert missing == []


def test_the_tests_that_promises_rest_on_are_there() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"test_\w+\.py", text))
    assert len(named) > 8
    for name in named:
        assert (ROOT / "tests" / name).is_file(), name
