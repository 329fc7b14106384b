"""Without a compiler the references run: the same text, and nobody asks for one again and again."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import as_requests, decode, random_prompts, texts, tiny_model

from adaflash_batch.engine.target import Target
from adaflash_batch.kernels import (
    decoder_stack,
    elementwise,
    native,
    paged_attention,
    tiled_linear,
)
from adaflash_batch.request import Sampling

CACHES = (
    *(native._find, elementwise._load, paged_attention._load),
    *(tiled_linear.is_available, tiled_linear._load, decoder_stack._load),
)


@pytest.fixture
def refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that refuses everything and notes each time it was asked to."""
    log = tmp_path / "asked"
    log.touch()
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo asked >> "{log}"\necho no such luck >&2\nexit 1\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "cache"))
    for each in CACHES:
        each.cache_clear()
    yield log
    for each in CACHES:
        each.cache_clear()


def test_the_references_give_the_same_text_and_the_compiler_is_asked_once(
    refusals: Path,
) -> None:
    requests = as_requests(random_prompts(3), Sampling(max_new_tokens=6))
    target = Target.of(tiny_model("llama"), "without a compiler")
    note = target.attention_note()
    assert note is not None
    assert "no such luck" in note
    assert not elementwise.is_available(torch.float32, torch.device("cpu"))
    ours = texts(decode(target, requests))
    # One question for each of the two files, whatever the number of layers, steps and callers.
    assert refusals.read_text().split() == ["asked"] * 2
    for each in CACHES:
        each.cache_clear()
    assert len(ours) == 3
    model = tiny_model("llama")
    for request in requests:
        inputs = torch.tensor([request.token_ids])
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ours[request.key] == output[0, len(request.token_ids) :].tolist()


@pytest.mark.usefixtures("refusals")
def test_a_model_in_bfloat16_runs_without_a_compiler_too() -> None:
    target = Target.of(tiny_model("llama").bfloat16(), "without a compiler")
    assert not tiled_linear.is_available()
    assert target._stacked is None
    requests = as_requests(random_prompts(3), Sampling(max_new_tokens=6))
    assert all(len(ids) == 6 for ids in texts(decode(target, requests)).values())


def test_a_change_of_any_source_is_another_build(tmp_path: Path) -> None:
    """They include each other."""
    code, other, header = (tmp_path / name for name in ("a.c", "b.c", "c.h"))
    names = set()
    for content in ("one", "two"):
        for changed in (code, other, header):
            changed.write_text(content)
            names.add(native._digest(code, ["cc"], []))
    assert len(names) == 6
