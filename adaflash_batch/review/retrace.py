"""A stored text retraced: which choices it needs that decoding again would make otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adaflash_batch.request import FinishReason, Prompt, Request
from adaflash_batch.review.plain_decoding import Choice, PlainDecoder
from adaflash_batch.text import TextCodec

# Texts part at one near-tie, rarely at two. Each attempt decodes the text once.
_MOST_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class StoredRow:
    """An output row that carries a text.

    Attributes:
        file, row: part, and row of it.
        prompt: of its input row.
        sample: of that.
        text, finish_reason, num_tokens: as stored.
    """

    file: str
    row: int
    prompt: Prompt
    sample: int
    text: str
    finish_reason: FinishReason
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """A text as it was decoded again.

    Attributes:
        text, finish_reason, num_tokens: to compare with the stored ones.
        is_sound: False where the logits were not finite.
    """

    text: str
    finish_reason: FinishReason | None
    num_tokens: int
    is_sound: bool = True

    def agrees(self, row: StoredRow) -> bool:
        """Whether it is what is stored."""
        stored = (row.text, row.finish_reason, row.num_tokens)
        return self.is_sound and (self.text, self.finish_reason, self.num_tokens) == stored


class Retracer:
    """Decodes a row again, freely or along its stored text.

    Args:
        decoder, codec: of the job.
        request: makes a new request of the row each time.
    """

    def __init__(
        self, decoder: PlainDecoder, codec: TextCodec, request: Callable[[], Request]
    ) -> None:
        self._decoder = decoder
        self._codec = codec
        self._request = request

    def freely(self) -> Attempt:
        """Take every choice as the model makes it."""
        sound = True

        def pick(_: list[int], choice: Choice) -> int | None:
            nonlocal sound
            sound = sound and choice.is_sound
            return choice.token if choice.is_sound else None

        request = self._request()
        tokens, reason = self._decoder.decode(request, pick)
        return Attempt(self._text(request, tokens), reason, len(tokens), sound)

    def along(self, row: StoredRow) -> tuple[float | None, bool]:
        """By how much the stored text was not chosen, and whether that is a near-tie.

        Only text is stored, and it can be cut into tokens in several ways. So other choices that
        were near-ties are tried, the last ones first, until decoding on from one of them gives the
        stored text; a text that no such choice leads to is not excused by one.
        """
        gap: float | None = None
        waiting: list[dict[int, tuple[int, float]]] = [{}]
        for attempt in range(_MOST_ATTEMPTS):
            if not waiting:
                break
            forced = waiting.pop()
            path = _Path(row, forced, self._fits)
            request = self._request()
            tokens, reason = self._decoder.decode(request, path.pick)
            if Attempt(self._text(request, tokens), reason, len(tokens)).agrees(row):
                return max((each for _, each in forced.values()), default=0.0), True
            if attempt == 0:
                gap = path.gap
            waiting += [forced | {place: (token, each)} for place, token, each in path.branches]
        return gap, False

    def _fits(self, row: StoredRow, tokens: list[int]) -> bool:
        """Whether the stored text may begin with these tokens, or be all of them."""
        request = self._request()
        ends, stop = self._decoder.ends(request), request.sampling.stop
        if len(tokens) >= row.num_tokens or tokens[-1] in ends:
            return len(tokens) == row.num_tokens and self._text(request, tokens) == row.text
        text = self._codec.decode(tokens, stop=(), end_ids=frozenset())
        rest = text[len(row.text) :]
        is_stop = text.startswith(row.text) and any(string.startswith(rest) for string in stop)
        return row.text.startswith(text) or is_stop

    def _text(self, request: Request, tokens: list[int]) -> str:
        ends = self._decoder.ends(request)
        return self._codec.decode(tokens, stop=request.sampling.stop, end_ids=ends)


@dataclass(slots=True)
class _Path:
    """Follows a stored text as far as the model's own choices lead.

    Attributes:
        forced: place -> token to take there, and its gap.
        branches: places behind the forced ones at which another token would fit, too, and is a
            near-tie: place, token, gap.
        gap: of the nearest token that fits, where the model's choice did not; None if none does.
    """

    row: StoredRow
    forced: dict[int, tuple[int, float]]
    fits: Callable[[StoredRow, list[int]], bool]
    branches: list[tuple[int, int, float]] = field(default_factory=list)
    gap: float | None = None

    def pick(self, tokens: list[int], choice: Choice) -> int | None:
        """See plain_decoding.Pick."""
        place = len(tokens)
        if place in self.forced:
            return self.forced[place][0]
        is_fitting = choice.is_sound and self.fits(self.row, [*tokens, choice.token])
        most = choice.tolerance()
        for token, gap in choice.others() if choice.is_sound else ():
            if gap > most and is_fitting:
                break
            if not self.fits(self.row, [*tokens, token]):
                continue
            if gap <= most and place > max(self.forced, default=-1):
                self.branches.append((place, token, gap))
            if not is_fitting:
                self.gap = gap
                break
        return choice.token if is_fitting else None
