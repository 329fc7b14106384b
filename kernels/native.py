"""Compiles the C files beside it for this machine once, keeps the result in the user's cache.

Needs a C compiler with OpenMP (`cc`, or what $CC names). Without one the PyTorch reference runs:
the same text, slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from adaflash_batch.models import cache_root

_FLAGS = [
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast"),
]


ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What -DELEMENT= says of a type; see element.h."""


class NativeUnavailable(Exception):
    """The C form cannot be had on this machine; the message says why."""


def load(source: str, *defines: str) -> ctypes.CDLL:
    """The compiled form of a C file of this folder.

    Args:
        source: its name.
        defines: compiler arguments such as `-DELEMENT=1`; each set of them is a build of its own.

    Raises:
        NativeUnavailable: there is no compiler, or it refused. It is asked once a process.
    """
    found = _find(source, defines)
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


@cache
def _find(source: str, defines: tuple[str, ...]) -> ctypes.CDLL | str:
    """The library, or why there is none: remembered too, since callers ask at every layer."""
    try:
        return _load(source, defines)
    except NativeUnavailable as error:
        return str(error)


def _load(source: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise NativeUnavailable(f"no C compiler: {compiler[0]} is not on PATH")
    flags = [*_FLAGS, *_vector_width(), *defines]
    code = Path(__file__).with_name(source)
    path = cache_root() / "kernels" / f"{code.stem}-{_digest(code, compiler, flags)}.so"
    if not path.exists():
        _build(code, compiler, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error


def _vector_width() -> list[str]:
    # gcc and clang on x86 prefer 256-bit vectors even where 512 bits are there and faster.
    return ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []


def _digest(code: Path, compiler: list[str], flags: list[str]) -> str:
    """Names the build: another source, compiler, flag or processor gets another file."""
    digest = hashlib.sha256(code.name.encode())
    for source in sorted(code.parent.glob("*.[ch]")):  # they include each other
        digest.update(source.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(repr((compiler, flags, _processor())).encode() + version)
    return digest.hexdigest()[:20]


def processor_flags() -> frozenset[str]:
    """What the processor can do, in Linux's words; empty where it does not say."""
    return frozenset(_processor().partition(":")[2].split())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(code: Path, compiler: list[str], flags: list[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
            compiled, linked = Path(scratch, "code.o"), Path(scratch, "code.so")
            _run([*compiler, *flags, "-c", str(code), "-o", str(compiled)])
            # Linked without an OpenMP runtime on purpose: the symbols come from torch's own, which
            # is loaded first. Two runtimes would be two thread pools fighting for the same cores.
            _run([*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"])
            os.replace(linked, path)
    except OSError as error:
        raise NativeUnavailable(f"cannot build in {path.parent}: {error}") from error


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed: {result.stderr.strip()[:500]}")
