"""Our own part of a drafter: the last state and the anchor in every row of a block."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import PROJECTED, TINY, random_drafter, random_rows
from safetensors.torch import save_file
from test_drafter_conventions import FACTS, FOLLOWER, LEADER, V, chain, target, trained
from test_drafter_conventions import PROJECTED as CYCLE
from tiny import as_requests, decode
from torch import Tensor

from adaflash_batch.drafter.checkpoint import load, save
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.vocabulary import VOCABULARY
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Sampling
from adaflash_batch.training.export import export

__all__ = ["target"]  # a fixture

KV_TOKENS = 5 * PAGE


def normed(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + PROJECTED.rms_norm_eps).sqrt()


def test_every_row_of_a_block_gets_its_own_blocks_projection() -> None:
    net = random_drafter(PROJECTED)
    embeddings = random_rows(2 * PROJECTED.block_size, 48, torch.float64, 1)
    states = random_rows(2, 48, torch.float64, 2)
    weights = dict(net.named_parameters())
    expected = []
    for block, rows in enumerate(embeddings.split(PROJECTED.block_size)):  # type: ignore[no-untyped-call]
        state = normed(states[block]) * weights["input_projection.norm.weight"]
        added = weights["input_projection.proj.weight"] @ torch.cat((state, normed(rows[0])))
        expected.append(rows + added)
    torch.testing.assert_close(net.rows(embeddings, states), torch.cat(expected))


def test_without_it_rows_are_the_embeddings() -> None:
    embeddings = random_rows(5, 48, torch.float64, 1)
    states = random_rows(1, 48, torch.float64, 2)
    assert random_drafter(TINY).rows(embeddings, states) is embeddings


def test_decoding_hands_over_the_state_before_each_anchor(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This target's states are its tokens; five pages for six requests force preemptions."""
    seen: list[tuple[Tensor, Tensor]] = []
    rows = DFlash.rows

    def watched(net: DFlash, embeddings: Tensor, states: Tensor) -> Tensor:
        seen.append((embeddings[:: CYCLE.block_size], states))
        return rows(net, embeddings, states)

    monkeypatch.setattr(DFlash, "rows", watched)
    net = trained(CYCLE)
    starts = torch.tensor([3, 7, 12, 19, 25, 30])
    lengths = (PAGE - 3, 1, PAGE, 5, PAGE - 1, 2)
    prompts = [
        chain(start, length, FOLLOWER).tolist()
        for start, length in zip(starts, lengths, strict=True)
    ]
    requests = as_requests(prompts, Sampling(max_new_tokens=30))
    drafter = BlockDrafter(net, target, KV_TOKENS // PAGE)
    decode(target, requests, drafter=drafter, kv_tokens=KV_TOKENS, max_running=4)
    anchors, states = (torch.cat(part) for part in zip(*seen, strict=True))
    assert len(anchors) > 30
    torch.testing.assert_close(states, torch.eye(V)[LEADER[anchors.argmax(-1)]])


def test_it_survives_saving_and_is_told_in_the_config(tmp_path: Path) -> None:
    net = trained(CYCLE)
    save(net, tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["dflash_config"]["input_projection"] is True
    loaded = load(tmp_path / "drafter", FACTS, dtype=torch.float32)
    assert loaded.config == CYCLE
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


def without(config: dict[str, Any]) -> dict[str, Any]:
    own = {k: v for k, v in config["dflash_config"].items() if k != "input_projection"}
    return {**config, "dflash_config": own}


def test_its_weights_alone_are_refused(tmp_path: Path) -> None:
    save(trained(CYCLE), tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps(without(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match="unexpected input_projection"):
        load(tmp_path / "drafter", FACTS, dtype=torch.float32)


def test_a_published_layout_never_has_it(tmp_path: Path) -> None:
    plain = dataclasses.replace(CYCLE, has_input_projection=False)
    save(trained(plain), tmp_path / "drafter")
    assert "input_projection" not in (tmp_path / "drafter" / "config.json").read_text()


def test_export_leaves_our_own_parts_out(tmp_path: Path) -> None:
    save(trained(CYCLE), tmp_path / "ours")
    save_file({"token_ids": torch.arange(5)}, tmp_path / "ours" / VOCABULARY)
    told = list(export(tmp_path / "ours", tmp_path / "published"))
    assert [line.split(",")[0] for line in told[:2]] == [
        "left out: the input projection",
        "left out: the draft vocabulary",
    ]
    files = {path.name for path in (tmp_path / "published").iterdir()}
    assert files == {"config.json", "model.safetensors"}
    exported = load(tmp_path / "published", FACTS, dtype=torch.bfloat16)
    assert exported.config == dataclasses.replace(CYCLE, has_input_projection=False)
    ours = trained(CYCLE).state_dict()
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, ours[name].bfloat16()), name
    with pytest.raises(ConfigError, match="exists already"):
        list(export(tmp_path / "ours", tmp_path / "published"))
