"""Drafting from a part of the vocabulary: which drafts, which rows of the head, what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import DFLASH2, DSPARK, TINY, random_drafter, random_rows
from safetensors.torch import save_file
from tiny import VOCABULARY, tiny_llama, tiny_model
from torch import Tensor, nn

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.vocabulary import VOCABULARY as FILE
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.packed_linear import PackedLinear, can_pack
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError

MEMBERS = {
    "dflash": TINY,
    "dspark without head": dataclasses.replace(TINY, from_anchor=True),
    **{f"dspark {k}": dataclasses.replace(DSPARK, markov_head_type=k) for k in ("vanilla", "rnn")},
    "dspark gated": dataclasses.replace(DSPARK, markov_head_type="gated"),
    "dflash2": DFLASH2,
}
NETS = {name: random_drafter(config) for name, config in MEMBERS.items()}
WEIGHT = random_rows(TINY.vocab_size, TINY.hidden_size, torch.float64, seed=77)
# Several requests' worth of what `block` gives.
HIDDEN = random_rows(40 * TINY.block_size, TINY.hidden_size, torch.float64, seed=5)
ANCHORS = torch.arange(40)


@pytest.mark.parametrize("name", MEMBERS)
@given(st.sets(st.integers(0, TINY.vocab_size - 1), min_size=DFLASH2.selector_top_k))
@settings(max_examples=10, deadline=None)
def test_drafts_are_those_of_a_head_that_rules_the_others_out(name: str, chosen: set[int]) -> None:
    tokens = torch.tensor(sorted(chosen))

    def ruling_out(rows: Tensor) -> Tensor:
        logits = torch.full((len(rows), len(WEIGHT)), -math.inf, dtype=rows.dtype)
        logits[:, tokens] = rows @ WEIGHT[tokens].T
        return logits

    net = NETS[name]
    drafts = net.propose(HIDDEN, ANCHORS, lambda rows: rows @ WEIGHT[tokens].T, tokens)
    assert set(drafts.flatten().tolist()) <= chosen
    assert torch.equal(drafts, net.propose(HIDDEN, ANCHORS, ruling_out))


@pytest.mark.parametrize("name", MEMBERS)
def test_a_vocabulary_of_all_tokens_changes_no_draft(name: str) -> None:
    net, every = NETS[name], torch.arange(TINY.vocab_size)
    drafts = net.propose(HIDDEN, ANCHORS, lambda rows: rows @ WEIGHT.T)
    assert torch.equal(drafts, net.propose(HIDDEN, ANCHORS, lambda rows: rows @ WEIGHT.T, every))
    assert len({*drafts.flatten().tolist()}) > 10


class Squashed(nn.Module):
    """An output layer that is no nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * 3


def target_with(output: str, dtype: torch.dtype) -> Target:
    """A target with this output layer; the soft cap of `capped` is behind it."""
    model: Any = tiny_model("gemma2") if output == "capped" else tiny_llama(0)
    if output == "bias":
        model.lm_head.bias = nn.Parameter(torch.linspace(-2, 2, VOCABULARY))
    if output == "unknown":
        model.lm_head = Squashed(model.lm_head)
    return Target.of(model.to(dtype), output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output", ["plain", "capped", "bias", "unknown"])
@torch.inference_mode()
def test_the_head_of_some_tokens_is_those_rows_of_the_head(output: str, dtype: torch.dtype) -> None:
    target = target_with(output, dtype)
    tokens = torch.tensor([0, 3, 4, 40, VOCABULARY - 1])
    hidden = random_rows(9, target.hidden_size, dtype, seed=3)
    head = target.head_of(tokens)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(head(hidden), target.head(hidden)[:, tokens], atol=bound, rtol=bound)
    if output != "unknown":
        packs = can_pack(dtype, target.device)
        assert isinstance(head, PackedLinear if packs else nn.Linear)
        assert head.out_features == len(tokens)


def refusal(folder: Path, tensors: dict[str, Tensor], config: DrafterConfig = TINY) -> str:
    save_file(tensors, folder / FILE)
    with pytest.raises(ConfigError) as caught:
        load_vocabulary(folder, config)
    assert str(folder) in caught.value.message
    assert FILE in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("token_ids", "said"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), "int64 in one row, they are int32"),
        (torch.tensor([1.0, 2.0]), "int64 in one row, they are float32"),
        (torch.tensor([[1, 2]]), r"they are int64 [1, 2]"),
        (torch.tensor([], dtype=torch.int64), "names no token"),
        (torch.tensor([1, 5, 4]), "4 comes after 5"),
        (torch.tensor([1, 5, 5]), "5 comes after 5"),
        (torch.tensor([-1, 5]), "token -1, outside the target's vocabulary of 100"),
        (torch.tensor([5, 100]), "token 100, outside the target's vocabulary of 100"),
    ],
    ids=str,
)
def test_a_vocabulary_that_is_none_is_refused(tmp_path: Path, token_ids: Tensor, said: str) -> None:
    assert said in refusal(tmp_path, {"token_ids": token_ids})


def test_a_vocabulary_has_what_the_selector_chooses_among(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"token_ids": torch.arange(6)}, DFLASH2)
    assert "has 6 tokens, the selector chooses among 7" in said
    save_file({"token_ids": torch.arange(7)}, tmp_path / FILE)
    found = load_vocabulary(tmp_path, DFLASH2)
    assert found is not None
    assert found.tolist() == list(range(7))


def test_other_files_of_that_name_are_refused(tmp_path: Path) -> None:
    assert load_vocabulary(tmp_path, TINY) is None
    said = refusal(tmp_path, {"d2t": torch.arange(3), "t2d": torch.arange(3)})
    assert "token_ids alone, it holds d2t, t2d" in said
    (tmp_path / FILE).write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load_vocabulary(tmp_path, TINY)
