"""Kernels that work row by row against their floors and PyTorch, for benchmarks/gpu.py.

# R rows, V vocabulary, W width, B requests, K drafts of a block
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_notes import Notes, floor_s, timed

from adaflash_batch.kernels.accept import Choosing, Rows, Rules, accept_beside, rules_of
from adaflash_batch.kernels.elementwise import add_rms_norm_reference
from adaflash_batch.kernels.row_operations import triton_linear, triton_rows
from adaflash_batch.request import Sampling

_NEEDED_S = 8.0


def run(notes: Notes, device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> None:
    """All of them; Qwen3-8B's sizes, unless tiny."""
    rows, vocabulary, width = (6, 97, 32) if is_tiny else (1024, 151936, 4096)
    chances = Sampling(temperature=0.8, top_p=0.9)
    works: dict[str, Callable[[], Any]] = {
        "accept: argmax": partial(_choice, rows, vocabulary, Sampling(), device, dtype),
        "accept: sampled": partial(_choice, rows // 2, vocabulary, chances, device, dtype),
        "opd_loss": partial(_loss, rows // 2, vocabulary, device, dtype),
        "select_widths": partial(_widths, 3 if is_tiny else 128, 4 if is_tiny else 15, device),
        "add_rms_norm": partial(_norm, rows, width, device, dtype),
        "linear, rows alike": partial(_linear, rows // 2, width, 3 * width, device, dtype),
    }
    for name, work in works.items():
        notes.attempt(name, _NEEDED_S, work)


def figures(
    seconds: float, torch_s: float, num_bytes: int, num_operations: int = 0
) -> dict[str, Any]:
    """Ours, PyTorch's, and the floor of what must move and be computed."""
    floor = floor_s(num_bytes, num_operations)
    return {
        "seconds": seconds,
        "torch_s": torch_s,
        "bytes": num_bytes,
        "operations": num_operations,
        "floor_s": floor,
        "share_of_floor": None if floor is None else floor / seconds,
    }


def _normal(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _choice(
    rows: int, vocabulary: int, sampling: Sampling, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """One row of every request: its logits are read once."""
    logits = _normal(rows, vocabulary, device=device, dtype=dtype)
    choosing = [Choosing(sampling, (row, 0), 9, room=9, ends=(2,)) for row in range(rows)]
    rules = rules_of(choosing)
    placed = Rules(rules.floats.to(device), rules.integers.to(device))
    each = torch.arange(rows, dtype=torch.int32, device=device)
    of_rows = Rows(each, torch.ones_like(each), each, torch.zeros_like(each), most=1)
    accept = accept_beside("triton" if device.type == "cuda" else "torch")
    ours = timed(lambda: accept(logits, of_rows, placed), device)
    theirs = timed(lambda: logits.float().softmax(-1).cumsum(-1), device)
    argmax = timed(lambda: logits.argmax(-1), device)
    return figures(ours, argmax if sampling.is_greedy else theirs, logits.nbytes)


def _loss(rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Both logits read, the gradient written; beside PyTorch, eager, with gradients."""
    module: Any = importlib.import_module("adaflash_batch.kernels.opd_loss")
    student, teacher = (_normal(rows, vocabulary, device=device, dtype=dtype) for _ in range(2))
    terms = module.Terms("opd", (0.5, 0.5), 10.0)
    ours = timed(lambda: module.opd_loss(student, teacher, None, terms), device)
    wanted = student.clone().requires_grad_()

    def eager() -> Any:
        q, p = F.log_softmax(wanted.float(), -1), F.log_softmax(teacher.float(), -1)
        loss = F.nll_loss(q, p.argmax(-1)) + (q.exp() * (q - p)).sum(-1).mean()
        return torch.autograd.grad(loss, wanted)

    return figures(ours, timed(eager, device), 3 * student.nbytes)


def _widths(requests: int, drafts: int, device: torch.device) -> dict[str, Any]:
    """Microseconds are its measure: what moves is nothing."""
    module: Any = importlib.import_module("adaflash_batch.kernels.widths")
    chances = torch.rand(requests, drafts, device=device).cumprod(1)
    sizes = torch.full((requests,), drafts, dtype=torch.int32, device=device)
    seconds = torch.linspace(0.01, 0.02, requests * drafts + 1, device=device).double()
    ours = timed(lambda: module.select_widths(chances, sizes, seconds), device)
    theirs = timed(lambda: chances.flatten().sort(descending=True), device)
    return figures(ours, theirs, chances.nbytes + seconds.nbytes)


def _norm(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    x, residual = (_normal(rows, width, device=device, dtype=dtype) for _ in range(2))
    weight = _normal(width, device=device, dtype=dtype)
    ours = timed(lambda: triton_rows().add_rms_norm(x, residual, weight, 1e-6), device)
    theirs = timed(lambda: add_rms_norm_reference(x, residual, weight, 1e-6), device)
    return figures(ours, theirs, 4 * x.nbytes)


def _linear(
    rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The product of the deterministic mode; PyTorch's is the library's."""
    x = _normal(rows, width, device=device, dtype=dtype)
    weight = _normal(outputs, width, device=device, dtype=dtype)
    linear = triton_linear()
    ours = timed(lambda: linear(x, weight, None), device)
    theirs = timed(lambda: F.linear(x, weight), device)
    moved = x.nbytes + weight.nbytes + rows * outputs * x.element_size()
    return figures(ours, theirs, moved, 2 * rows * width * outputs)
