"""Prompts to token ids: chat template, tokenising, what does not fit. And back: `detokenise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adaflash_batch.detokenise import Detokeniser, StopStrings
from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Message, Prompt, RowError, Sampling
from adaflash_batch.special_tokens import LiteralEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LongPromptPolicy = Literal["error", "truncate-left", "truncate-right"]
SpecialTokenPolicy = Literal["text", "parse"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as tokens, and how many tokens of it were cut to make it fit."""

    token_ids: list[int]
    truncated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Draft:
    """A prompt on its way: its turns, and what the template made of them.

    is_literal: the turns spell special tokens, and these must stay text.
    cut_from: the turns from this one on are the row's own, so they may be cut.
    """

    turns: tuple[Message, ...]
    cut_from: int
    is_literal: bool
    text: str
    max_new_tokens: int


class TextCodec:
    """Turns prompts into token ids and completions into text, for one model and one job."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None,
        system_prompt: str | None,
        context: int,
        on_long_prompt: LongPromptPolicy,
        special_tokens_in_prompts: SpecialTokenPolicy,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        # A tokenizer file may carry settings of its training that cut or fill every text.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        self._template = template
        self._system_prompt = system_prompt
        self._context = context
        self._on_long_prompt = on_long_prompt
        self._literal = LiteralEncoder(tokenizer)
        self._keeps_literal = special_tokens_in_prompts == "text"
        self._detokeniser = Detokeniser(self._backend)
        # Templates write the begin-of-sequence token themselves.
        self._adds_special_tokens = template is None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        use_chat_template: bool | None = None,
        system_prompt: str | None = None,
        context: int,
        on_long_prompt: LongPromptPolicy = "error",
        special_tokens_in_prompts: SpecialTokenPolicy = "text",
        trust_remote_code: bool = False,
        chat_template: str | None = None,
    ) -> TextCodec:
        """Load the tokenizer in `folder`. Raises ConfigError.

        use_chat_template: None uses the template where there is one.
        system_prompt: put before conversations that do not begin with one.
        context: tokens that prompt and completion have together.
        special_tokens_in_prompts: whether a prompt that spells a special token, such as
            `<|im_end|>`, keeps it as text or gets the token. Those of the template are tokens.
        chat_template: used instead of the model's.
        """
        tokenizer = _load_tokenizer(folder, trust_remote_code)
        template = _choose_template(tokenizer, folder, use_chat_template, chat_template)
        if system_prompt is not None and template is None:
            raise ConfigError(
                "a system prompt needs a chat template, and none is used",
                "write the instruction into the prompts, or take a model with a chat template",
            )
        return cls(
            tokenizer,
            template=template,
            system_prompt=system_prompt,
            context=context,
            on_long_prompt=on_long_prompt,
            special_tokens_in_prompts=special_tokens_in_prompts,
        )

    @property
    def tokenizer_vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for no text."""
        added = self._tokenizer.added_tokens_decoder.items()
        return tuple(token_id for token_id, token in added if token.special)

    @property
    def uses_chat_template(self) -> bool:
        """Whether prompts go through a chat template."""
        return self._template is not None

    def end_token_ids(
        self, generation_defaults: dict[str, Any], vocab_size: int | None = None
    ) -> frozenset[int]:
        """The model's end-of-sequence tokens: the tokenizer's and those of the defaults given.

        Args:
            generation_defaults: see `model_files.generation_defaults`.
            vocab_size: of the model; a tokenizer may know of tokens that it has no logits for.
        """
        ids = set(generation_defaults.get("eos_token_id") or ())
        if self._tokenizer.eos_token_id is not None:
            ids.add(self._tokenizer.eos_token_id)
        return frozenset(i for i in ids if vocab_size is None or i < vocab_size)

    def check_content(self, kind: Literal["text", "messages"]) -> None:
        """Raise ConfigError if prompts of this kind cannot be encoded at all."""
        if kind == "messages" and self._template is None:
            raise ConfigError(
                "conversations need a chat template, and none is used",
                "take a model that has one, or give plain text with --prompt-column",
            )

    def encode(self, prompt: Prompt) -> Encoded | RowError:
        """Encode one prompt; never raises for a bad row.

        It fits if its tokens and `max_new_tokens` are within the context together.
        """
        return self.encode_many([prompt])[0]

    def encode_many(self, prompts: Sequence[Prompt]) -> list[Encoded | RowError]:
        """Encode prompts, in order; the same as `encode` one by one, and faster."""
        drafts = [self._draft(prompt) for prompt in prompts]
        plain = [d.text for d in drafts if isinstance(d, _Draft) and not d.is_literal]
        encoded = iter(self._encode_plain(plain))
        results: list[Encoded | RowError] = []
        for draft in drafts:
            if isinstance(draft, RowError):
                results.append(draft)
                continue
            ids = self._encode_literal(draft.text) if draft.is_literal else next(encoded)
            results.append(ids if isinstance(ids, RowError) else self._fit(draft, ids))
        return results

    def decode(
        self, token_ids: Sequence[int], *, stop: tuple[str, ...], end_ids: frozenset[int]
    ) -> str:
        """The text of a finished completion; see `Detokeniser`.

        It ends before the token of `end_ids` at its end and before the first stop string.
        """
        return self._detokeniser.finished_text(token_ids, stop=stop, end_ids=end_ids)

    def watch(self, sampling: Sampling) -> StopStrings | None:
        """A new watch for one request, None when it has no stop strings."""
        return StopStrings(self._detokeniser, sampling.stop) if sampling.stop else None

    def spells_special_tokens(self, prompt: Prompt) -> bool:
        """Whether the row's own text contains that of a special token."""
        own = prompt.content or ""
        parts = [own] if isinstance(own, str) else [part for turn in own for part in turn]
        return any(map(self._literal.is_spelt_in, parts))

    def rendered(self, prompt: Prompt) -> str | None:
        """The text that is tokenised, before anything is cut; None for a row with an error."""
        draft = self._draft(prompt)
        return None if isinstance(draft, RowError) else self._literal.unquote(draft.text)

    def _draft(self, prompt: Prompt) -> _Draft | RowError:
        if prompt.error is not None:
            return prompt.error
        own = prompt.content
        if own is None or own == ():
            return RowError("empty_prompt", "the row has no prompt")
        if not isinstance(own, str) and self._template is None:
            return RowError("no_chat_template", "a conversation needs a chat template")
        turns = (Message("user", own),) if isinstance(own, str) else own
        cut_from = 0
        if self._system_prompt is not None and turns[0].role != "system":
            turns, cut_from = (Message("system", self._system_prompt), *turns), 1
        parts = [part for turn in turns for part in turn]
        if not all(map(_is_unicode, parts)):
            return RowError("undecodable", "the prompt holds a lone surrogate, it is not Unicode")
        is_literal = self._keeps_literal and any(map(self._literal.is_spelt_in, parts))
        text = self._write(turns, is_literal)
        if isinstance(text, RowError):
            return text
        max_new_tokens = prompt.sampling.max_new_tokens
        length = len(self._literal.unquote(text) if is_literal else text)
        if self._on_long_prompt == "error" and length > self._most_characters:
            return self._too_long(f"more than {self._context}", max_new_tokens)
        return _Draft(turns, cut_from, is_literal, text, max_new_tokens)

    def _write(self, turns: Sequence[Message], is_literal: bool) -> str | RowError:
        """The text to tokenise; where `is_literal`, with the turns' special tokens quoted."""
        if is_literal:
            turns = [Message(*map(self._literal.quote, turn)) for turn in turns]
        if self._template is None:
            return turns[0].content
        try:
            return str(_apply(self._tokenizer, self._template, turns))
        except _template_faults() as error:
            reason = self._literal.unquote(str(error))
            return RowError("template_failed", f"the chat template fails: {reason}")

    def _encode_plain(self, texts: list[str]) -> list[list[int] | RowError]:
        try:
            encodings = self._backend.encode_batch_fast(
                texts, add_special_tokens=self._adds_special_tokens
            )
        except Exception as error:  # tokenizers has no narrower type for a text it cannot take
            if len(texts) == 1:
                return [RowError("undecodable", f"the tokenizer refuses the prompt: {error}")]
            return [self._encode_plain([text])[0] for text in texts]
        return [self._without_second_bos(encoding.ids) for encoding in encodings]

    def _without_second_bos(self, ids: list[int]) -> list[int]:
        """Drop one of the two, where the prompt wrote what the tokenizer begins all texts with."""
        is_double = self._adds_special_tokens and len(ids) > 1 and ids[0] == ids[1]
        begins = self._backend.encode("").ids[:1] if is_double else []
        return ids[1:] if begins == ids[:1] and is_double else ids

    def _encode_literal(self, text: str) -> list[int] | RowError:
        try:
            ids = self._literal.encode(text, add_special_tokens=self._adds_special_tokens)
        except Exception as error:  # as above
            return RowError("undecodable", f"the tokenizer refuses the prompt: {error}")
        if ids is None:
            return RowError(
                "undecodable",
                "the prompt spells a special token that this tokenizer cannot write as text",
            )
        return ids

    def _fit(self, draft: _Draft, ids: list[int]) -> Encoded | RowError:
        if not ids:
            return RowError("empty_prompt", "the prompt has no tokens")
        if len(ids) + draft.max_new_tokens <= self._context:
            return Encoded(ids)
        too_long = self._too_long(str(len(ids)), draft.max_new_tokens)
        if self._on_long_prompt == "error":
            return too_long
        return self._truncate(draft, len(ids)) or too_long

    def _too_long(self, num_tokens: str, max_new_tokens: int) -> RowError:
        return RowError(
            "prompt_too_long",
            f"the prompt has {num_tokens} tokens, with max_new_tokens {max_new_tokens} it exceeds "
            f"the context of {self._context}",
        )

    @cached_property
    def _most_characters(self) -> float:
        """A text of more does not fit for sure, so a giant need not be tokenised to say so."""
        from tokenizers.normalizers import NFC

        normalizer = self._backend.normalizer
        if not self._detokeniser.spells_bytes or not isinstance(normalizer, NFC | None):
            return float("inf")
        composed = 1 if normalizer is None else 4  # NFC makes at most 4 characters one
        return composed * self._context * max(map(len, self._backend.get_vocab()))

    def _truncate(self, draft: _Draft, total: int) -> Encoded | RowError | None:
        """Cut the longest turn until the prompt fits; None if that leaves nothing of it."""
        limit = self._context - draft.max_new_tokens
        own = range(draft.cut_from, len(draft.turns))
        place = max(own, key=lambda index: len(draft.turns[index].content))
        role, content = draft.turns[place]
        encoder = self._literal.twin if draft.is_literal else self._backend
        offsets = encoder.encode(content, add_special_tokens=False).offsets
        keep, step = len(offsets) - (total - limit), 1
        while keep > 0:
            if self._on_long_prompt == "truncate-left":
                cut = content[offsets[-keep][0] :]
            else:
                cut = content[: offsets[keep - 1][1]]
            turns = [*draft.turns[:place], Message(role, cut), *draft.turns[place + 1 :]]
            ids = self._encode_turns(turns, draft.is_literal)
            if isinstance(ids, RowError):
                return ids
            if len(ids) <= limit:
                return Encoded(ids, total - len(ids)) if ids else None
            # Text cut elsewhere may take more tokens, and a template need not use this turn at
            # all: the doubling bounds how often that is tried.
            keep, step = keep - max(len(ids) - limit, step), 2 * step
        return None

    def _encode_turns(self, turns: Sequence[Message], is_literal: bool) -> list[int] | RowError:
        text = self._write(turns, is_literal)
        if isinstance(text, RowError):
            return text
        return self._encode_literal(text) if is_literal else self._encode_plain([text])[0]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _template_faults() -> tuple[type[Exception], ...]:
    """What a template's own code may raise on turns that it does not expect."""
    from jinja2 import TemplateError

    python = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
    return (TemplateError, *python)


def _apply(tokenizer: Any, template: str, turns: Sequence[Message]) -> Any:
    conversation = [{"role": turn.role, "content": turn.content} for turn in turns]
    return tokenizer.apply_chat_template(
        conversation, chat_template=template, tokenize=False, add_generation_prompt=True
    )


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {reason[0]}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConfigError(
            f"the tokenizer in {folder} is a {type(tokenizer).__name__}, which has no fast form",
            "add a tokenizer.json, as the `tokenizers` library writes it",
        )
    return tokenizer


def _choose_template(
    tokenizer: Any, folder: Path, use: bool | None, override: str | None
) -> str | None:
    from jinja2 import TemplateSyntaxError

    if use is False:
        if override is not None:
            raise ConfigError("a chat template is given and chat templates are turned off")
        return None
    if override is None and not tokenizer.chat_template:
        if use:
            raise ConfigError(
                f"the model in {folder} has no chat template",
                "leave it out with --no-chat-template: prompts then go in as they are",
            )
        return None
    try:
        template = str(tokenizer.get_chat_template(override))
    except ValueError as error:  # several, and none is the default
        raise ConfigError(f"the chat template of {folder} cannot be chosen: {error}") from None
    try:
        _apply(tokenizer, template, [Message("user", "x")])
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template has an error in line {error.lineno}: {error}"
        ) from None
    except _template_faults():
        pass  # it may want other turns than these; the rows will tell
    return template
