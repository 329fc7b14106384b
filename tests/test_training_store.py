"""Decoded texts that trainings share: which layers are read, what must agree, when it is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_drafter_commands import (
    alphabet_model_folder,
    assert_same_weights,
    few_prompts,
    killed_when,
    plan_of,
    train,
)

from adaflash_batch.adapt.trajectory_store import Taps
from adaflash_batch.errors import ConfigError
from adaflash_batch.training.claims import StoreSettings, settings_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alphabet_model_folder(tmp_path_factory.mktemp("alphabet") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_prompts(tmp_path_factory.mktemp("prompts") / "prompts.parquet", seed=1)


def chunks(store: Path) -> dict[Path, int]:
    """Its files with the times of their last change."""
    return {path: path.stat().st_mtime_ns for path in store.rglob("*.safetensors")}


def test_columns_are_those_of_the_wanted_layers_in_their_order() -> None:
    features = torch.arange(24.0).reshape(2, 12)  # layers 1, 8, 15, 22 of size 3
    stored = (1, 8, 15, 22)
    first, second = features[:, 3:6], features[:, 9:12]
    assert torch.equal(Taps(stored, (8, 22)).of(features), torch.cat((first, second), 1))
    assert torch.equal(Taps(stored, (22, 8)).of(features), torch.cat((second, first), 1))
    assert torch.equal(Taps(stored, stored).of(features), features)


@pytest.mark.parametrize("layers", [(0,), (1,)], ids=str)
def test_a_training_reads_some_of_the_stored_layers(
    tmp_path: Path, model: Path, prompts: Path, layers: tuple[int, ...]
) -> None:
    """With the very weights that it has from texts of its own."""
    store = tmp_path / "store"
    train(plan_of(model, prompts, tmp_path / "filler", steps=1, trajectories=store))
    made = chunks(store)
    plan = plan_of(model, prompts, tmp_path / "alone", steps=6, target_layers=layers)
    train(plan)
    train(
        plan_of(model, prompts, tmp_path / "out", steps=6, target_layers=layers, trajectories=store)
    )
    assert chunks(store) == made
    assert_same_weights(tmp_path / "alone", tmp_path / "out")


def test_a_store_is_filled_further_with_its_own_layers_and_chunks(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    store, other = tmp_path / "store", {"target_layers": (1,), "steps": 6}
    train(plan_of(model, prompts, tmp_path / "filler", steps=1, tokens=300, trajectories=store))
    plan = plan_of(
        model, prompts, tmp_path / "out", tokens=1500, trajectories=store, concurrency=3, **other
    )
    _, lines = train(plan)
    assert any("--concurrency" in line and "8" in line for line in lines)
    train(plan_of(model, prompts, tmp_path / "alone", tokens=1500, **other))
    assert_same_weights(tmp_path / "alone", tmp_path / "out")
    whole = {"tokens": 1500, "steps": 2, "target_layers": (0, 1)}
    train(plan_of(model, prompts, tmp_path / "both", trajectories=store, **whole))
    train(plan_of(model, prompts, tmp_path / "both alone", **whole))
    assert_same_weights(tmp_path / "both", tmp_path / "both alone")


def test_a_store_that_lacks_a_layer_is_refused_naming_both(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    store = tmp_path / "store"
    train(
        plan_of(model, prompts, tmp_path / "one", steps=1, target_layers=(1,), trajectories=store)
    )
    made = chunks(store)
    with pytest.raises(ConfigError, match=r"store holds target layers 1, wanted are 0, 1"):
        train(plan_of(model, prompts, tmp_path / "two", steps=1, trajectories=store))
    assert chunks(store) == made
    with pytest.raises(ConfigError, match="target_layer_ids"):
        train(plan_of(model, prompts, tmp_path / "x", target_layers=(2,), trajectories=store / "x"))
    # What was refused has taken no folder.
    train(plan_of(model, prompts, tmp_path / "x1", steps=1, trajectories=store / "x"))
    train(plan_of(model, prompts, tmp_path / "two", steps=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 11},
        {"sampled_share": 0.5},
        {"seed": 1},
        {"held_out": 0.2},
        {"max_held_out": 3},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_what_decides_the_texts_must_be_equal(
    tmp_path: Path, model: Path, prompts: Path, changes: dict[str, object]
) -> None:
    store = tmp_path / "store"
    train(plan_of(model, prompts, tmp_path / "one", steps=1, trajectories=store))
    with pytest.raises(ConfigError, match=f"other settings: {next(iter(changes))}$"):
        train(plan_of(model, prompts, tmp_path / "two", trajectories=store, **changes))


def test_a_store_as_first_written_can_still_be_read(tmp_path: Path) -> None:
    """Its facts named features, a bound of the disk, and () for layers that are spread."""
    own = {"seed": 0, "concurrency": 64, "disk_bytes": 2**34, "features": 5}
    facts = tmp_path / "facts.json"
    asked = StoreSettings((1, 22), 8)
    facts.write_text(json.dumps(own | {"target_layers": [1, 8, 15, 22, 28]}))
    assert settings_of(tmp_path, {"seed": 0}, asked, 30) == StoreSettings((1, 8, 15, 22, 28), 64)
    facts.write_text(json.dumps(own | {"target_layers": []}))
    spread = StoreSettings((1, 8), 8)
    assert settings_of(tmp_path, {"seed": 0}, spread, 30).layers == (1, 8, 14, 20, 27)
    with pytest.raises(ConfigError, match=r"1, 8, 14, 20, 27, wanted are 1, 22"):
        settings_of(tmp_path, {"seed": 0}, asked, 30)


def test_a_full_disk_drops_nothing_that_is_shared(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    """And the bound decides nothing else: with more room the same training goes on."""
    store, changes = tmp_path / "store", {"steps": 4, "tokens": 3000}
    narrow = plan_of(
        model, prompts, tmp_path / "out", trajectories=store, disk_bytes=250_000, **changes
    )
    with pytest.raises(ConfigError, match=r"store/train take more than --disk allows"):
        train(narrow)
    assert (store / "train" / "chunk-000000").exists()
    train(plan_of(model, prompts, tmp_path / "out", trajectories=store, **changes))
    train(plan_of(model, prompts, tmp_path / "alone", **changes))
    assert_same_weights(tmp_path / "alone", tmp_path / "out")


def test_texts_of_which_some_were_dropped_are_not_shared(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    changes = {"tokens": 3000, "steps": 4, "concurrency": 4, "disk_bytes": 240_000}
    plan = plan_of(model, prompts, tmp_path / "out", **changes)
    train(plan)
    store = plan.store
    assert not (store / "train" / "chunk-000000").exists()
    with pytest.raises(ConfigError, match="has dropped its oldest texts"):
        train(plan_of(model, prompts, tmp_path / "other", steps=4, trajectories=store))


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_drafter_commands import plan_of, train
model, prompts, out, store = map(Path, sys.argv[2:])
train(plan_of(model, prompts, out, tokens=2500, trajectories=store, decode_only=True))
"""


