"""Compiles every kernel for GPUs that need not be there, and says what came of it.

    python -m adaflash_batch.kernels.builds            # the table, to stdout
    python -m adaflash_batch.kernels.builds --write    # into the README.md beside this file

A kernel's module offers its builds as VARIANTS (variant.Variant). Triton must not interpret:
TRITON_INTERPRET is unset or 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from adaflash_batch.kernels.variant import LAUNCH, Variant

MODULES: tuple[str, ...] = (
    *("triton_attention", "triton_splits", "triton_store"),
    *("triton_elementwise", "triton_linear"),
    *("triton_accept", "triton_opd_loss", "triton_vocabulary_loss", "triton_widths"),
)
"""Of adaflash_batch.kernels, those with VARIANTS."""

README = Path(__file__).with_name("README.md")
SHARED_LIMITS = {80: 166_912, 90: 232_448}
"""Compute capability to the bytes of shared memory that a block can have at the most."""

_BEGIN, _END = "<!-- builds -->\n", "<!-- /builds -->\n"


@dataclass(frozen=True, slots=True)
class Build:
    """What became of a variant.

    Attributes:
        name, capability: which variant, for which GPUs (90 is Hopper).
        registers: of a thread.
        spilled: bytes of a thread that did not fit into them (its stack).
        shared: bytes of shared memory of a block.
    """

    name: str
    capability: int
    registers: int
    spilled: int
    shared: int

    @property
    def row(self) -> str:
        """A line of the table."""
        numbers = (f"sm_{self.capability}", self.registers, self.shared, self.spilled)
        return f"| {self.name} | " + " | ".join(map(str, numbers)) + " |\n"


def variants() -> Iterator[Variant]:
    """Of all modules."""
    for module in MODULES:
        yield from import_module(f"adaflash_batch.kernels.{module}").VARIANTS


def compile_variant(variant: Variant, capability: int) -> Build:
    """Build it as its launcher would on such a GPU, with tensors that begin at multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    assert {n for n in names if signature[n] == "constexpr"} == set(variant.constexprs), (
        variant.name
    )
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs=dict(variant.constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **LAUNCH}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(built.asm["cubin"])
    return Build(variant.name, capability, registers, stack, built.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of the one kernel in it."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    assert len(found) == 1, said
    return int(found[0][0]), int(found[0][1])


def build_all() -> list[Build]:
    """Every variant for every capability that it is for."""
    wanted = [(variant, each) for variant in variants() for each in variant.capabilities]
    with ThreadPoolExecutor(2) as pool:  # most of the time is ptxas's
        return list(pool.map(compile_variant, *zip(*wanted, strict=True)))


def table(builds: list[Build]) -> str:
    """As Markdown."""
    import triton

    head = "| kernel | GPU | registers | shared bytes | spilled bytes |\n"
    rule = "| --- | --- | ---: | ---: | ---: |\n"
    rows = "".join(build.row for build in builds)
    return f"Triton {triton.__version__}:\n\n{head}{rule}{rows}"


def written_table() -> str:
    """The table in the README."""
    return README.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0].strip() + "\n"


def main(arguments: list[str]) -> None:
    """See the module."""
    found = table(build_all())
    if arguments != ["--write"]:
        sys.stdout.write(found)
        return
    before, rest = README.read_text(encoding="utf-8").split(_BEGIN)
    after = rest.split(_END)[1]
    README.write_text(f"{before}{_BEGIN}\n{found}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
