"""A choice by the filtered distribution at a keyed uniform, on the host.

# R rows to choose for, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from adaflash_batch.request import Sampling

_FIRST_CANDIDATES = 256
_MASK64 = 2**64 - 1


def sample(logits: torch.Tensor, sampling: Sampling, uniforms: Sequence[float]) -> list[int]:
    """Inverse CDF of the filtered distribution, in order of token id.

    Filters in transformers' order: temperature, top_k, top_p, min_p. Tokens as likely as the last
    one that a filter keeps are kept too, so that ties do not depend on how they were sorted.

    Args:
        logits: float32 [R, V].
        uniforms: R numbers in (0, 1).
    """
    scaled = logits / sampling.temperature
    if sampling.top_p >= 1.0 and sampling.top_k == 0 and sampling.min_p == 0.0:
        weights = torch.softmax(scaled, dim=-1).double().cumsum(-1)
        return [_invert(row, u) for row, u in zip(weights.cpu().numpy(), uniforms, strict=True)]
    num_candidates = min(max(_FIRST_CANDIDATES, sampling.top_k + 1), logits.shape[-1])
    found = (*scaled.topk(num_candidates, dim=-1), scaled.logsumexp(-1))
    values, ids, log_mass = (each.cpu() for each in found)
    chosen = []
    for row, u in enumerate(uniforms):
        kept = _kept(values[row], sampling, log_mass[row])
        if kept == num_candidates < logits.shape[-1]:  # the filter may reach further
            chosen.append(_sample_all(scaled[row], sampling, u))
        else:
            chosen.append(_pick(values[row, :kept], ids[row, :kept], u))
    return chosen


def _sample_all(scaled: torch.Tensor, sampling: Sampling, u: float) -> int:
    found = (*scaled.sort(descending=True), scaled.logsumexp(-1))
    values, ids, log_mass = (each.cpu() for each in found)
    kept = _kept(values, sampling, log_mass)
    return _pick(values[:kept], ids[:kept], u)


def _kept(values: torch.Tensor, sampling: Sampling, log_mass: torch.Tensor) -> int:
    """How many of the descending `values` pass the filters, ties of the last included."""
    threshold = values[0] - float("inf")
    if 0 < sampling.top_k < len(values):
        threshold = values[sampling.top_k - 1]
        log_mass = values[values >= threshold].logsumexp(-1)
    probabilities = (values - log_mass).exp().masked_fill(values < threshold, 0.0)
    if sampling.top_p < 1.0:
        before = probabilities.double().cumsum(-1) - probabilities
        last = int((before < sampling.top_p).sum()) - 1
        threshold = torch.maximum(threshold, values[max(last, 0)])
    if sampling.min_p > 0.0:
        floor = values[0] + torch.tensor(sampling.min_p, dtype=values.dtype).log()
        threshold = torch.maximum(threshold, floor)
    return int(((values >= threshold) & (values > float("-inf"))).sum())


def _pick(values: torch.Tensor, ids: torch.Tensor, u: float) -> int:
    order = ids.argsort()
    weights = torch.softmax(values.double()[order], dim=-1).cumsum(-1)
    return int(ids[order[_invert(weights.numpy(), u)]])


def _invert(cumulative: npt.NDArray[np.float64], u: float) -> int:
    """First index whose cumulative weight exceeds u times the whole."""
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # u * total can round up to the total itself: then the last token that has any weight.
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))


def uniform(seed: int, identity: int, sample_index: int, position: int) -> float:
    """A number in (0, 1) that is a pure function of its key.

    The key words go through the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) one
    after the other; 53 bits of the result are used.
    """
    state = 0
    for word in (seed, identity, sample_index, position):
        state = _mix((state + 0x9E3779B97F4A7C15 + (word & _MASK64)) & _MASK64)
    return ((state >> 11) + 0.5) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
