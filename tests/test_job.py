"""A job from Parquet to Parquet: what it leaves, how it goes on, when it refuses to."""

import errno
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import (
    Listener,
    completions,
    kinds,
    parts,
    read_rows,
    run,
    tiny_drafter_folder,
    tiny_model_folder,
    write_rows,
)

from adaflash_batch import job_decoding
from adaflash_batch.engine import assembly
from adaflash_batch.errors import AdaflashError, ConfigError, InputError
from adaflash_batch.request import RowKey
from adaflash_batch.shards.footer import PartFooter
from adaflash_batch.shards.open_chunks import OpenChunks
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.schema import output_schema

PROMPTS = ["one", "a much longer prompt than the others", None, "x", "", "four more", "seven"]
MORE = ["eight", "nine is here", "ten", "11"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [write_rows(tmp_path / "a.parquet", PROMPTS), write_rows(tmp_path / "b.parquet", MORE)]


def contents(out: Path) -> dict[str, tuple[int, bytes]]:
    """When each part was written, and its bytes."""
    return {part.name: (part.stat().st_mtime_ns, part.read_bytes()) for part in parts(out)}


def text(error: pytest.ExceptionInfo[ConfigError]) -> str:
    assert error.value.exit_code == 2
    return f"{error.value.message}\n{error.value.hint}"


def test_parts_hold_the_input_unchanged_and_our_columns(tmp_path: Path, model: Path) -> None:
    table = pa.table(
        {
            "id": pa.array(range(7), pa.int16()),
            "prompt": pa.array(PROMPTS, pa.large_string()).dictionary_encode(),
            "tags": pa.array([["a"], [], None, ["b", "c"], [], None, ["d"]]),
        },
        metadata={"made_by": "test"},
    )
    pq.write_table(table, tmp_path / "a b ż.parquet")
    source = pq.read_table(tmp_path / "a b ż.parquet")
    out = tmp_path / "out"
    summary = run(tmp_path / "a b ż.parquet", model, out, {"output.chunk_rows": 3})
    assert [part.name for part in parts(out)] == [f"part-00000-0000{k}.parquet" for k in range(3)]
    for index, part in enumerate(parts(out)):
        written = pq.read_table(part)
        assert written.schema.equals(output_schema(source.schema))
        assert written.schema.metadata[b"made_by"] == b"test"
        expected = source.slice(3 * index, 3)
        assert written.select(table.column_names).to_pylist() == expected.to_pylist()
    assert kinds(out) == [None, None, "null_prompt", None, "empty_prompt", None, None]
    assert summary.exit_code == 3
    assert (summary.fields["rows"], summary.fields["errors"]) == (7, 2)
    assert summary.as_dict() == json.loads((out / "_adaflash" / "summary.json").read_text())


def test_footers_say_what_a_part_is_and_add_up(
    tmp_path: Path, model: Path, shards: list[Path]
) -> None:
    summary = run(shards, model, tmp_path / "out", {"output.chunk_rows": 4})
    claimed = json.loads((tmp_path / "out" / "_adaflash" / "job.json").read_text())
    found = []
    for part in parts(tmp_path / "out"):
        rows = pq.read_table(part).to_pylist()
        footer = PartFooter.from_metadata(pq.read_metadata(part).metadata)
        assert footer is not None
        assert footer.fingerprint == claimed["fingerprint"]
        totals, usages = footer.totals, [row["usage"] for row in rows]
        assert totals.num_output_rows == len(rows)
        assert totals.num_errors == sum(row["error"] is not None for row in rows)
        assert totals.completion_tokens == sum(usage["completion_tokens"] for usage in usages)
        assert totals.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
        assert totals.counts.steps == sum(row["spec"]["steps"] for row in rows)
        found.append((footer.shard_name, footer.chunk_index, footer.first_row, totals.num_rows))
    assert found == [("a.parquet", 0, 0, 4), ("a.parquet", 1, 4, 3), ("b.parquet", 0, 0, 4)]
    assert summary.fields["output_tokens"] == 9 * 8
    assert claimed["spec"]["output"]["chunk_rows"] == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"engine.concurrency": 1},
        {"engine.concurrency": 16, "output.chunk_rows": 3},
        {"output.chunk_rows": 1},
        {"engine.token_budget": 16},
        {"engine.token_budget": 1},
        {"engine.kv_memory": "60KiB", "engine.concurrency": 6, "output.chunk_rows": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_do_not_depend_on_speed_settings(
    tmp_path: Path,
    model: Path,
    shards: list[Path],
    settings: dict[str, object],
    temperature: float,
) -> None:
    sampling = {"sampling.temperature": temperature, "sampling.max_new_tokens": 50}
    run(shards, model, tmp_path / "plain", sampling)
    summary = run(shards, model, tmp_path / "other", sampling | settings)
    # A text that was preempted has a step fewer: the recompute gives its next token for nothing.
    ignored = ("timing", "spec")
    assert read_rows(tmp_path / "other", without=ignored) == read_rows(
        tmp_path / "plain", without=ignored
    )
    is_tight = "engine.kv_memory" in settings
    assert bool(summary.fields["preemptions"]) is is_tight


def test_a_rerun_does_only_what_is_missing(tmp_path: Path, model: Path, shards: list[Path]) -> None:
    keys = {"output.chunk_rows": 2, "sampling.temperature": 0.8, "sampling.n": 2}
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(shards, model, whole, keys)
    run(shards, model, out, keys)
    (out / "part-00000-00002.parquet").unlink()
    before = contents(out)
    listener = Listener()
    summary = run(shards, model, out, keys, listener=listener)
    assert (summary.fields["resumed_rows"], summary.fields["rows"]) == (9, 11)
    assert summary.fields["parts_written"] == 1
    after = contents(out)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"part-00000-00002.parquet"}
    assert read_rows(out) == read_rows(whole)
    assert listener.updates[-1].rows_done == listener.updates[-1].rows_total == 11


