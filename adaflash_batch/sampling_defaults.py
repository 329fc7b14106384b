"""What a model's own files say of sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Sampling


def default_sampling(defaults: dict[str, Any]) -> Sampling:
    """A model's generation config as Sampling. Raises ConfigError where it holds a wrong value."""
    names = {field.name for field in dataclasses.fields(Sampling)}
    known = {name: value for name, value in defaults.items() if name in names}
    try:
        return Sampling(**known)
    except ConfigError as error:
        raise ConfigError(
            f"the model's generation_config.json is wrong: {error.message}",
            "set the value yourself, with its flag or in the job file",
        ) from error


def check_token_ids(sampling: Sampling, vocab_size: int) -> None:
    """Raises ConfigError for a token id that the model's vocabulary has not."""
    ids = [*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)]
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ConfigError(f"token id {wrong} is not in the model's vocabulary of {vocab_size}")
