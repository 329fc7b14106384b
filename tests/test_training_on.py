"""`drafter train --from`: what goes over, what may change, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import tiny_drafter_folder
from safetensors.torch import save_file
from test_drafter_commands import (
    alphabet_model_folder,
    assert_same_weights,
    call,
    few_prompts,
    killed_when,
    measure,
    train,
    weights,
)

from adaflash_batch.drafter import checkpoint
from adaflash_batch.errors import ConfigError
from adaflash_batch.training.beginning import plan_from
from adaflash_batch.training.plan import TrainingPlan

# A rate so small that no weight moves.
STILL = {"learning_rate": 1e-30, "weight_decay": 0.0, "steps": 2}


def plan_of(model: Path, prompts: Path, out: Path, **changes: Any) -> TrainingPlan:
    usual: dict[str, Any] = {
        **{"tokens": 700, "steps": 60, "batch": 4, "anchors": 8, "learning_rate": 1e-2},
        **{"max_new_tokens": 12, "concurrency": 8, "kv_bytes": 4 * 2**20, "dtype": "float32"},
        **{"evaluate_every": 0, "threads": 1},
    }
    given = {"model": str(model), "prompts": (str(prompts),), "out": out, **usual, **changes}
    return plan_from(given)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alphabet_model_folder(tmp_path_factory.mktemp("alphabet") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_prompts(tmp_path_factory.mktemp("prompts") / "prompts.parquet", seed=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path, prompts: Path) -> Path:
    """A DFlash drafter that is worth going on with, of a shape that is no default."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    shape = {"layers": 1, "block_size": 5, "target_layers": (0, 1), "draft_vocabulary": 20}
    train(plan_of(model, prompts, out, steps=80, **shape))
    return out


def rate(folder: Path, model: Path, prompts: Path) -> float:
    return float(measure(folder, model, prompts)["decoded"]["all"]["emitted_per_step"])


def test_a_training_begins_with_the_weights_and_the_shape_of_a_drafter(
    tmp_path: Path, model: Path, prompts: Path, trained: Path
) -> None:
    out = tmp_path / "out"
    summary, _ = train(plan_of(model, prompts, out, begin_from=trained, **STILL))
    assert_same_weights(out, trained)
    assert checkpoint.inspect(out).config == checkpoint.inspect(trained).config
    name = "draft_vocabulary.safetensors"
    assert (out / name).read_bytes() == (trained / name).read_bytes()
    identity = checkpoint.identity(trained)
    assert summary["began_from"]["identity"] == identity
    card = (out / "README.md").read_text()
    for part in ("Began from", str(trained), identity[:16], "80 updates"):
        assert part in card
    assert "Began from" not in (trained / "README.md").read_text()


