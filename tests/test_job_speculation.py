"""A job with a drafter: the text of a job without, and counters that add up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from folders import (
    VOCABULARY,
    completions,
    echo_model_folder,
    read_rows,
    run,
    tiny_drafter_folder,
    tiny_model_folder,
    token_of,
    write_rows,
)
from safetensors.torch import save_file

from adaflash_batch.drafter.vocabulary import VOCABULARY as VOCABULARY_FILE
from adaflash_batch.errors import ConfigError

PROMPTS = ["one", "a longer prompt than the others", None, "x", "four more", "y" * 60, "seven"]
NEW = 20
BLOCK = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["all", "vocabulary"])
def drafter(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tiny_drafter_folder(tmp_path_factory.mktemp("drafters") / "random")
    if request.param == "vocabulary":
        save_file({"token_ids": torch.arange(3, 200, 2)}, folder / VOCABULARY_FILE)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculation.width": 2},
        {"engine.concurrency": 1},
        {"engine.concurrency": 3, "engine.token_budget": 16},
        {"engine.kv_memory": "100KiB", "engine.concurrency": 5},
    ],
    ids=str,
)
def test_text_is_that_of_plain_decoding(
    tmp_path: Path,
    model: Path,
    drafter: Path,
    settings: dict[str, object],
    temperature: float,
) -> None:
    shard = write_rows(tmp_path / "in.parquet", PROMPTS)
    keys: dict[str, object] = {
        "sampling.temperature": temperature,
        "sampling.max_new_tokens": NEW,
        "sampling.n": 2,
    }
    run(shard, model, tmp_path / "plain", keys)
    speculation = {"speculation.drafter": str(drafter)}
    run(shard, model, tmp_path / "drafted", keys | speculation | settings)
    ignored = ("timing", "spec")
    assert read_rows(tmp_path / "drafted", without=ignored) == read_rows(
        tmp_path / "plain", without=ignored
    )
    width = settings.get("speculation.width", BLOCK - 1)
    assert isinstance(width, int)
    for row in read_rows(tmp_path / "drafted"):
        _check_counters(row, width)


def _check_counters(row: dict[str, Any], width: int) -> None:
    spec = row["spec"]
    if row["error"] is not None:
        assert (spec["steps"], spec["accepted_hist"], spec["drafter_first"]) == (0, [], None)
        return
    assert spec["accepted"] <= spec["verified"] <= spec["drafted"]
    assert spec["verified"] <= width * spec["steps"]
    assert spec["drafted"] % (BLOCK - 1) == 0
    histogram = spec["accepted_hist"]
    assert sum(histogram) == spec["steps"]
    assert sum(accepted * steps for accepted, steps in enumerate(histogram)) == spec["accepted"]
    assert (spec["drafter_first"], spec["drafter_last"]) == (0, 0)


def test_rows_that_accept_all_and_rows_that_accept_none(tmp_path: Path) -> None:
    """The model repeats the last letter for ever, the drafter always drafts an `a`."""
    model = echo_model_folder(tmp_path / "model")
    drafter = tiny_drafter_folder(tmp_path / "drafter", is_silent=True, mask_token_id=token_of("a"))
    prompts = ["ends in a", "in b", "a", "aab", "bba"]
    shard = write_rows(tmp_path / "in.parquet", prompts)
    keys: dict[str, object] = {
        "sampling.max_new_tokens": NEW,
        "speculation.drafter": str(drafter),
        "output.chunk_rows": 2,
    }
    summary = run(shard, model, tmp_path / "out", keys)
    assert completions(tmp_path / "out") == [prompt[-1] * NEW for prompt in prompts]
    accepted = verified = 0
    for row in read_rows(tmp_path / "out"):
        _check_counters(row, BLOCK - 1)
        spec = row["spec"]
        accepted, verified = accepted + spec["accepted"], verified + spec["verified"]
        # The prefill gives the first token; blocks of 5 the other 19, the last one cut by the end.
        if row["prompt"].endswith("a"):
            assert spec["steps"] == 4
            assert spec["accepted"] == spec["verified"] == NEW - 1 - 4
            assert spec["accepted_hist"] == [0, 0, 0, 1, 3]
        else:
            assert (spec["steps"], spec["accepted"]) == (NEW - 1, 0)
    assert summary.fields["acceptance_rate"] == round(accepted / verified, 4)
    steps = 3 * 4 + 2 * (NEW - 1)
    assert summary.fields["emitted_per_step"] == round((accepted + steps) / steps, 4)


@pytest.mark.parametrize("letters", ["abc", "bcd"])
def test_drafts_come_from_the_vocabulary_alone(tmp_path: Path, letters: str) -> None:
    """The same, with a drafter that may choose from a few letters: it drafts an `a` if it may."""
    model = echo_model_folder(tmp_path / "model")
    drafter = tiny_drafter_folder(tmp_path / "drafter", is_silent=True, mask_token_id=token_of("a"))
    ids = sorted(token_of(letter) for letter in letters)
    save_file({"token_ids": torch.tensor(ids)}, drafter / VOCABULARY_FILE)
    shard = write_rows(tmp_path / "in.parquet", ["ends in a"])
    keys = {"sampling.max_new_tokens": NEW, "speculation.drafter": str(drafter)}
    run(shard, model, tmp_path / "out", keys)
    (row,) = read_rows(tmp_path / "out")
    assert row["completion"] == "a" * NEW
    accepts = "a" in letters
    assert row["spec"]["steps"] == (4 if accepts else NEW - 1)
    assert row["spec"]["accepted"] == (NEW - 1 - 4 if accepts else 0)


def test_a_broken_vocabulary_stops_the_job(tmp_path: Path, model: Path) -> None:
    drafter = tiny_drafter_folder(tmp_path / "drafter")
    save_file({"token_ids": torch.tensor([3, VOCABULARY])}, drafter / VOCABULARY_FILE)
    shard = write_rows(tmp_path / "in.parquet", ["x"])
    with pytest.raises(ConfigError, match=f"token {VOCABULARY}, .* of {VOCABULARY}"):
        run(shard, model, tmp_path / "out", {"speculation.drafter": str(drafter)})


def test_a_resumed_job_adds_up_what_both_runs_did(tmp_path: Path, model: Path) -> None:
    drafter = tiny_drafter_folder(tmp_path / "drafter")
    shard = write_rows(tmp_path / "in.parquet", PROMPTS)
    keys: dict[str, object] = {"output.chunk_rows": 3, "speculation.drafter": str(drafter)}
    run(shard, model, tmp_path / "out", keys)
    (tmp_path / "out" / "part-00000-00001.parquet").unlink()
    run(shard, model, tmp_path / "out", {"output.chunk_rows": 3})
    versions = [row["spec"]["drafter_first"] for row in read_rows(tmp_path / "out")]
    assert versions == [0, 0, None, None, None, None, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, ("64", "32", "hidden")),
        ({"vocab_size": VOCABULARY + 1}, (str(VOCABULARY), str(VOCABULARY + 1), "vocab")),
        ({"num_target_layers": 4, "target_layer_ids": (0, 2)}, ("4", "3", "layers")),
    ],
)
def test_a_drafter_of_another_model_is_refused_naming_both_sides(
    tmp_path: Path, model: Path, changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    drafter = tiny_drafter_folder(tmp_path / "drafter", **changes)
    shard = write_rows(tmp_path / "in.parquet", ["x"])
    with pytest.raises(ConfigError) as error:
        run(shard, model, tmp_path / "out", {"speculation.drafter": str(drafter)})
    for word in (*said, str(drafter), str(model)):
        assert word in error.value.message
    with pytest.raises(ConfigError, match="nowhere"):
        run(shard, model, tmp_path / "out", {"speculation.drafter": str(tmp_path / "nowhere")})
