"""The target's choice at each position: argmax, or the filtered distribution at a keyed uniform.

A choice depends on the logits, the row's Sampling, the row's own earlier tokens and
(seed, row identity, sample, position): never on the drafter, the width or the neighbours.

# R rows to choose for, V vocabulary
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adaflash_batch.engine.accept import Emission, emission
from adaflash_batch.kernels.sampling import sample, uniform
from adaflash_batch.request import Sampling

_ENDLESS = 2**31 - 1


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
        end_ids: tokens that end the text, and that min_new_tokens holds back.
        room: tokens that the text may have more, at least 1.
    """

    sampling: Sampling
    history: TokenHistory | None
    drafts: Sequence[int]
    key: tuple[int, int]
    position: int
    end_ids: frozenset[int] = frozenset()
    room: int = _ENDLESS

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
    row = 0
    for block in blocks:
        rows = slice(row, row + block.num_rows)
        if not block.sampling.is_greedy or block.sampling.reshapes_logits:
            choices[rows] = _choose_block(logits[rows].float(), block)
        row += block.num_rows
    assert row == logits.shape[0]
    return choices, sound


def decide(logits: torch.Tensor, blocks: Sequence[ChoiceBlock]) -> list[Emission]:
    """What each block [rows of it, V] adds to its request's text."""
    choices, sound = choose(logits, blocks)
    emissions, row = [], 0
    for block in blocks:
        rows = slice(row, row + block.num_rows)
        of_block = (block.drafts, choices[rows], sound[rows])
        emissions.append(emission(*of_block, block.end_ids, block.room))
        row += block.num_rows
    return emissions


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
