"""`adaflash-batch drafter train | show | eval` as a person meets them, on tiny models."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from folders import (
    END,
    VOCABULARY,
    byte_tokenizer,
    tiny_drafter_folder,
    tiny_model_folder,
    token_of,
    write_rows,
)
from safetensors.torch import load_file
from tiny import tiny_llama

from adaflash_batch import cli
from adaflash_batch.drafter import checkpoint
from adaflash_batch.errors import ConfigError, LockedError
from adaflash_batch.training.evaluation import EvaluationPlan, evaluate_drafter
from adaflash_batch.training.plan import TrainingPlan
from adaflash_batch.training.train import train_drafter

LETTERS = "abcdefgh"


def alphabet_model_folder(path: Path) -> Path:
    """A model that says the letter after the last one, for ever: its layers add nothing."""
    model = tiny_llama(0, vocab_size=VOCABULARY)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    embedding = model.get_input_embeddings().weight
    embedding.data = torch.nn.functional.normalize(embedding.data, dim=-1)
    ids = [token_of(letter) for letter in LETTERS]
    before = torch.arange(VOCABULARY)
    before[ids] = torch.tensor([ids[-1], *ids[:-1]])
    model.get_output_embeddings().weight.data = embedding.data[before].clone()
    model.save_pretrained(path)
    byte_tokenizer(template=None).save_pretrained(path)
    return path


def letter_texts(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choices(LETTERS, k=dice.randint(2, 9))) for _ in range(count)]


def few_prompts(path: Path, seed: int) -> Path:
    """80 of them, every eighth held out."""
    split = ["heldout" if row % 8 == 0 else "train" for row in range(80)]
    return write_rows(path, {"prompt": letter_texts(seed, 80), "split": split})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alphabet_model_folder(tmp_path_factory.mktemp("alphabet") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    split = ["heldout" if row % 12 < 2 else "train" for row in range(120)]
    # What cannot be decoded costs nobody else.
    rows = {
        "prompt": pa.array([None, "x" * 300, *letter_texts(0, 120)]),
        "domain": ["even", "odd", *["even", "odd"] * 60],
        "split": ["train", "train", *split],
    }
    return write_rows(tmp_path_factory.mktemp("prompts") / "prompts.parquet", rows)


def plan_of(model: Path, prompts: Path, out: Path, **changes: Any) -> TrainingPlan:
    usual: dict[str, Any] = {
        "tokens": 700,
        "steps": 60,
        "batch": 4,
        "anchors": 8,
        "block_size": 5,
        "layers": 1,
        "target_layers": (0, 1),
        "rank": 8,
        "learning_rate": 1e-2,
        "max_new_tokens": 12,
        "concurrency": 8,
        "kv_bytes": 4 * 2**20,
        "dtype": "float32",
        "evaluate_every": 20,
        "threads": 1,
    }
    return TrainingPlan(model=str(model), prompts=(str(prompts),), out=out, **(usual | changes))


def train(plan: TrainingPlan) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    return train_drafter(plan, command="the command", notify=lines.append), lines


def measure(folder: Path, model: Path, prompts: Path) -> dict[str, Any]:
    plan = EvaluationPlan(
        folder=folder,
        model=str(model),
        prompts=(str(prompts),),
        max_new_tokens=24,
        dtype="float32",
        threads=1,
    )
    return evaluate_drafter(plan, notify=lambda line: None)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("member", "changes"),
    [
        ("dflash", {}),
        ("dflash", {"draft_vocabulary": 20, "compute": "bfloat16", "objective": "opd"}),
        ("dspark", {"init_from_target": True, "confidence_head": True}),
        ("dflash2", {"rounds": 2, "objective": "forward_kl"}),
    ],
    ids=["dflash", "draft vocabulary", "dspark", "dflash2 in rounds"],
)
def test_a_trained_drafter_is_accepted(
    tmp_path: Path, model: Path, prompts: Path, member: str, changes: dict[str, Any]
) -> None:
    changes = {"steps": 150} | changes
    out = tmp_path / "drafter"
    summary, lines = train(plan_of(model, prompts, out, member=member, **changes))
    figures = measure(out, model, prompts)
    untrained = tiny_drafter_folder(tmp_path / "random")
    before = measure(untrained, model, prompts)["decoded"]["all"]["emitted_per_step"]
    after = figures["decoded"]["all"]["emitted_per_step"]
    assert before < 1.2
    assert after > 2.5, figures
    # What was counted on stored texts is what decoding does.
    for domain in ("even", "odd", "all"):
        decoded, forced = figures["decoded"][domain], figures["teacher_forced"][domain]
        assert decoded["steps"] == forced["steps"]
        assert decoded["emitted_per_step"] == forced["emitted_per_step"]
        assert decoded["accepted_by_position"] == forced["accepted_by_position"]
    assert set(summary["held_out"]) == {"even", "odd", "all"}
    assert summary["held_out"]["all"]["emitted_per_step"] > 2
    assert summary["updates"] == 150
    assert summary["tokens"] >= 700
    assert any("left out" in line for line in lines)
    looks = [line for line in lines if line.startswith("held-out τ after update ")]
    numbers = [int(line.split()[4].rstrip(":")) for line in looks]
    rounds = changes.get("rounds", 1)
    assert numbers == [(total - 1) % (150 // rounds) + 1 for total in range(20, 151, 20)]
    assert all(("of round" in line) is (rounds > 1) for line in looks)
    assert all(re.search(r": even \d\.\d\d, odd \d\.\d\d$", line) for line in looks)
    assert figures["refused"] == 2
    _check_card(out, summary)


def _check_card(out: Path, summary: dict[str, Any]) -> None:
    card = (out / "README.md").read_text()
    for part in ("the command", "150 updates", "even", "odd", "h decoding"):
        assert part in card
    assert f"{summary['tokens']} tokens" in card
    assert str(summary["held_out"]["all"]["emitted_per_step"]) in card


def test_a_draft_vocabulary_comes_with_the_drafter(
    tmp_path: Path, model: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(plan_of(model, prompts, tmp_path / "out", draft_vocabulary=10, steps=2))
    code, printed, _ = call(capfd, "show", str(tmp_path / "out"))
    assert (code, f"10 of the target's {VOCABULARY} tokens" in printed) == (0, True)
    tokens = load_file(tmp_path / "out" / "draft_vocabulary.safetensors")["token_ids"].tolist()
    assert len(tokens) == 10
    assert {*(token_of(letter) for letter in LETTERS), END} <= {*tokens}


def test_the_same_seed_gives_the_same_weights(tmp_path: Path, model: Path, prompts: Path) -> None:
    for name in ("one", "two"):
        train(plan_of(model, prompts, tmp_path / name, steps=10, rounds=2, sampled_share=0.5))
    assert_same_weights(tmp_path / "one", tmp_path / "two")
    train(plan_of(model, prompts, tmp_path / "three", steps=10, rounds=2, seed=1))
    first, third = weights(tmp_path / "one"), weights(tmp_path / "three")
    assert not any(torch.equal(first[n], third[n]) for n in first if "proj" in n)


def test_trajectories_are_shared_between_trainings(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    store = tmp_path / "store"
    train(plan_of(model, prompts, tmp_path / "alone", steps=4))
    train(plan_of(model, prompts, tmp_path / "filler", steps=2, tokens=1500, trajectories=store))
    made = {path: path.stat().st_mtime_ns for path in store.rglob("*.safetensors")}
    train(plan_of(model, prompts, tmp_path / "out", steps=4, trajectories=store))
    assert {p: p.stat().st_mtime_ns for p in store.rglob("*.safetensors")} == made
    assert_same_weights(tmp_path / "alone", tmp_path / "out")
    with pytest.raises(ConfigError, match="max_new_tokens"):
        train(plan_of(model, prompts, tmp_path / "x", max_new_tokens=11, trajectories=store))


def test_the_disk_bound_holds(tmp_path: Path, model: Path, prompts: Path) -> None:
    sizes = []
    bound, work = 240_000, tmp_path / "out.training" / "trajectories"
    plan = plan_of(model, prompts, tmp_path / "out", tokens=3000, steps=4, rounds=4)
    plan = dataclasses.replace(plan, disk_bytes=bound, concurrency=4)

    def listen(line: str) -> None:
        sizes.append(sum(p.stat().st_size for p in work.glob("*/*/*")))

    summary = train_drafter(plan, command="x", notify=listen)
    assert summary["tokens"] >= 3000  # type: ignore[operator]
    files = [p.stat().st_size for p in work.glob("*/*/*")]
    assert len(sizes) > 3
    assert max(*sizes, sum(files)) <= bound
    assert not (work / "train" / "chunk-000000").exists()
    assert (work / "held-out" / "chunk-000000").exists()
    small = dataclasses.replace(plan, out=tmp_path / "small", disk_bytes=20_000)
    with pytest.raises(ConfigError, match="--disk"):
        train(small)


_PROGRAM = """
import sys, dataclasses
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from test_drafter_commands import plan_of, train
plan = plan_of(Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), save_every=0.0,
               tokens=2500, steps=30, rounds=2)
