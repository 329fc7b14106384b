"""Random choices that follow from a seed and what they are for, so that none need be remembered."""

from __future__ import annotations

import hashlib

_BITS = 63


def seed_of(*purpose: object) -> int:
    """63 bits that the purpose alone decides (by its repr), on every machine."""
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << _BITS) - 1)


def share_of(*purpose: object) -> float:
    """A number in [0, 1) that the purpose alone decides; over purposes spread evenly."""
    # By way of 53 bits: all 63 could round up to 1.
    return (seed_of(*purpose) >> (_BITS - 53)) / 2**53
