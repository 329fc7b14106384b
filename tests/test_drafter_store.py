"""Jobs that draft from a store: the current version of their model's drafter, whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from folders import Listener, parts, read_rows, run, tiny_drafter_folder, tiny_model_folder
from folders import write_rows as write
from safetensors.torch import save_file

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.store import find_versions, stored_models, versions_of
from adaflash_batch.drafter.versions import Learnt, VersionStore
from adaflash_batch.drafter.vocabulary import VOCABULARY
from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.footer import PartFooter

PROMPTS = ["one", "a longer prompt than the others", None, "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "Tiny Llama")


def drafted(out: Path) -> list[tuple[int | None, int | None]]:
    """First and last version of each row."""
    return [(r["spec"]["drafter_first"], r["spec"]["drafter_last"]) for r in read_rows(out)]


def committed(out: Path) -> list[int | None]:
    """The versions that the parts were committed with."""
    footers = [PartFooter.from_metadata(pq.read_metadata(part).metadata) for part in parts(out)]
    return [footer.drafter_version for footer in footers if footer is not None]


def texts(out: Path) -> list[dict[str, Any]]:
    return read_rows(out, without=("timing", "spec"))


def test_a_store_goes_from_job_to_job(tmp_path: Path, model: Path) -> None:
    drafter, store = tiny_drafter_folder(tmp_path / "drafter"), tmp_path / "store"
    save_file({"token_ids": torch.arange(3, 200, 2)}, drafter / VOCABULARY)
    shard = write(tmp_path / "in.parquet", PROMPTS)
    run(shard, model, tmp_path / "plain")

    def job(name: str, keys: dict[str, object], model: Path = model) -> list[str]:
        listener = Listener()
        given = {"speculation.drafter_store": str(store)} | keys
        run(shard, model, tmp_path / name, given, listener=listener)
        assert texts(tmp_path / name) == texts(tmp_path / "plain")
        return listener.lines

    # Nothing in it and nothing to put in.
    lines = job("empty", {"speculation.width": 2})
    assert any("has no drafter yet" in line for line in lines)
    assert "no drafter: plain decoding" in lines
    assert drafted(tmp_path / "empty") == [(None, None)] * 4
    assert committed(tmp_path / "empty") == [None]
    # The first drafter becomes version 0.
    lines = job("first", {"speculation.drafter": str(drafter)})
    assert any(f"drafter {drafter} is now version 0" in line for line in lines)
    assert f"drafter version 0 of {store}" in lines
    assert drafted(tmp_path / "first") == [(0, 0), (0, 0), (None, None), (0, 0)]
    versions = VersionStore(find_versions(store))
    assert (versions.path(0) / VOCABULARY).read_bytes() == (drafter / VOCABULARY).read_bytes()
    # Whatever is current drafts, also for the same model elsewhere, and wins over --drafter.
    facts = TargetFacts(checkpoint.inspect(drafter).config.vocab_size, 32, 3, "tiny")
    versions.publish(versions.load(0, facts, dtype=torch.float32), Learnt(rows=4))
    renamed = tiny_model_folder(tmp_path / "renamed")
    job("second", {}, renamed)
    assert drafted(tmp_path / "second") == [(1, 1), (1, 1), (None, None), (1, 1)]
    assert committed(tmp_path / "second") == [1]
    lines = job("third", {"speculation.drafter": str(drafter)})
    assert any("version 1 in" in line and f"not {drafter}" in line for line in lines)
    assert drafted(tmp_path / "third")[0] == (1, 1)
    versions.roll_back(0)
    job("fourth", {"output.chunk_rows": 2})
    assert drafted(tmp_path / "fourth")[0] == (0, 0)
    # A job goes on with the version of its last part, whatever has become of the store since.
    (tmp_path / "fourth" / "part-00000-00001.parquet").unlink()
    versions.roll_back(1)
    job("fourth", {"output.chunk_rows": 2})
    assert drafted(tmp_path / "fourth") == [(0, 0), (0, 0), (None, None), (0, 0)]
    assert versions.current() == 1
    assert committed(tmp_path / "fourth") == [0, 0]
    assert [m.name for m in stored_models(store)] == [str(model)]
    assert find_versions(store).name.startswith("tiny-llama-")


def test_a_drafter_of_another_model_stays_out_of_the_store(tmp_path: Path, model: Path) -> None:
    drafter = tiny_drafter_folder(tmp_path / "drafter", hidden_size=64)
    shard = write(tmp_path / "in.parquet", ["x"])
    keys = {
        "speculation.drafter_store": str(tmp_path / "store"),
        "speculation.drafter": str(drafter),
    }
    with pytest.raises(ConfigError) as error:
        run(shard, model, tmp_path / "out", keys)
    for word in ("64", "32", "hidden", str(drafter), str(model)):
        assert word in error.value.message
    (stored,) = stored_models(tmp_path / "store")
    assert VersionStore(stored.folder).numbers() == []
    # One that somebody put there by hand is refused by its version's folder.
    versions = VersionStore(stored.folder)
    view = checkpoint.inspect(drafter)
    facts = TargetFacts(view.config.vocab_size, 64, 3, "another")
    versions.import_checkpoint(drafter, facts)
    with pytest.raises(ConfigError, match=r"v000000.*hidden"):
        run(shard, model, tmp_path / "out", {"speculation.drafter_store": str(tmp_path / "store")})


def test_models_are_told_apart_by_what_they_are(tmp_path: Path) -> None:
    def of(name: str, weights: str = "w", tokenizer: str | None = "t") -> Path:
        return versions_of(tmp_path, name, {"weights": weights, "x": name}, tokenizer)

    first = of("Org/My Model_1.5")
    assert first.name.startswith("my-model_1.5-")
    assert of("/elsewhere/copy/") == first
    others = [of("Org/My Model_1.5", weights="v"), of("b", tokenizer="u"), of("..", tokenizer=None)]
    assert len({first, *others}) == 4
    assert others[2].name.startswith("model-")
    assert {m.folder for m in stored_models(tmp_path)} == {first, *others}


def test_a_person_says_which_model_where_there_are_several(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(ConfigError, match="no drafter store"):
        find_versions(store)
    first = versions_of(store, "org/a", {"weights": "1"}, None)
    assert find_versions(store) == find_versions(store, "org/a") == find_versions(first) == first
    second = versions_of(store, "org/b", {"weights": "2"}, None)
    assert find_versions(store, "org/b") == find_versions(store, second.name) == second
    for wrong in (None, "org/c"):
        with pytest.raises(ConfigError) as error:
            find_versions(store, wrong)
        assert f"org/a ({first.name}), org/b" in str(error.value.hint)
    (first / "model.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.json is damaged"):
        find_versions(store, "org/b")
