"""Token ids to text: whole characters only, cut at stop strings, all at once or one by one."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# No UTF-8 sequence is longer, so an unfinished one begins within this many bytes of the end.
_LONGEST_SEQUENCE = 4
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


class Detokeniser:
    """The text of generated tokens, for one tokenizer.

    Special tokens and ids outside the vocabulary have no text. A character whose last bytes were
    not generated has none either; a replacement character that was generated, or that stands for
    wrong bytes in the middle, is kept.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        kinds = _decoder_kinds(backend)
        # Two ways in which vocabularies spell bytes; a tokenizer of neither cuts no character.
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = not self._is_byte_level and "ByteFallback" in kinds

    @property
    def spells_bytes(self) -> bool:
        """Whether the vocabulary can spell single bytes, so that no text is one unknown token."""
        return self._is_byte_level or self._has_byte_fallback

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids` up to the last whole character."""
        ids = [token_id for token_id in token_ids if not self.is_silent(token_id)]
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        if not text.endswith(_REPLACEMENT):
            return text
        unfinished = self._unfinished_bytes(ids)
        if unfinished == 0:
            return text
        if self._is_byte_level:
            return text[:-1]  # one replacement character stands for the whole sequence
        # Here a byte is a token, and one that is missing spoils the whole bytes before it too.
        return str(self._backend.decode(ids[:-unfinished], skip_special_tokens=True))

    def finished_text(
        self, token_ids: Sequence[int], *, stop: tuple[str, ...], end_ids: frozenset[int]
    ) -> str:
        """The text of a completion, without the end token or stop string that ended it."""
        if token_ids and token_ids[-1] in end_ids:
            token_ids = token_ids[:-1]
        text = self.text(token_ids)
        found = [text.find(string) for string in stop]
        return text[: min((place for place in found if place >= 0), default=len(text))]

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never adds text."""
        return token_id in self._special or self._backend.id_to_token(token_id) is None

    def is_settled(self, token_ids: Sequence[int]) -> bool:
        """Whether no later token can change the text of `token_ids` (none silent, at least one)."""
        if self._has_byte_fallback:
            return _fallback_byte(self._token(token_ids[-1])) is None
        return self._unfinished_bytes(token_ids) == 0

    def _token(self, token_id: int) -> str:
        return str(self._backend.id_to_token(token_id))

    def _unfinished_bytes(self, token_ids: Sequence[int]) -> int:
        """How many bytes at the end begin a character and do not finish it."""
        tail = b""
        for token_id in reversed(token_ids):
            piece = self._bytes(self._token(token_id))
            tail = piece + tail
            if not piece or len(tail) >= _LONGEST_SEQUENCE:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        held: bytes = decoder.getstate()[0]
        # Python holds back the beginning of a surrogate, too, which never becomes a character.
        return 0 if _SURROGATE.fullmatch(held) else len(held)

    def _bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()
        byte = _fallback_byte(token) if self._has_byte_fallback else None
        return b"" if byte is None else bytes([byte])


class StopStrings:
    """Tells when a stop string is complete in the text of the tokens fed (a `request.StopWatch`).

    Work per token does not grow with the text: only the tokens whose text can still change are
    decoded again, behind one token of context, because decoders treat the first token differently.
    """

    def __init__(self, detokeniser: Detokeniser, stop: tuple[str, ...]) -> None:
        self._detokeniser = detokeniser
        self._stop = stop
        self._overlap = max(map(len, stop)) - 1
        self._tail = ""
        self._window: list[int] = []
        self._context_length = 0

    def feed(self, token_id: int) -> bool:
        """Take the next token; True when a stop string is now complete."""
        if self._detokeniser.is_silent(token_id):
            return False
        self._window.append(token_id)
        seen = self._tail + self._detokeniser.text(self._window)[self._context_length :]
        if any(string in seen for string in self._stop):
            return True
        if self._detokeniser.is_settled(self._window):
            self._tail = seen[len(seen) - min(self._overlap, len(seen)) :]
            self._window = [token_id]
            self._context_length = len(self._detokeniser.text(self._window))
        return False


def _decoder_kinds(backend: Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    # The only way to ask a decoder what it is made of.
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", ())]}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the rest follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _fallback_byte(token: str) -> int | None:
    """The byte of a token like <0xE2>."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return int(token[3:5], 16)
    return None