def test_a_drafter_grows_the_parts_of_dflash2_and_trains_on(
    tmp_path: Path, model: Path, prompts: Path, trained: Path
) -> None:
    """First they change nothing, then they learn."""
    same, out = tmp_path / "same", tmp_path / "out"
    grown = {"begin_from": trained, "member": "dflash2", "rank": 8}
    train(plan_of(model, prompts, same, **grown, **STILL))
    before, now = weights(trained), weights(same)
    for name, tensor in before.items():
        assert torch.equal(now[name], tensor), name
    assert now.keys() > before.keys()
    assert rate(same, model, prompts) == rate(trained, model, prompts)
    train(plan_of(model, prompts, out, **grown, steps=20))
    config = checkpoint.inspect(out).config
    assert (config.member, config.selector_rank, config.block_size) == ("DFlash 2", 8, 5)
    after = weights(out)
    for name in now.keys() - before.keys():
        assert not torch.equal(after[name], now[name]), name
    assert rate(out, model, prompts) > 2
    assert "DFlash 2's parts are new" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "shape",
    [
        {"from_anchor": True, "markov_rank": 4},
        {"num_hidden_layers": 1, "layer_types": ("full_attention",), "block_size": 7},
        {},
    ],
    ids=str,
)
def test_what_is_not_given_is_the_drafters(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = tiny_drafter_folder(tmp_path / "drafter", target_layer_ids=(0,), **shape)
    config = checkpoint.inspect(folder).config
    given = {"model": "m", "prompts": ("p",), "out": tmp_path / "out"}
    plan = plan_from({**given, "begin_from": folder, "layers": config.num_hidden_layers})
    assert plan.member == ("dspark" if shape.get("from_anchor") else "dflash")
    assert (plan.layers, plan.block_size) == (config.num_hidden_layers, config.block_size)
    assert (plan.target_layers, plan.mask_token) == ((0,), 1)
    assert plan_from(given) == TrainingPlan(model="m", prompts=("p",), out=tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 3}, "--layers is 3, the drafter's is 1"),
        ({"block_size": 8}, "--block-size is 8"),
        ({"target_layers": (1,)}, "--target-layers is 1, the drafter's is 0,1"),
        ({"features": 1}, "--features is 1"),
        ({"mask_token": 0}, "--mask-token is 0"),
        ({"draft_vocabulary": 10}, "--draft-vocabulary is 10, the drafter's is 20"),
        ({"draft_vocabulary": 0}, "--draft-vocabulary is 0"),
        ({"member": "dspark", "layers": 2}, "--layers is 2.*--member is dspark"),
        ({"init_from_target": True}, "--init-from-target"),
    ],
    ids=str,
)
def test_what_contradicts_the_drafter_is_refused_by_name(
    tmp_path: Path, model: Path, prompts: Path, trained: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(model, prompts, tmp_path / "out", begin_from=trained, **changes)
    with pytest.raises(ConfigError, match="--block-size is 8"):  # also of a plan made otherwise
        train(
            TrainingPlan(
                model=str(model), prompts=(str(prompts),), out=tmp_path, begin_from=trained
            )
        )


def test_only_dflash_becomes_dflash2(tmp_path: Path) -> None:
    folder = tiny_drafter_folder(tmp_path / "spark", from_anchor=True, markov_rank=4)
    given = {"model": "m", "prompts": ("p",), "out": tmp_path / "out", "begin_from": folder}
    with pytest.raises(ConfigError, match="--member is dflash2, the drafter's is dspark"):
        plan_from({**given, "member": "dflash2"})
    with pytest.raises(ConfigError, match=r"config\.json"):
        plan_from({**given, "begin_from": tmp_path / "nowhere"})


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_drafter_commands import train
from test_training_on import plan_of
model, prompts, out, drafter = map(Path, sys.argv[2:])
train(plan_of(model, prompts, out, begin_from=drafter, member="dflash2", rank=8, steps=30,
              save_every=0.0))
"""


def test_a_killed_training_goes_on_with_the_drafter_that_it_began_from(
    tmp_path: Path, model: Path, prompts: Path, trained: Path
) -> None:
    changes: dict[str, Any] = {"member": "dflash2", "rank": 8, "steps": 30}
    train(plan_of(model, prompts, tmp_path / "whole", begin_from=trained, **changes))
    out, moved, other = tmp_path / "out", tmp_path / "moved", tmp_path / "other"
    shutil.copytree(trained, moved)
    state = out.with_name("out.training") / "state.safetensors"
    killed_when([state], [str(path) for path in (model, prompts, out, trained)], _PROGRAM)
    shutil.copytree(trained, other)
    changed = {name: tensor + 1 for name, tensor in weights(trained).items()}
    save_file(changed, other / "model.safetensors")
    with pytest.raises(ConfigError, match="begin_from"):
        train(plan_of(model, prompts, out, begin_from=other, **changes))
    _, lines = train(plan_of(model, prompts, out, begin_from=moved, **changes))
    assert any("going on after" in line for line in lines)
    assert_same_weights(tmp_path / "whole", out)


def test_the_command_line_takes_it(
    tmp_path: Path, model: Path, prompts: Path, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *("train", "--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "o")),
        *("--from", str(trained), "--tokens", "300", "--steps", "2", "--max-new-tokens", "12"),
        *("--kv-memory", "4MiB", "--dtype", "float32", "--concurrency", "8", "--threads", "1"),
    ]
    code, _, told = call(capfd, *arguments, "--layers", "2")
    assert (code, "--layers is 2" in told) == (2, True)
    code, printed, told = call(capfd, *arguments)
    assert code == 0, told
    assert json.loads(printed)["began_from"]["folder"] == str(trained)
    code, printed, _ = call(capfd, "show", str(tmp_path / "o"))
    assert str(trained) in printed


def _check_same_drafts(out: Path, trained: Path) -> None:
    """All that was there is as it was, and the head was trained."""
    before, after = weights(trained), weights(out)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    added = after.keys() - before.keys()
    assert all(name.startswith("length_head.") for name in added)
    assert all(bool(after[name].any()) for name in added)


@pytest.mark.parametrize("kind", ["hazard", "adaflash"])
def test_a_drafter_is_given_a_length_head_and_drafts_the_same(
    tmp_path: Path, model: Path, prompts: Path, trained: Path, kind: str
) -> None:
    out, neutral = tmp_path / "out", tmp_path / "neutral"
    head: dict[str, Any] = {"begin_from": trained, "length_head": kind, "parameters": "heads"}
    before, _ = train(plan_of(model, prompts, neutral, **head, **STILL))
    summary, _ = train(plan_of(model, prompts, out, **head, steps=20))
    errors = [each["held_out"]["all"]["squared_error"] for each in (before, summary)]
    assert errors[1] < 0.8 * errors[0]
    _check_same_drafts(out, trained)
    config = checkpoint.inspect(out).config
    assert (config.length_head, config.length_head_width > 0) == (kind, kind == "adaflash")
    was, now = (measure(folder, model, prompts) for folder in (trained, out))
    assert now["decoded"] == was["decoded"]
    assert "ece" not in was["teacher_forced"]["all"]
    assert 0 <= now["teacher_forced"]["all"]["ece"] <= 1
    assert f"the {kind} length head is new" in (out / "README.md").read_text()
    other = "adaflash" if kind == "hazard" else "hazard"
    with pytest.raises(ConfigError, match=f"the drafter's is {kind}"):
        plan_of(model, prompts, tmp_path / "no", begin_from=out, length_head=other)
    again = plan_of(model, prompts, tmp_path / "on", begin_from=out, parameters="heads", **STILL)
    train(again)
    assert_same_weights(tmp_path / "on", out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"length_head": "guess"}, "--length-head is 'guess', it must be one of hazard, adaflash"),
        ({"length_head_width": 4}, "--length-head-width is 4, it must be 0 without --length-head"),
        ({"length_head": "hazard", "length_head_width": -1}, "--length-head-width is -1"),
        ({"parameters": "some"}, "--parameters is 'some', it must be one of all, new, heads"),
    ],
    ids=str,
)
def test_heads_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_from({"model": "m", "prompts": ("p",), "out": tmp_path, **changes})
