"""`adaflash-batch drafter list | show | rollback | export` as a person meets them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import VOCABULARY, tiny_drafter_folder
from safetensors.torch import save_file
from test_drafter_commands import call, weights

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.store import versions_of
from adaflash_batch.drafter.versions import Learnt, VersionStore
from adaflash_batch.drafter.vocabulary import VOCABULARY as VOCABULARY_FILE
from adaflash_batch.errors import ConfigError

TARGET = TargetFacts(VOCABULARY, 32, 3, "tiny")
MEMBERS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DSpark": {"from_anchor": True, "markov_rank": 4, "enable_confidence_head": True},
    "DFlash 2": {
        **{"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6},
        **{"selector_top_k": 7},
    },
}


def store_of(store: Path, drafter: Path, name: str = "org/tiny") -> VersionStore:
    """A store with one model, whose drafter has learnt once."""
    versions = VersionStore(versions_of(store, name, {"weights": name}, None))
    versions.import_checkpoint(drafter, TARGET)
    net = versions.load(0, TARGET, dtype=torch.float32)
    learnt = Learnt(job="out/x", rows=64, updates=3, tau_before=1.7, tau_after=2.352)
    versions.publish(net, learnt)
    return versions


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return tiny_drafter_folder(tmp_path / "drafter")


def test_versions_are_listed(
    tmp_path: Path, drafter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    versions = store_of(tmp_path / "store", drafter)
    for place in (tmp_path / "store", versions.folder):
        code, printed, _ = call(capfd, "list", str(place))
        titles, first, second = printed.splitlines()
        assert code == 0
        assert titles.split()[:3] == ["version", "parent", "created"]
        assert first.split()[:2] == ["0", "-"]
        assert second.split()[:3] == ["*", "1", "0"]
        for part in ("published", "64", "1.70 -> 2.35", "out/x"):
            assert part in second
    store_of(tmp_path / "store", drafter, "org/other")
    code, printed, _ = call(capfd, "list", str(tmp_path / "store"))
    assert (code, printed.count("\n")) == (0, 8)
    code, printed, _ = call(capfd, "list", str(tmp_path / "store"), "--model", "org/other")
    assert (code, printed.count("\n")) == (0, 3)


def test_any_version_is_shown(
    tmp_path: Path, drafter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    versions, store = store_of(tmp_path / "store", drafter), str(tmp_path / "store")
    for arguments, number in (((), 1), (("--version", "0"), 0)):
        code, printed, _ = call(capfd, "show", store, *arguments)
        assert code == 0
        assert f"{versions.path(number)}: a DFlash drafter" in printed
        assert f"version {number}: " in printed
    code, printed, _ = call(capfd, "show", str(drafter))
    assert (code, "version " in printed) == (0, False)


def test_rolling_back(tmp_path: Path, drafter: Path, capfd: pytest.CaptureFixture[str]) -> None:
    versions, store = store_of(tmp_path / "store", drafter), str(tmp_path / "store")
    assert call(capfd, "rollback", store)[:2] == (0, "1 -> 0\n")
    assert versions.current() == 0
    code, printed, told = call(capfd, "rollback", store)
    assert (code, printed, "has no parent" in told) == (2, "", True)
    assert call(capfd, "rollback", store, "--to", "1")[:2] == (0, "0 -> 1\n")
    code, printed, told = call(capfd, "rollback", store, "--to", "7")
    assert (code, printed, "no version 7" in told) == (2, "", True)
    assert versions.current() == 1


@pytest.mark.parametrize("member", MEMBERS)
def test_an_export_is_the_drafter_without_our_own_parts(
    tmp_path: Path, member: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {**MEMBERS[member], "target_layer_ids": (0,)}
    source = tiny_drafter_folder(tmp_path / "source", has_input_projection=True, **changes)
    save_file({"token_ids": torch.arange(3, 103)}, source / VOCABULARY_FILE)
    versions, store = store_of(tmp_path / "store", source), str(tmp_path / "store")
    out = tmp_path / "exports" / "out"
    code, printed, told = call(capfd, "export", store, str(out), "--version", "0")
    assert (code, printed) == (0, ""), told
    for part in ("input projection", "draft vocabulary", f"{member} drafter", str(out)):
        assert part in told
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    loaded = checkpoint.load(out, TARGET, dtype=torch.bfloat16)
    config = checkpoint.inspect(source).config
    assert loaded.config == dataclasses.replace(config, has_input_projection=False)
    assert loaded.config.member == member
    kept = {n: t for n, t in weights(source).items() if not n.startswith("input_projection.")}
    assert len(kept) < len(weights(source))
    assert weights(out).keys() == kept.keys()
    for name, tensor in kept.items():
        assert torch.equal(weights(out)[name], tensor.bfloat16()), name
    before = checkpoint.identity(out)
    code, _, told = call(capfd, "export", str(versions.path(1)), str(out))
    assert (code, "exists already" in told) == (2, True)
    assert checkpoint.identity(out) == before


def test_an_export_is_still_refused_for_another_target(
    tmp_path: Path, drafter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((drafter / "config.json").read_text())
    own = {"tokenizer_sha256": "aaaa", "summary": {"updates": 3}}
    (drafter / "config.json").write_text(json.dumps(config | {"adaflash": own}))
    code, _, told = call(capfd, "export", str(drafter), str(tmp_path / "out"))
    assert (code, "left out" in told) == (0, False)
    other = dataclasses.replace(TARGET, tokenizer_digest="bbbb")
    with pytest.raises(ConfigError, match="bbbb"):
        checkpoint.load(tmp_path / "out", other, dtype=torch.bfloat16)
    assert "summary" not in (tmp_path / "out" / "config.json").read_text()
    # Written with as few layers as the taps allow, it would be refused for its own target.
    del config["num_target_layers"]
    (drafter / "config.json").write_text(json.dumps(config))
    code, _, told = call(capfd, "export", str(drafter), str(tmp_path / "other"))
    assert (code, "how many layers the target has" in told) == (2, True)
    assert not (tmp_path / "other").exists()


def test_what_is_no_store_is_refused(
    tmp_path: Path, drafter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store_of(tmp_path / "store", drafter)
    store = str(tmp_path / "store")
    for arguments, said in (
        (("list", str(drafter)), "no drafter store"),
        (("rollback", str(tmp_path / "absent")), "no drafter store"),
        (("show", str(drafter), "--version", "1"), "no drafter store"),
        (("show", store, "--version", "5"), "no version 5"),
        (("export", store, str(tmp_path / "out"), "--model", "x"), "called x"),
        (("export", str(tmp_path / "absent"), str(tmp_path / "out")), "cannot read config.json"),
    ):
        code, printed, told = call(capfd, *arguments)
        assert (code, printed) == (2, ""), arguments
        assert told.startswith("error: "), arguments
        assert said in told, arguments
