"""Compiles paged_attention.c for this machine once, keeps the result in the user's cache, loads it.

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
from typing import Any

import platformdirs

from adaflash_batch.kernels.page_size import PAGE

SOURCE = Path(__file__).with_name("paged_attention.c")

_FLAGS = [
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast"),
]


class Step(ctypes.Structure):
    """The C struct of the same name."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    """The C struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "k_pages", "v_pages")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
                *("num_heads", "num_kv_heads", "window"),
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("causal", ctypes.c_int32),
    )


class NativeUnavailable(Exception):
    """The C form cannot be had on this machine; the message says why."""


@cache
def load(element: int, head_dim: int) -> ctypes.CDLL:
    """The compiled library for elements of float32 (0), bfloat16 (1) or float16 (2).

    Raises:
        NativeUnavailable: there is no compiler, or it refused.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise NativeUnavailable(f"no C compiler: {compiler[0]} is not on PATH")
    defines = [f"-DELEMENT={element}", f"-DHEAD_DIM={head_dim}", f"-DPAGE={PAGE}"]
    flags = [*_FLAGS, *_vector_width(compiler), *defines]
    path = _cache_folder() / f"attention-{_digest(compiler, flags)}.so"
    if not path.exists():
        _build(compiler, flags, path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error
    arguments: Any = [ctypes.POINTER(Step), ctypes.POINTER(Layer)]
    library.store_kv.argtypes, library.store_kv.restype = arguments, None
    library.paged_attention.argtypes = arguments
    library.paged_attention.restype = ctypes.c_int32
    return library


def _vector_width(compiler: list[str]) -> list[str]:
    # gcc and clang on x86 prefer 256-bit vectors even where 512 bits are there and faster.
    return ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []


def _cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("adaflash-batch")) / "kernels"


def _digest(compiler: list[str], flags: list[str]) -> str:
    """Names the build: another source, compiler, flag or processor gets another file."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(repr((compiler, flags, _processor())).encode() + version)
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(compiler: list[str], flags: list[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
            compiled, linked = Path(scratch, "attention.o"), Path(scratch, "attention.so")
            _run([*compiler, *flags, "-c", str(SOURCE), "-o", str(compiled)])
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
