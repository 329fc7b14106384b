"""What the machine is called, for figures that hold on it alone."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Its name, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
