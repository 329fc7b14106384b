"""What a step emits, decided on the device: choices, accepted drafts, the bonus token, the end.

The PyTorch reference, and which form runs. A draft is accepted where the target's own choice equals
it, see engine/accept.py; the choice is the argmax, or that of sampling.sample at a keyed uniform.
Rows with penalties, a bias or a least length are not told apart: whoever has such requests reshapes
their logits first (engine.sampling.reshape_logits), into memory of their own.

# R rows of logits, S requests, M rows of a request at most, V vocabulary, E ends at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from adaflash_batch.kernels.sampling import sample, uniform
from adaflash_batch.request import Sampling

GOES_ON, STOP, LENGTH, UNSOUND = 0, 1, 2, 3
"""Why a request's text ends, if it does; unsound: logits that decide are not finite."""

NUM_FLOATS, NUM_INTEGERS, NUM_COUNTS = 4, 6, 4
_NO_TOKEN = -1
NOBODY = -1
"""In Rows.request: the row is padding."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How the tokens of requests are chosen, and where their texts end.

    Attributes:
        floats: float64 [S, 4]: temperature (0 for the argmax), top_p, min_p and its logarithm.
        integers: int64 [S, 6 + E]: top_k; the bits of seed and row identity; sample; absolute
            position of the first row's token; tokens that there is room for, at least 1; then the
            tokens that end the text, filled up with -1.
    """

    floats: torch.Tensor
    integers: torch.Tensor

    @property
    def ends(self) -> torch.Tensor:
        """[S, E]."""
        return self.integers[:, NUM_INTEGERS:]


class Choosing(NamedTuple):
    """A request, for `rules_of`."""

    sampling: Sampling
    key: tuple[int, int]
    position: int
    room: int
    ends: Sequence[int] = ()