torch.set_num_threads(1)
train(plan)
"""


def killed_when(found: Sequence[Path], arguments: list[str], program: str = _PROGRAM) -> None:
    """Start the training in a process of its own; SIGKILL it when one of these paths is there."""
    command = [sys.executable, "-c", program, str(Path(__file__).parent), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not any(path.exists() for path in found):
            if process.poll() is not None:
                assert process.stderr is not None
                pytest.fail(f"it ended before it could be killed: {process.stderr.read()!r}")
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_training_goes_on_to_the_same_weights(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    out = tmp_path / "out"
    work, arguments = out.with_name("out.training"), [str(model), str(prompts), str(out)]
    trained = {"tokens": 2500, "steps": 30, "rounds": 2}
    train(plan_of(model, prompts, tmp_path / "whole", **trained))
    killed_when([work / "trajectories" / "train" / "chunk-000000"], arguments)
    assert not (work / "state.safetensors").exists()
    killed_when([work / "state.safetensors"], arguments)
    assert not out.exists()
    _, lines = train(plan_of(model, prompts, out, save_every=0.0, **trained))
    assert any("going on after" in line for line in lines)
    assert_same_weights(tmp_path / "whole", out)
    leftovers = list(tmp_path.rglob("*.partial"))
    assert leftovers == []
    summary, lines = train(plan_of(model, prompts, out, **trained))
    assert any("nothing to do" in line for line in lines)
    assert summary["updates"] == 30


def test_other_settings_are_refused_by_name(tmp_path: Path, model: Path, prompts: Path) -> None:
    plan = plan_of(model, prompts, tmp_path / "out", steps=2)
    train(plan)
    with pytest.raises(ConfigError, match="exists already"):
        train(dataclasses.replace(plan, steps=3))
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"anchors, gamma"):
        train(dataclasses.replace(plan, anchors=7, gamma=5.0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 0}, "--tokens"),
        ({"member": "eagle"}, "--member"),
        ({"objective": "mse"}, "--objective"),
        ({"confidence_head": True}, "--confidence-head"),
        ({"sampled_share": 1.5}, "--sampled-share"),
        ({"steps": 1, "rounds": 2}, "--steps"),
        ({"target_layers": (0, 2)}, "target_layer_ids"),
        ({"mask_token": VOCABULARY}, "mask_token_id"),
        ({"target_layers": (), "features": 9}, "feature layers"),
        ({"draft_vocabulary": VOCABULARY + 1}, "--draft-vocabulary"),
        ({"prompt_column": "text"}, "text"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, model: Path, prompts: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(plan_of(model, prompts, tmp_path / "out", **({"steps": 4} | changes)))


def test_prompts_that_bring_nothing_end_with_the_reason(tmp_path: Path, model: Path) -> None:
    bad = write_rows(tmp_path / "bad.parquet", ["", None, "x" * 300] * 3)
    with pytest.raises(ConfigError, match=r"no prompt could be decoded: .*empty"):
        train(plan_of(model, bad, tmp_path / "out", held_out=0.0))
    split = {"prompt": ["a", "b"], "split": ["test", "test"]}
    held = write_rows(tmp_path / "held.parquet", split)
    with pytest.raises(ConfigError, match="held out"):
        train(plan_of(model, held, tmp_path / "other"))


def test_a_target_of_another_size_is_refused(tmp_path: Path, model: Path, prompts: Path) -> None:
    train(plan_of(model, prompts, tmp_path / "out", steps=1))
    other = tiny_model_folder(tmp_path / "other", hidden_size=64, template=None)
    with pytest.raises(ConfigError) as error:
        measure(tmp_path / "out", other, prompts)
    for part in ("32", "64", "hidden", str(tmp_path / "out"), str(other)):
        assert part in error.value.message


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["drafter", *arguments])
    out, err = capfd.readouterr()
    return caught.value.code or 0, out, err


def test_the_command_line(
    tmp_path: Path, model: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafter"
    arguments = [
        *("train", "--model", str(model), "--prompts", str(prompts), "--out", str(out)),
        *("--tokens", "300", "--steps", "6", "--target-layers", "0,1", "--disk", "1GiB"),
        *("--kv-memory", "4MiB", "--dtype", "float32", "--max-new-tokens", "12", "--layers", "1"),
        *("--concurrency", "8", "--threads", "1", "--lr", "0.01", "--block-size", "5"),
    ]
    code, printed, told = call(capfd, *arguments, "--decode-only")
    assert code == 0, told
    assert json.loads(printed)["tokens"] >= 300
    assert not out.exists()
    code, printed, told = call(capfd, *arguments)
    assert code == 0, told
    assert json.loads(printed)["updates"] == 6
    assert printed.count("\n") == 1
    code, printed, told = call(capfd, *arguments)
    assert (code, json.loads(printed)["updates"]) == (0, 6)
    assert "nothing to do" in told
    code, printed, _ = call(capfd, "show", str(out))
    assert code == 0
    for part in ("DFlash", "5 rows, 4 drafts", "1 layer,", "layers 0, 1", "6", "even", "MiB"):
        assert part in printed
    assert f"{checkpoint.identity(out)[:16]}" in printed
    measured = [*("--model", str(model), "--prompts", str(prompts), "--max-new-tokens", "8")]
    code, printed, _ = call(capfd, "eval", str(out), *measured, "--dtype", "float32")
    figures = json.loads(printed.splitlines()[-1])
    assert code == 0
    assert figures["decoded"]["all"]["steps"] > 0
    assert len(figures["decoded"]["even"]["accepted_by_position"]) <= 4


def test_usage_errors_exit_with_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ("show", str(tmp_path)),
        ("train", "--prompts", "x.parquet"),
        ("train", "--prompts", "x.parquet", "--out", "y", "--disk", "much"),
        ("train", "--prompts", "x.parquet", "--out", "y", "--target-layers", "one"),
        ("train", "--prompts", "x.parquet", "--out", "y", "--batch", "0"),
        ("eval", str(tmp_path), "--prompts", "x.parquet", "--concurrency", "0"),
    ):
        code, printed, told = call(capfd, *arguments)
        assert (code, printed) == (2, ""), arguments
        assert told.startswith("error: ")


def test_show_reads_published_layouts_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_drafter_folder(
        tmp_path / "spark",
        from_anchor=True,
        markov_rank=4,
        enable_confidence_head=True,
        target_layer_ids=(0,),
    )
    code, printed, _ = call(capfd, "show", str(folder))
    assert code == 0
    for part in ("DSpark", "5 drafts", "rank 4", "confidence head", "not told"):
        assert part in printed
    count = sum(tensor.numel() for tensor in weights(folder).values())
    assert checkpoint.inspect(folder).num_parameters == count


def test_two_trainings_of_one_folder_do_not_meet(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    import fcntl

    (tmp_path / "out.training").mkdir()
    descriptor = os.open(tmp_path / "out.training" / "lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(LockedError, match="another process"):
        train(plan_of(model, prompts, tmp_path / "out"))
    os.close(descriptor)
