"""The import table: who may import whom, and what stays free of torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "adaflash_batch"

# Each room may import from the rooms below its own line, and from itself.
LAYERS: list[set[str]] = [
    {"cli"},
    {"job", "training", "review"},
    {"job_decoding", "job_place"},
    {"job_requests", "learning"},
    {"summary", "job_facts"},
    {"shards", "engine", "adapt", "report"},
    {"drafter", "kernels"},
    {
        *("errors", "durable", "stopping", "stats", "request", "exchange"),
        *("spec", "spec_sections", "spec_sources", "cli_flags", "admission"),
        "sampling_defaults",
        *("text", "detokenise", "special_tokens", "models", "model_files", "gguf"),
    },
]
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
GROUND = len(LAYERS) - 1
TORCH = {"torch", "transformers"}


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    # The package may hold `kernels` as a link; it is read once, from where it really is.
    for folder, name in ((ROOT / PACKAGE, PACKAGE), (ROOT / "kernels", f"{PACKAGE}.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] == "kernels":
                continue
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The part of the house that a module belongs to: `engine` for adaflash_batch.engine.pages."""
    return [*module.split("."), ""][1]


def imported(module: str, path: Path) -> Iterator[str]:
    """Modules of ours that a module imports, late and type-checking imports included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == PACKAGE)


def is_allowed(importer: str, importee: str) -> bool:
    if importer == importee:
        return True
    above, below = LAYER_OF[importer], LAYER_OF[importee]
    return above < below or above == below == GROUND


def test_every_module_has_its_place_in_the_table() -> None:
    assert {room_of(module) for module in MODULES} - {""} <= set(LAYER_OF)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    room = room_of(module)
    if room == "":
        assert list(imported(module, MODULES[module])) == []
    for name in imported(module, MODULES[module]):
        assert is_allowed(room, room_of(name)), f"{module} imports {name}"


def test_the_table_forbids_what_it_should() -> None:
    assert not is_allowed("engine", "adapt")
    assert not is_allowed("adapt", "engine")
    assert not is_allowed("request", "shards")
    assert not is_allowed("drafter", "engine")
    assert not is_allowed("job", "cli")
    assert is_allowed("cli", "spec")
    assert is_allowed("engine", "kernels")


def test_the_walk_sees_late_imports(tmp_path: Path) -> None:
    source = tmp_path / "late.py"
    source.write_text(
        "import torch\n"
        "def work() -> None:\n"
        "    from adaflash_batch.adapt import trainer\n"
        "    import adaflash_batch.engine.decoder\n"
    )
    assert list(imported("late", source)) == [
        "adaflash_batch.adapt.trainer",
        "adaflash_batch.engine.decoder",
    ]


WITHOUT_TORCH = [
    *("cli", "cli_flags", "training.commands", "training.plan", "training.prompts"),
    *("training.version_commands", "drafter.store"),
    *("durable", "errors", "exchange", "request", "spec", "spec_sections", "spec_sources"),
    "stats",
    *("engine.pages", "engine.prefixes", "engine.scheduler", "report.live", "summary", "job_facts"),
    *(f"review.{name}" for name in ("check", "check_command", "check_view", "rows_file")),
    *(f"review.{name}" for name in ("status", "status_view", "verify", "verify_view", "merge")),
    *("job", "job_decoding", "job_place", "job_requests", "stopping"),
    *("engine.memory", "engine.machine"),
    *("engine.cost", "engine.cost_curve", "engine.widths", "engine.acceptance"),
    *("engine.lookup", "engine.lookup_acceptance", "engine.suffix_index"),
    *("adapt.balance", "adapt.control", "adapt.replay", "adapt.round_report"),
    *(module.removeprefix(f"{PACKAGE}.") for module in MODULES if room_of(module) == "shards"),
]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_torch_stays_out(module: str) -> None:
    program = (
        f"import sys, importlib; importlib.import_module('{PACKAGE}.{module}');"
        f"print(sorted({TORCH!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