@pytest.mark.parametrize("steps", [1, 5, 12, 20])
def test_a_killed_job_goes_on_with_the_missing_chunks(
    tmp_path: Path, model: Path, shards: list[Path], steps: int
) -> None:
    keys = {"output.chunk_rows": 2, "engine.concurrency": 2, "sampling.temperature": 0.8}
    run(shards, model, tmp_path / "whole", keys)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(shards, model, out, keys, listener=Listener(dies_after=steps))
    before = contents(out)
    assert len(before) < 6
    summary = run(shards, model, out, keys)
    assert summary.fields["parts_written"] == 6 - len(before)
    after = contents(out)
    assert {name: after[name] for name in before} == before
    assert read_rows(out) == read_rows(tmp_path / "whole")


def test_a_finished_job_runs_again_without_a_model(
    tmp_path: Path, model: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(shards, model, tmp_path / "out")
    before = contents(tmp_path / "out")

    def fail(*arguments: object, **named: object) -> None:
        pytest.fail("there is nothing to load a model for")

    monkeypatch.setattr(assembly, "build_decoder", fail)
    listener = Listener()
    again = run(shards, model, tmp_path / "out", listener=listener)
    assert contents(tmp_path / "out") == before
    assert again.exit_code == first.exit_code == 3
    assert again.fields["rows"] == again.fields["resumed_rows"] == 11
    assert again.fields["output_tokens"] == again.fields["parts_written"] == 0
    assert any("nothing to do" in line for line in listener.lines)


def test_a_finished_job_without_errors_exits_0(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", MORE)
    assert run(shard, model, tmp_path / "out").exit_code == 0
    assert run(shard, model, tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("sampling.temperature", 0.7, "sampling.temperature: null -> 0.7"),
        ("sampling.logit_bias", {"5": 2.0}, "sampling.logit_bias"),
        ("prompt.chat_template", True, "prompt.chat_template: false -> true"),
        ("output.chunk_rows", 7, "output.chunk_rows: 3 -> 7"),
        ("input.columns", {"max_new_tokens": "limit"}, "input.columns"),
        ("output.prefix", "our_", 'output.prefix: "" -> "our_"'),
    ],
)
def test_a_job_that_differs_is_refused_with_the_difference(
    tmp_path: Path, model: Path, key: str, value: object, said: str
) -> None:
    shard = write_rows(tmp_path / "in.parquet", {"prompt": MORE, "limit": [1, 2, 3, 4]})
    out = tmp_path / "out"
    run(shard, model, out, {"output.chunk_rows": 3})
    before = contents(out)
    with pytest.raises(ConfigError) as error:
        run(shard, model, out, {"output.chunk_rows": 3} | {key: value})
    assert said in text(error)
    assert str(out) in text(error)
    assert "--out" in text(error)
    assert contents(out) == before
    assert run(shard, model, out, {"output.chunk_rows": 3}).fields["parts_written"] == 0


def test_another_model_input_or_system_prompt_is_refused(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", MORE)
    keys: dict[str, object] = {"prompt.chat_template": True}
    out = tmp_path / "out"
    run(shard, model, out, keys)
    other = tiny_model_folder(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError) as error:
        run(shard, other, out, keys)
    assert "model.weights" in text(error)
    with pytest.raises(ConfigError) as error:
        run(shard, model, out, keys | {"prompt.system_prompt": "be brief"})
    assert 'prompt.system_prompt: null -> "be brief"' in text(error)
    write_rows(shard, [*MORE[:3], "12"])
    with pytest.raises(ConfigError) as error:
        run(shard, model, out, keys)
    assert "inputs.in.parquet" in text(error)


def test_speed_settings_and_other_names_of_the_same_things_may_change(
    tmp_path: Path, model: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"output.chunk_rows": 2, "sampling.logit_bias": {"40": 0.5, "9": -1.0}}
    out = tmp_path / "out"
    run(shards, model, tmp_path / "whole", keys)
    slow = keys | {"engine.concurrency": 2}
    with pytest.raises(KeyboardInterrupt):
        run(shards, model, out, slow, listener=Listener(dies_after=12))
    assert 0 < len(parts(out)) < 6
    drafter = tiny_drafter_folder(tmp_path / "drafter")
    changed: dict[str, object] = {
        "engine.concurrency": 3,
        "engine.token_budget": 40,
        "engine.kv_memory": "1MiB",
        "engine.threads": 1,
        "speculation.drafter": str(drafter),
        "speculation.width": 2,
        "input.prompt_column": "prompt",
    }
    monkeypatch.chdir(tmp_path)
    renamed = model.rename(model.with_name("renamed"))
    try:
        run([Path("b.parquet"), Path("a.parquet")], renamed, out, keys | changed)
    finally:
        renamed.rename(model)
    ignored = ("timing", "spec")
    assert read_rows(out, without=ignored) == read_rows(tmp_path / "whole", without=ignored)


def test_a_mistake_found_before_the_first_part_can_be_mended_in_place(
    tmp_path: Path, model: Path
) -> None:
    shard = write_rows(tmp_path / "in.parquet", MORE)
    with pytest.raises(ConfigError, match="vocabulary"):
        run(shard, model, tmp_path / "out", {"sampling.stop_token_ids": [10**6]})
    assert run(shard, model, tmp_path / "out").exit_code == 0


def test_a_damaged_part_is_done_again(tmp_path: Path, model: Path, shards: list[Path]) -> None:
    out = tmp_path / "out"
    run(shards, model, out)
    rows = read_rows(out)
    part = parts(out)[1]
    part.write_bytes(part.read_bytes()[:-9])
    listener = Listener()
    assert run(shards, model, out, listener=listener).fields["parts_written"] == 1
    assert read_rows(out) == rows
    assert any(f"{part} is not whole" in line for line in listener.lines)


def test_a_full_disk_harms_nothing_that_is_committed(
    tmp_path: Path, model: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"output.chunk_rows": 2}
    out = tmp_path / "out"
    written = pq.write_table

    def fill_up(*arguments: Any, **named: Any) -> None:
        if len(parts(out)) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", fill_up)
        with pytest.raises(AdaflashError, match="no space left"):
            run(shards, model, out, keys)
    assert len(parts(out)) == 3
    assert not list(out.glob(".*"))
    run(shards, model, out, keys)
    run(shards, model, tmp_path / "whole", keys)
    assert read_rows(out) == read_rows(tmp_path / "whole")


@pytest.fixture
def most_open(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks were open whenever one more began."""
    seen: list[int] = []

    class Watched(OpenChunks):
        def begin(self, chunk: Chunk) -> tuple[Collection[RowKey], int]:
            found = super().begin(chunk)
            seen.append(self.num_open)
            return found

    monkeypatch.setattr(job_decoding, "OpenChunks", Watched)
    return seen


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sampling.max_new_tokens": 100, "engine.kv_memory": "13KB"},
        {"sampling.max_new_tokens": 250, "engine.context": 100},
    ],
    ids=["served", "refused by the decoder", "refused by the codec"],
)
def test_open_chunks_do_not_grow_with_the_rows(
    tmp_path: Path, model: Path, most_open: list[int], keys: dict[str, Any]
) -> None:
    shard = write_rows(tmp_path / "in.parquet", [f"prompt {row % 7}" for row in range(120)])
    options = {"sampling.max_new_tokens": 2, "engine.concurrency": 4, "output.chunk_rows": 2}
    summary = run(shard, model, tmp_path / "out", options | keys)
    assert summary.fields["errors"] == (120 if keys else 0)
    assert len(most_open) == 60
    # 4 running and 4 waiting are in 5 chunks at the most; one more has just begun.
    assert max(most_open) <= 6


def test_inputs_are_looked_at_before_a_model_is(tmp_path: Path) -> None:
    nowhere = tmp_path / "no model"
    cut = write_rows(tmp_path / "cut.parquet", MORE)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cut\.parquet"):
        run(cut, nowhere, tmp_path / "out")
    numbers = write_rows(tmp_path / "numbers.parquet", {"prompt": [1, 2]})
    with pytest.raises(ConfigError, match="which column holds the prompts"):
        run(numbers, nowhere, tmp_path / "out")
    clash = write_rows(tmp_path / "clash.parquet", {"prompt": ["x"], "completion": ["y"]})
    with pytest.raises(ConfigError) as error:
        run(clash, nowhere, tmp_path / "out")
    assert "'completion'" in text(error)
    assert "--output-prefix" in text(error)


def test_a_prefix_settles_a_clash_of_names(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", {"prompt": ["x"], "completion": ["theirs"]})
    run(shard, model, tmp_path / "out", {"output.prefix": "our_"})
    (row,) = read_rows(tmp_path / "out", without=())
    assert row["completion"] == "theirs"
    assert row["our_finish_reason"] == "length"
    assert {name for name in row if not name.startswith("our_")} == {"prompt", "completion"}


def test_an_input_without_rows_is_done_at_once(tmp_path: Path, model: Path) -> None:
    empty = write_rows(tmp_path / "a.parquet", [])
    summary = run(empty, model, tmp_path / "out")
    assert (summary.exit_code, summary.fields["rows"]) == (0, 0)
    some = write_rows(tmp_path / "b.parquet", MORE)
    assert run([empty, some], model, tmp_path / "both").fields["rows"] == 4
    assert [part.name for part in parts(tmp_path / "both")] == ["part-00001-00000.parquet"]
    run(some, model, tmp_path / "alone")
    assert completions(tmp_path / "both") == completions(tmp_path / "alone")
