"""A kernel as it is compiled ahead of time, so that its build can be looked at without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LAUNCH = {"enable_fp_fusion": True}
"""To be given to every launch: without it Triton asks an environment variable, by version."""


class Variant(NamedTuple):
    """One build of a kernel, of those that its launcher makes.

    name: of the kernel and what tells this build from others, e.g. `accept bf16`.
    kernel: what `triton.jit` made.
    signature: the types of its arguments in Triton's words, `*bf16` or `i32`; constexprs left out.
    constexprs: the values of those.
    capabilities: of the GPUs that get this build, 90 for Hopper.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    capabilities: tuple[int, ...] = (80, 90)
