"""The target's choice at each position: argmax, or the filtered distribution at a keyed uniform.

A choice depends on the logits, the row's Sampling, the row's own earlier tokens and
(seed, row identity, sample, position): never on the drafter, the width or the neighbours.

# R rows to choose for, V vocabulary
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from adaflash_batch.request import Sampling

_FIRST_CANDIDATES = 256
_MASK64 = 2**64 - 1


@dataclass(slots=True)
class TokenHistory:
    """What the penalties of one request look at.

    Attributes:
        prompt: distinct token ids of the prompt.
        generated: how often each token was generated.
        num_generated: tokens generated so far.
    """

    prompt: frozenset[int] = frozenset()
    generated: Counter[int] = field(default_factory=Counter)
    num_generated: int = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that were committed."""
        self.generated.update(token_ids)
        self.num_generated += len(token_ids)


@dataclass(frozen=True, slots=True)
class ChoiceBlock:
    """Consecutive rows of logits that belong to one request: behind the anchor and its drafts.

    Attributes:
        sampling: the request's.
        history: tokens before the drafts; None when `sampling.reshapes_logits` is false.
        drafts: the w verified drafts; the block has w + 1 rows.
        key: (row identity, sample).
        position: absolute position of the token chosen by the first row.
        end_ids: tokens that min_new_tokens holds back.
    """

    sampling: Sampling
    history: TokenHistory | None
    drafts: Sequence[int]
    key: tuple[int, int]
    position: int
    end_ids: frozenset[int] = frozenset()

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return len(self.drafts) + 1


def choose(logits: torch.Tensor, blocks: Sequence[ChoiceBlock]) -> tuple[list[int], list[bool]]:
    """Choose a token for every row.

    Args:
        logits: [R, V] in any float type; not written to.
        blocks: whose rows they are, in order.

    Returns:
        Token ids [R], and for each row whether its logits were sound (no NaN, not all -inf).
    """
    highest, indices = logits.max(dim=-1)  # NaN wins, so it shows
    choices: list[int] = indices.tolist()
    sound: list[bool] = torch.isfinite(highest).tolist()
    choose_others(logits, blocks, choices)
    return choices, sound


def choose_others(logits: torch.Tensor, blocks: Sequence[ChoiceBlock], choices: list[int]) -> None:
    """Put their own choices in place of the likeliest tokens, for blocks that want other ones."""
    row = 0
    for block in blocks:
        sampling = block.sampling
        if not sampling.is_greedy or sampling.reshapes_logits:
            rows = slice(row, row + block.num_rows)
            choices[rows] = _choose_block(logits[rows].float(), block)
        row += block.num_rows
    assert row == logits.shape[0]


def _choose_block(logits: torch.Tensor, block: ChoiceBlock) -> list[int]:
    if block.sampling.reshapes_logits:
        logits = reshape_logits(logits, block)
    if block.sampling.is_greedy:
        choices: list[int] = logits.argmax(-1).tolist()
        return choices
    positions = range(block.position, block.position + block.num_rows)
    uniforms = [uniform(block.sampling.seed, *block.key, position) for position in positions]
    return sample(logits, block.sampling, uniforms)


def reshape_logits(logits: torch.Tensor, block: ChoiceBlock) -> torch.Tensor:
    """Bias, penalties and minimum length, each row seeing the drafts before it: [w + 1, V].

    A draft counts for the rows behind it, which is exact: those rows matter only if it is accepted.
    """
    assert block.history is not None
    sampling, history = block.sampling, block.history
    logits = logits.clone()
    if sampling.logit_bias:
        ids, amounts = zip(*sampling.logit_bias, strict=True)
        logits[:, list(ids)] += torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
    seen = Counter(history.generated)
    for row in range(block.num_rows):
        if row > 0:
            seen[block.drafts[row - 1]] += 1
        _penalise(logits[row], sampling, history.prompt, seen)
        if history.num_generated + row < sampling.min_new_tokens:
            logits[row, sorted(block.end_ids)] = float("-inf")
    return logits


def _penalise(
    logits: torch.Tensor, sampling: Sampling, prompt: frozenset[int], seen: Counter[int]
) -> None:
    """Change one row [V] in place."""
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(prompt.union(seen)), dtype=torch.long, device=logits.device)
        values = logits[ids]
        penalty = sampling.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if seen and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(seen.keys()), dtype=torch.long, device=logits.device)
        counts = torch.tensor(list(seen.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


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