def rules_of(requests: Sequence[Choosing], num_ends: int | None = None) -> Rules:
    """On the host; with so many ends, where it must always be the same number."""
    most = max((len(each.ends) for each in requests), default=0) if num_ends is None else num_ends
    floats = np.zeros((len(requests), NUM_FLOATS))
    integers = np.full((len(requests), NUM_INTEGERS + most), _NO_TOKEN, dtype=np.int64)
    # As the host's filter takes it: the logarithm of a float32.
    min_p = torch.tensor([each.sampling.min_p for each in requests], dtype=torch.float32)
    for row, (sampling, (identity, index), position, room, ends) in enumerate(requests):
        words = (sampling.top_k, _signed(sampling.seed), _signed(identity), index, position, room)
        integers[row, : NUM_INTEGERS + len(ends)] = [*words, *sorted(ends)]
        floats[row, :3] = sampling.temperature, sampling.top_p, sampling.min_p
    floats[:, 3] = min_p.log().numpy()
    return Rules(torch.from_numpy(floats), torch.from_numpy(integers))


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return (word + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of logits belong to whom.

    Attributes:
        first: int32 [S], the row behind each request's anchor.
        count: int32 [S], its drafts and one; 0 where nothing is chosen for it.
        request: int32 [R], whose each row is; -1 is padding.
        drafts: int32 or int64 [R], the draft behind each row, anything in a request's last one.
        most: M, no count is larger.
    """

    first: torch.Tensor
    count: torch.Tensor
    request: torch.Tensor
    drafts: torch.Tensor
    most: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step adds to texts, as one array that can be copied at once.

    Attributes:
        numbers: int32 [S, 4 + M]: tokens emitted; drafts accepted (the bonus not counted, nothing
            behind an end); one of GOES_ON, STOP, LENGTH, UNSOUND; the last token, the next anchor;
            the tokens, with -1 behind them.
    """

    numbers: torch.Tensor

    @property
    def count(self) -> torch.Tensor:
        """[S], tokens emitted."""
        return self.numbers[:, 0]

    @property
    def accepted(self) -> torch.Tensor:
        """[S], drafts accepted."""
        return self.numbers[:, 1]

    @property
    def reason(self) -> torch.Tensor:
        """[S], why it ends."""
        return self.numbers[:, 2]

    @property
    def last(self) -> torch.Tensor:
        """[S], -1 where nothing was emitted."""
        return self.numbers[:, 3]

    @property
    def tokens(self) -> torch.Tensor:
        """[S, M]."""
        return self.numbers[:, NUM_COUNTS:]


class Accept(Protocol):
    """Chooses, accepts and cuts."""

    def __call__(
        self, logits: torch.Tensor, rows: Rows, rules: Rules, uniforms: torch.Tensor | None = None
    ) -> Emitted:
        """What a step emits.

        Args:
            logits: [R, V] in any float type, rows contiguous; not written to.
            rows: whose they are.
            rules: their requests'.
            uniforms: float64 [R] in (0, 1), instead of the keyed ones.
        """


def accept_beside(kind: str) -> Accept:
    """The form that runs where attention is of this kind: Triton's beside Triton's."""
    if kind != "triton":
        return accept_reference
    from adaflash_batch.kernels import triton_accept

    return triton_accept.accept


def accept_reference(
    logits: torch.Tensor, rows: Rows, rules: Rules, uniforms: torch.Tensor | None = None
) -> Emitted:
    """See Accept. In PyTorch, on any device; it reads everything back to the host."""
    highest, choices = logits.max(dim=-1)  # NaN wins, so it shows
    sound = highest.isfinite()
    numbers = torch.zeros(len(rows.count), NUM_COUNTS + rows.most, dtype=torch.int32)
    numbers[:, NUM_COUNTS - 1 :] = _NO_TOKEN
    spans = zip(rows.first.tolist(), rows.count.tolist(), strict=True)
    for request, (first, count) in enumerate(spans):
        if not count:
            continue
        span = slice(first, first + count)
        temperature = float(rules.floats[request, 0])
        chosen = choices[span]
        if temperature and bool(sound[span].all()):
            drawn = _uniforms(rules, request, count) if uniforms is None else uniforms[span]
            chosen = torch.tensor(
                sample(logits[span].float(), _sampling(rules, request), drawn.tolist())
            )
        drafts = rows.drafts[first : first + count - 1]
        _settle(numbers[request], chosen.cpu(), sound[span], drafts, rules.integers[request])
    return Emitted(numbers.to(logits.device))


def _sampling(rules: Rules, request: int) -> Sampling:
    temperature, top_p, min_p, _ = rules.floats[request].tolist()
    top_k = int(rules.integers[request, 0])
    return Sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)


def _uniforms(rules: Rules, request: int, count: int) -> torch.Tensor:
    seed, identity, index, position = rules.integers[request, 1:5].tolist()
    drawn = [uniform(seed, identity, index, position + each) for each in range(count)]
    return torch.tensor(drawn, dtype=torch.float64)


def _settle(
    numbers: torch.Tensor,
    choices: torch.Tensor,
    sound: torch.Tensor,
    drafts: torch.Tensor,
    integers: torch.Tensor,
) -> None:
    """Write a request's row of `Emitted.numbers`, of the tokens that were chosen for it."""
    is_right = choices[:-1] == drafts.to(choices.device)
    accepted = int(is_right.long().cumprod(0).sum())
    if not bool(sound[: accepted + 1].all()):
        numbers[2] = UNSOUND
        return
    room, ends = int(integers[5]), integers[NUM_INTEGERS:].to(choices.device)
    emitted = choices[: min(accepted + 1, room)]
    (at,) = torch.nonzero(torch.isin(emitted, ends), as_tuple=True)
    is_long = len(emitted) >= room
    reason = STOP if len(at) else LENGTH if is_long else GOES_ON
    count = int(at[0]) + 1 if len(at) else len(emitted)
    values = [count, min(accepted, count), reason, int(emitted[count - 1])]
    numbers[:NUM_COUNTS] = torch.tensor(values)
    numbers[NUM_COUNTS : NUM_COUNTS + count] = emitted[:count]
