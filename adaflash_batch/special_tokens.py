"""Special tokens that a prompt spells, such as `<|im_end|>`, kept as text."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class LiteralEncoder:
    """Encodes texts that spell special tokens which must stay text, among genuine ones.

    Before the template runs, `quote` replaces what the prompt spells; in the rendered text only
    genuine special tokens are left. A twin of the tokenizer, which takes special tokens for text,
    knows the genuine ones by other names. The names hold a random number: no prompt can forge them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special = {token_id: token for token_id, token in added.items() if token.special}
        self._id_of = {token.content: token_id for token_id, token in self._special.items()}
        # What the model makes of unknown characters is no forgery; Unigram does not say what it is.
        unknown = getattr(self._backend.model, "unk_token", tokenizer.unk_token)
        self._forgeable = {i for spelt, i in self._id_of.items() if spelt != unknown}
        # The longest first, as the tokenizer matches.
        spelt = map(re.escape, sorted(self._id_of, key=len, reverse=True))
        self._pattern = re.compile("|".join(spelt) or r"(?!)")
        self._secret = secrets.token_hex(8)
        self._quoted = re.compile(f"\U000f0000{self._secret}:([0-9]+)\U000f0000")
        self._twin: Tokenizer | None = None
        self._genuine_id: dict[int, int] = {}

    def is_spelt_in(self, text: str) -> bool:
        """Whether `text` contains the text of a special token."""
        return self._pattern.search(text) is not None

    def quote(self, text: str) -> str:
        """Replace the special tokens spelt in `text` by names that no tokenizer knows."""
        return self._pattern.sub(
            lambda m: f"\U000f0000{self._secret}:{self._id_of[m[0]]}\U000f0000", text
        )

    def unquote(self, text: str) -> str:
        """Undo `quote`."""
        return self._quoted.sub(lambda m: self._special[int(m[1])].content, text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Token ids of rendered, quoted text; None if a quoted token became a special one."""
        twin = self.twin
        text = self._pattern.sub(lambda m: self._genuine_name(self._id_of[m[0]]), text)
        encoding = twin.encode(self.unquote(text), add_special_tokens=add_special_tokens)
        own = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        if any(token_id in self._forgeable and not is_added for token_id, is_added in own):
            return None
        return [self._genuine_id.get(token_id, token_id) for token_id in encoding.ids]

    @property
    def twin(self) -> Tokenizer:
        """The tokenizer that takes special tokens for text; made when first needed."""
        if self._twin is None:
            self._twin = self._make_twin()
        return self._twin

    def _make_twin(self) -> Tokenizer:
        from tokenizers import AddedToken, Tokenizer

        twin = Tokenizer.from_str(self._backend.to_str())
        twin.encode_special_tokens = True
        for token_id, token in self._special.items():
            name = self._genuine_name(token_id)
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip}
            twin.add_tokens([AddedToken(name, normalized=False, special=False, **flags)])
            new_id = twin.token_to_id(name)
            assert new_id is not None
            self._genuine_id[new_id] = token_id
        return twin

    def _genuine_name(self, token_id: int) -> str:
        return f"\U00100000{self._secret}:{token_id}\U00100000"
