"""Every GPU kernel compiles for Ampere and Hopper without a GPU, and none spills."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from adaflash_batch.kernels import builds

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.fixture(scope="module")
def compiled() -> str:
    """The table of all builds, made where Triton does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "adaflash_batch.kernels.builds"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(table: str) -> dict[tuple[str, str], list[int]]:
    """(variant, GPU) to registers, shared bytes and spilled bytes."""
    rows = {}
    for line in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)[2:]:
        name, gpu, *numbers = line.split(" | ")
        rows[name, gpu] = [int(number) for number in numbers]
    return rows


@needs_triton
def test_every_kernel_compiles_and_none_spills(compiled: str) -> None:
    rows = rows_of(compiled)
    wanted = [(each.name, f"sm_{c}") for each in builds.variants() for c in each.capabilities]
    assert set(rows) == set(wanted)
    assert len(set(wanted)) == len(wanted) > 0
    for (name, gpu), (registers, shared, spilled) in rows.items():
        assert spilled == 0, f"{name} spills on {gpu}"
        assert 0 < registers <= 255
        assert shared <= builds.SHARED_LIMITS[int(gpu.removeprefix("sm_"))]


@needs_triton
def test_the_readme_has_the_table(compiled: str) -> None:
    written = builds.written_table()
    if written.splitlines()[0] == compiled.splitlines()[0]:  # the same version of Triton
        assert written == compiled, "python -m adaflash_batch.kernels.builds --write"
    assert set(rows_of(written)) == set(rows_of(compiled))


def test_a_table_is_read_as_it_is_written() -> None:
    built = [builds.Build("a b", 90, 40, 8, 1024), builds.Build("a b", 80, 41, 0, 0)]
    table = "| head |\n| --- |\n" + "".join(build.row for build in built)
    assert rows_of(table) == {("a b", "sm_90"): [40, 1024, 8], ("a b", "sm_80"): [41, 0, 0]}
