"""The yardstick of an audit: one request, one token a step, nothing drafted.

It shares the model and the sampling rule with the decoder, and nothing of how that packs, drafts,
accepts and rolls back.

# V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from adaflash_batch.engine.sampling import (
    ChoiceBlock,
    TokenHistory,
    choose,
    reshape_logits,
)
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import PackedStep
from adaflash_batch.kernels.sampling import sample, uniform
from adaflash_batch.request import FinishReason, Request

# Gets the tokens so far, the logits [V] behind them and the model's choice; says which token is
# taken, or None to end there.
Pick = Callable[[list[int], "Choice"], int | None]

_LIKELIEST = 64
_SHIFTS = [1e-8 * 2.0**k for k in range(26)]


class Choice:
    """The choice of one token.

    Attributes:
        token: that the model takes.
        is_sound: whether its logits are finite.
    """

    def __init__(self, logits: torch.Tensor, block: ChoiceBlock) -> None:
        tokens, sound = choose(logits, [block])
        self.token, self.is_sound = tokens[0], sound[0]
        self._logits, self._block = logits, block

    def others(self) -> Iterator[tuple[int, float]]:
        """Other tokens that might have been taken, and by how much they were not: nearest first.

        The distance is in logits; where the token was drawn, it is how far the random number is
        from one that would have drawn the other. Farther ones than the 64 likeliest are left out.
        """
        row = self._row()
        if not self._block.sampling.is_greedy:
            yield from self._drawn(row)
            return
        values, ids = row.topk(min(_LIKELIEST, row.shape[0]))
        for value, token in zip(values.tolist(), ids.tolist(), strict=True):
            if token != self.token:
                yield token, float(row[self.token]) - value

    def tolerance(self) -> float:
        """Below which distance two choices are a near-tie.

        In float32 1e-4. In smaller types four steps between numbers of the size of the likeliest
        logit: sums in another order come to that. A change of all logits by d moves the share of
        a drawn token by d / (2 * temperature) at the most.
        """
        if self._logits.dtype == torch.float32:
            bound = 1e-4
        else:
            highest = float(self._logits.float().abs().max())
            bound = 4 * torch.finfo(self._logits.dtype).eps * max(highest, 1.0)
        sampling = self._block.sampling
        return bound if sampling.is_greedy else bound / (2 * sampling.temperature)

    def _row(self) -> torch.Tensor:
        logits = self._logits.float()
        if self._block.sampling.reshapes_logits:
            logits = reshape_logits(logits, self._block)
        return logits[0]

    def _drawn(self, row: torch.Tensor) -> Iterator[tuple[int, float]]:
        block = self._block
        drawn = uniform(block.sampling.seed, *block.key, block.position)
        seen = {self.token}
        for shift in _SHIFTS:
            near = [u for u in (drawn - shift, drawn + shift) if 0.0 < u < 1.0]
            for u in near:
                token = sample(row[None], block.sampling, [u])[0]
                if token not in seen:
                    seen.add(token)
                    yield token, shift


class PlainDecoder:
    """Decodes one request after the other.

    Args:
        target: the model.
        end_token_ids: its own end-of-sequence tokens.
        token_budget: most tokens of a prompt that go through it at once.
    """

    def __init__(self, target: Target, *, end_token_ids: frozenset[int], token_budget: int) -> None:
        self._target = target
        self._end_token_ids = end_token_ids
        self._token_budget = token_budget

    def ends(self, request: Request) -> frozenset[int]:
        """Tokens that end a text."""
        sampling = request.sampling
        own = frozenset[int]() if sampling.ignore_eos else self._end_token_ids
        return own.union(sampling.stop_token_ids)

    @torch.inference_mode()
    def decode(self, request: Request, pick: Pick) -> tuple[list[int], FinishReason | None]:
        """The tokens of a text, the one that ends it included, and why it ended.

        That is None where `pick` ended it.
        The request's stop watch is used up.
        """
        sampling, prompt, ends = request.sampling, request.token_ids, self.ends(request)
        num_pages = -(-(len(prompt) + sampling.max_new_tokens) // PAGE)
        run = _Run(self._target, num_pages)
        history = TokenHistory(prompt=frozenset(prompt)) if sampling.reshapes_logits else None
        tokens: list[int] = []
        for begin in range(0, len(prompt), self._token_budget):
            logits = run.forward(prompt[begin : begin + self._token_budget])
        while True:
            position = len(prompt) + len(tokens)
            block = ChoiceBlock(
                sampling, history, (), (request.identity, request.key.sample), position, ends
            )
            token = pick(tokens, Choice(logits, block))
            if token is None:
                return tokens, None
            tokens.append(token)
            if token in ends or (request.stop_watch and request.stop_watch.feed(token)):
                return tokens, "stop"
            if len(tokens) == sampling.max_new_tokens:
                return tokens, "length"
            if history is not None:
                history.extend([token])
            logits = run.forward([token])


class _Run:
    """KV memory of one request, on pages of its own."""

    def __init__(self, target: Target, num_pages: int) -> None:
        self._target = target
        self._kv = target.new_kv(num_pages)
        self._table = np.arange(num_pages, dtype=np.int32)[None]
        self._length = 0

    def forward(self, token_ids: list[int]) -> torch.Tensor:
        """Add tokens; the logits [1, V] behind the last one."""
        count, begin = len(token_ids), self._length
        self._length += count
        span = np.array([0, count, begin], dtype=np.int32)
        step = PackedStep(span[:1], span[1:2], span[2:], self._table)
        ids = torch.tensor(token_ids, dtype=torch.int64)
        positions = torch.arange(begin, begin + count)
        return self._target.forward(ids, positions, step, self._kv, torch.tensor([count - 1]))
