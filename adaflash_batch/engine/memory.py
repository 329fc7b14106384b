"""How much memory KV pages may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_SHARE = 0.4
_CGROUP = Path("/sys/fs/cgroup")


def kv_budget(device: torch.device) -> int:
    """Bytes for KV pages unless somebody says otherwise: 40% of what is free on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    return int(free_memory() * _SHARE)


def free_memory() -> int:
    """Bytes that this process may still take: the machine's, or the container's if that is less."""
    free = _machine_free()
    limit = _read_number(_CGROUP / "memory.max")
    used = _read_number(_CGROUP / "memory.current")
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def _machine_free() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit
