"""Whether a model can decode what a row became: tokens and settings against its vocabulary."""

from __future__ import annotations

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Prompt, RowError
from adaflash_batch.sampling_defaults import check_token_ids
from adaflash_batch.text import Encoded


def refusal(prompt: Prompt, encoded: Encoded, vocab_size: int) -> RowError | None:
    """Why the model cannot decode a row that the tokenizer took, None if it can."""
    highest = max(encoded.token_ids)
    if highest >= vocab_size:
        message = f"the tokenizer makes it token {highest}, the model's vocabulary has "
        return RowError("unknown_token", f"{message}{vocab_size}")
    try:
        check_token_ids(prompt.sampling, vocab_size)
    except ConfigError as error:
        return RowError("bad_sampling", error.message)
    return None