def test_texts_are_decoded_ahead_of_trainings(tmp_path: Path, model: Path, prompts: Path) -> None:
    """Also by a process that is killed on the way, and without a folder for a drafter."""
    out, store = tmp_path / "out", tmp_path / "store"
    arguments = [str(path) for path in (model, prompts, out, store)]
    killed_when([store / "train" / "chunk-000001"], arguments, _PROGRAM)
    plan = plan_of(model, prompts, out, tokens=2500, trajectories=store, decode_only=True)
    summary, _ = train(plan)
    assert summary["trajectories"] == str(store)
    assert summary["tokens"] >= 2500
    assert 0 < summary["texts"] <= summary["tokens"] / 2
    assert (summary["held_out_texts"], summary["target_layers"]) == (10, [0, 1])
    assert summary.pop("seconds") > 0
    made = chunks(store)
    again, _ = train(plan)
    assert again.pop("seconds") == 0
    assert again == summary
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    trained = {"tokens": 2500, "steps": 6}
    train(plan_of(model, prompts, out, trajectories=store, **trained))
    assert chunks(store) == made
    train(plan_of(model, prompts, tmp_path / "alone", **trained))
    assert_same_weights(tmp_path / "alone", out)


def test_texts_decoded_ahead_are_not_dropped(tmp_path: Path, model: Path, prompts: Path) -> None:
    """Rounds that would have read them are yet to come."""
    rounds = {"tokens": 3000, "steps": 4, "rounds": 4, "concurrency": 4}
    plan = plan_of(model, prompts, tmp_path / "out", decode_only=True, disk_bytes=240_000, **rounds)
    with pytest.raises(ConfigError, match="take more than --disk allows"):
        train(plan)
    train(plan_of(model, prompts, tmp_path / "out", disk_bytes=240_000, **rounds))
    train(plan_of(model, prompts, tmp_path / "alone", disk_bytes=240_000, **rounds))
    assert_same_weights(tmp_path / "alone", tmp_path / "out")
