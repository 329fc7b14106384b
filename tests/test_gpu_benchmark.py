"""benchmarks/gpu.py always ends in time with a JSON, and its sections run, on a CPU too."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import gpu
import gpu_decode
import gpu_kernels
import pytest
import torch
from gpu_notes import Notes


def figures(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_sections_share_the_time_and_take_no_more() -> None:
    whole = gpu.budgets(gpu.SECTIONS, gpu.BUDGET_S)
    assert sum(whole) == pytest.approx(gpu.BUDGET_S)
    assert gpu.BUDGET_S < 475 < 480  # with what .ci/gpu.sh adds
    assert gpu.budgets(gpu.SECTIONS[-1:], 100.0) == [100.0]


def test_a_section_that_hangs_is_ended_and_its_figures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import json, pathlib, sys, time\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        "pathlib.Path(out).write_text(json.dumps({'first': 1}))\n"
        "print('hangs', flush=True)\n"
        "time.sleep(600)\n"
    )
    script = tmp_path / "hangs.py"
    script.write_text(program)
    monkeypatch.setattr(gpu, "__file__", str(script))
    began = time.monotonic()
    settings = gpu.Settings("cpu", True, None)
    result = gpu.run_section(gpu.SECTIONS[0], settings, 5.0, tmp_path)
    assert time.monotonic() - began < 60
    assert result["status"] == "out of time"
    assert result["figures"] == {"first": 1}
    assert result["log"] == ["hangs"]


def test_a_failure_costs_one_figure(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "out.json", 100.0)
    notes.attempt("bad", 1.0, lambda: 1 // 0)
    notes.attempt("good", 1.0, lambda: 2)
    notes.attempt("long", 1000.0, lambda: 3)
    found = figures(tmp_path / "out.json")
    assert found["bad"].startswith("ZeroDivisionError")
    assert (found["good"], found["long"]) == (2, "no time was left")


def test_every_kernel_is_measured(tmp_path: Path) -> None:
    gpu_kernels.run(Notes(tmp_path / "out.json", 1000.0), "cpu", is_tiny=True)
    found = figures(tmp_path / "out.json")
    measured = {name: each for name, each in found.items() if isinstance(each, dict)}
    missing = set(found) - set(measured) - {"attention kernels"}
    assert not missing or not importlib.util.find_spec("triton"), found
    assert len(measured) >= 9
    for each in measured.values():
        assert each["seconds"] > 0
        assert each["bytes"] > 0


def test_the_floor_of_attention_counts_what_moves() -> None:
    one = gpu_kernels.Shape(1, 1, 4095)
    keys_and_values = 4096 * 2 * 8 * 128 * 2
    assert keys_and_values < one.num_bytes < 1.01 * keys_and_values
    assert one.num_operations == 4 * 32 * 128 * 4096


def test_both_models_are_decoded(tmp_path: Path) -> None:
    for name in ("demo", "large"):
        out = tmp_path / f"{name}.json"
        if name == "demo":
            gpu_decode.run_demo(Notes(out, 1000.0), "cpu", None, is_tiny=True)
        else:
            gpu_decode.run_large(Notes(out, 1000.0), "cpu", is_tiny=True)
        found = figures(out)
        steps = [each for each in found.values() if isinstance(each, dict)]
        assert len(steps) == 4, found
        assert all(each["steps"] > 3 and each["tokens_per_s"] > 0 for each in steps)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="finds no GPU"):
        gpu.main()
