"""How much memory KV pages may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash_batch.errors import ConfigError
from adaflash_batch.kernels.page_size import PAGE

if TYPE_CHECKING:
    import torch

SHARE = 0.4
_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def kv_budget(device: torch.device) -> int:
    """Bytes for KV pages unless somebody says otherwise: 40% of what is free on the device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0] * SHARE)
    return int(free_memory() * SHARE)


def longest_context(asked: int | None, made_for: int, model: str) -> int:
    """Tokens that prompt and completion may have together.

    Raises:
        ConfigError: more is asked for than the model was made for.
    """
    if asked is not None and asked > made_for:
        raise ConfigError(
            f"a context of {asked} is asked for, {model} was made for {made_for}",
            "give at most that with --context",
        )
    return asked or made_for


def kv_tokens(
    num_bytes: int, bytes_per_token: int, *, concurrency: int, longest: int, model: str
) -> int:
    """Tokens that KV memory holds, never more than full concurrency at full length can use.

    Args:
        num_bytes: of KV memory.
        bytes_per_token: target's and drafter's.
        concurrency: most requests at once.
        longest: tokens that one of them needs room for at the most.
        model: what the user calls it.

    Raises:
        ConfigError: not even one page fits.
    """
    tokens = min(num_bytes // bytes_per_token, concurrency * pages_of(longest) * PAGE)
    if tokens < PAGE:
        raise ConfigError(
            f"{num_bytes / 2**20:.1f} MiB of KV memory hold {tokens} tokens of {model} "
            f"({bytes_per_token / 2**10:.1f} KiB each), a page has {PAGE}",
            "give more with --kv-memory",
        )
    return tokens


def pages_of(num_tokens: int) -> int:
    """Pages that so many tokens of one request take."""
    return -(-num_tokens // PAGE)


def free_memory() -> int:
    """Bytes that this process may still take: the machine's, or its control groups' if less."""
    return min([_machine_free(), *(_group_free(group) for group in _groups())])


def _machine_free() -> int:
    available = _field(_PROC / "meminfo", "MemAvailable:")
    if available is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return available * 1024


def _groups() -> Iterator[Path]:
    """The process's control group (version 2) and those around it: a limit may be on any."""
    yield _CGROUP  # in a container, its own
    path = _CGROUP
    for name in _own_group().split("/"):
        if name not in ("", ".."):  # ".." is outside of what the container sees
            path /= name
            yield path


def _own_group() -> str:
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                return line.removeprefix("0::")
    return ""


def _group_free(group: Path) -> int:
    """Bytes below the group's limit; more than any machine has where there is none."""
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return 2**63
    # Pages of files read once count as used, and are given up as soon as somebody needs them.
    reclaimable = _field(group / "memory.stat", "inactive_file") or 0
    return max(limit - used + reclaimable, 0)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _field(path: Path, name: str) -> int | None:
    """The number behind a name in a file of such lines."""
    with suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    return None
