"""Sampling refuses what it cannot mean; the nouns stay as they are."""

import dataclasses
import typing
from typing import Any

import pytest

from adaflash_batch.errors import AdaflashError, ConfigError, InputError
from adaflash_batch.request import Message, Prompt, RowKey, Sampling, sampling_fields

NAN, INFINITY = float("nan"), float("inf")

RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0.0, 0.7, 100.0], [-0.1, NAN, INFINITY]),
    ("top_p", [1.0, 1e-9], [0.0, -1.0, 1.1, NAN]),
    ("top_k", [0, 1, 10**9], [-1]),
    ("min_p", [0.0, 1.0], [-0.1, 1.1, NAN]),
    ("repetition_penalty", [0.5, 1.0, 2.0], [0.0, -1.0, NAN, INFINITY]),
    ("presence_penalty", [-2.0, 0.0, 2.0], [NAN, INFINITY, -INFINITY]),
    ("frequency_penalty", [-2.0, 0.0, 2.0], [NAN, INFINITY, -INFINITY]),
    ("min_new_tokens", [0, 512], [-1]),
    ("max_new_tokens", [1, 10**9], [0, -1]),
    ("stop", [(), ("a", "bb")], [("",), ("a", "")]),
    ("seed", [0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1]),
    ("n", [1, 10_000], [0, -1, 10_001]),
]


@pytest.mark.parametrize(("field", "right", "wrong"), RANGES)
def test_ranges(field: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert getattr(Sampling(**{field: value}), field) == value
    for value in wrong:
        with pytest.raises(ConfigError, match=field):
            Sampling(**{field: value})


def test_least_and_most_tokens_must_agree() -> None:
    Sampling(min_new_tokens=5, max_new_tokens=5)
    with pytest.raises(ConfigError, match=r"min_new_tokens \(6\) is above max_new_tokens \(5\)"):
        Sampling(min_new_tokens=6, max_new_tokens=5)


def test_replacing_checks_again() -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(Sampling(), max_new_tokens=0)


def test_greedy_is_temperature_zero_alone() -> None:
    assert Sampling().is_greedy
    assert Sampling(top_p=0.5, seed=3).is_greedy
    assert not Sampling(temperature=0.01).is_greedy


@pytest.mark.parametrize(
    ("values", "reshapes"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, False),
        ({"stop": ("x",), "stop_token_ids": (1,), "ignore_eos": True}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"min_new_tokens": 1}, True),
        ({"logit_bias": ((3, 1.0),)}, True),
    ],
)
def test_what_reshapes_logits(values: dict[str, Any], reshapes: bool) -> None:
    assert Sampling(**values).reshapes_logits is reshapes


def test_every_field_that_a_column_may_set_exists_with_its_kind() -> None:
    hints = typing.get_type_hints(Sampling)
    kinds = {
        "float": float,
        "int": int,
        "bool": bool,
        "strings": tuple[str, ...],
        "ints": tuple[int, ...],
    }
    for field, kind in sampling_fields().items():
        assert hints[field] == kinds[kind]
    assert set(hints) - set(sampling_fields()) == {"logit_bias"}


def test_nouns_cannot_be_changed_and_can_be_keys() -> None:
    prompt = Prompt(0, 1, 2, (Message("user", "hi"),), Sampling())
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.row = 3  # type: ignore[misc]
    assert {Sampling(): 1}[Sampling()] == 1
    assert RowKey(0, 2, 0) < RowKey(0, 10, 0) < RowKey(1, 0, 0)


def test_exit_codes_of_errors() -> None:
    error = InputError("what", "do")
    assert (str(error), error.message, error.hint) == ("what", "what", "do")
    assert [kind.exit_code for kind in (AdaflashError, ConfigError, InputError)] == [1, 2, 5]
