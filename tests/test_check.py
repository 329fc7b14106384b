"""`check`: files, ids, damage, what is there already, and what the job will take."""

import io
import json
import os
import shutil
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checks import Heard, check
from folders import CONTEXT, run, spec_of, tiny_drafter_folder, tiny_model_folder, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tiny import ARCHITECTURES, tiny_model

from adaflash_batch import cli
from adaflash_batch.engine.assembly import DecoderPlan, assemble
from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.machine import processor
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import AdaflashError, ConfigError, InputError
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.review import disk_need, listener, verdicts
from adaflash_batch.review.check_view import print_report
from adaflash_batch.review.kv_need import kv_need
from adaflash_batch.review.lengths import Lengths
from adaflash_batch.review.model_facts import (
    ModelFacts,
    read_drafter_facts,
    read_model_facts,
)
from adaflash_batch.shards.reader import read_chunks

NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps of other tests' models are no matter here."""
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def test_tokens_are_counted_as_they_are(tmp_path: Path, model: Path) -> None:
    prompts = ["x" * size for size in (1, 16, 17, 40, 200)] + ["x" * 17, None]
    shard = write_rows(tmp_path / "in.parquet", prompts)
    report = check(shard, model, tmp_path / "out", {"sampling.n": 2})
    said = report.to_json()
    assert said["tokens"] == {
        "prompt": {"min": 1, "median": 17, "p90": 200, "p99": 200, "max": 200, "total": 291},
        "prompt_histogram": [
            *({"from": 1, "to": 16, "rows": 2}, {"from": 17, "to": 32, "rows": 2}),
            *({"from": 33, "to": 64, "rows": 1}, {"from": 65, "to": 128, "rows": 0}),
            {"from": 129, "to": 256, "rows": 1},
        ],
        "requests": 12,
        "completion_at_most": 12 * NEW,
    }
    assert said["prompting"] == {"chat_template": False, "first_prompt": "x"}
    assert said["repeated_prompts"] == 1
    assert (report.status, report.exit_code) == ("row_errors", 3)
    assert said["errors"] == {
        "rows": 1,
        "limit": None,
        "kinds": {
            "null_prompt": {
                "rows": 1,
                "first": [{"file": str(shard), "row": 6, "message": "the prompt is null"}],
            }
        },
    }


@given(st.lists(st.integers(1, 300), min_size=1), st.floats(0.0, 1.0))
def test_order_statistics_are_exact(values: list[int], share: float) -> None:
    lengths = Lengths()
    for value in values:
        lengths.add(value)
    found = lengths.at(share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < max(share * len(values), 1)
    assert (lengths.at(1.0), lengths.total) == (max(values), sum(values))
    bars = lengths.bars()
    assert sum(bar.count for bar in bars) == lengths.count == len(values)
    for bar in bars:
        assert bar.count == sum(bar.first <= value <= bar.last for value in values)


def test_the_template_shows_in_the_first_prompt(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", ["", "say <|im_end|>", "b"])
    report = check(shard, model, tmp_path / "out", {"prompt.chat_template": True})
    assert report.uses_template
    assert report.sample is not None
    assert report.sample.startswith("<|im_start|>user\nsay <|im_end|><|im_end|>")
    assert report.special.rows == 1
    assert [place.row for place in report.special.first] == [1]


def test_places_are_named_and_only_the_first_are_kept(tmp_path: Path, model: Path) -> None:
    shards = [write_rows(tmp_path / f"{n}.parquet", [None] * 4 + ["x"]) for n in range(3)]
    heard = Heard()
    report = check(shards, model, tmp_path / "out", heard=heard)
    finding = report.errors.kinds["null_prompt"]
    assert finding.rows == len(heard.flagged) == 12
    assert [(Path(p.file).name, p.row) for p in finding.first] == [
        *[("0.parquet", row) for row in range(4)],
        ("1.parquet", 0),
    ]


def test_cut_prompts_are_counted(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", ["x" * CONTEXT, "y", "z" * (CONTEXT + 5)])
    report = check(shard, model, tmp_path / "out", {"prompt.on_long_prompt": "truncate-left"})
    assert report.truncated.rows == 2
    assert report.truncated_tokens == 2 * NEW + 5
    assert report.exit_code == 0


def test_bad_ids_are_listed_and_refuse_the_job(tmp_path: Path, model: Path) -> None:
    first = write_rows(tmp_path / "a.parquet", {"prompt": ["x"] * 3, "id": ["a", "b", "a"]})
    second = write_rows(tmp_path / "b.parquet", {"prompt": ["x"] * 3, "id": ["b", None, "c"]})
    heard = Heard()
    keys: dict[str, object] = {"input.id_column": "id"}
    report = check([first, second], model, tmp_path / "out", keys, heard=heard)
    assert (report.status, report.exit_code) == ("refused", 2)
    told = [(Path(each.place.file).name, each.place.row, each.kind) for each in heard.flagged]
    assert sorted(told) == [
        *[("a.parquet", 2, "duplicate_id"), ("b.parquet", 0, "duplicate_id")],
        ("b.parquet", 1, "null_id"),
    ]
    assert {each.effect for each in heard.flagged} == {"job_refused"}
    assert any("'b' twice" in each.place.message for each in heard.flagged)
    assert report.num_repeated_prompts == 5
    with pytest.raises(ConfigError, match="null in row 1"):
        run([first, second], model, tmp_path / "out", keys)
    unique = write_rows(tmp_path / "c.parquet", {"prompt": ["x"] * 3, "id": [1, 2, 3]})
    assert check(unique, model, tmp_path / "out", keys).exit_code == 0


def damaged(path: Path, *, group: int, column: int) -> Path:
    """Turn some bytes over in the data of a column of a row group."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    middle = start + chunk.total_compressed_size // 2
    data = bytearray(path.read_bytes())
    data[middle : middle + 8] = bytes(255 - byte for byte in data[middle : middle + 8])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_damage_deep_inside_a_file_is_found_and_the_rest_is_looked_at(
    tmp_path: Path, model: Path, compression: str
) -> None:
    prompts = [f"prompt number {row} of many" if row % 10 else None for row in range(400)]
    table = pa.table({"other": [f"other {row}" for row in range(400)], "prompt": prompts})
    shard = tmp_path / "a.parquet"
    pq.write_table(
        table,
        shard,
        row_group_size=100,
        compression=compression,
        write_page_checksum=True,
        use_dictionary=False,
    )
    damaged(shard, group=2, column=1)
    whole = write_rows(tmp_path / "b.parquet", [None, "x"])
    report = check([shard, whole], model, tmp_path / "out", {"output.chunk_rows": 30})
    assert (report.status, report.exit_code) == ("unreadable", 5)
    (found,) = report.damage
    assert (found.file, found.column, found.row_group) == (str(shard), "prompt", (200, 300))
    assert 200 <= found.first_row < found.end_row == 300
    # Chunks of 30 rows that the row group has a part in: 6 to 9, rows 180 to 299.
    assert report.num_unread == 120
    assert report.errors.rows == 28 + 1
    with pytest.raises(InputError, match=r"a\.parquet"):
        run([shard, whole], model, tmp_path / "out", {"output.chunk_rows": 30})


@settings(max_examples=20)
@given(places=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3), seed=st.integers(1, 255))
def test_a_run_reads_all_of_a_file_exactly_if_a_check_does(
    model: Path, places: list[float], seed: int
) -> None:
    with TemporaryDirectory() as folder:
        shard = Path(folder) / "a.parquet"
        rows = {"prompt": [f"row {row}" for row in range(40)], "id": range(40)}
        pq.write_table(pa.table(rows), shard, row_group_size=9, write_page_checksum=True)
        data = bytearray(shard.read_bytes())
        end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for place in places:
            data[4 + int(place * (end - 5))] ^= seed
        shard.write_bytes(data)
        ends = []
        for work in (check, run):
            try:
                ends.append(work(shard, model, Path(folder) / "out").exit_code)
            except InputError as error:
                ends.append(error.exit_code)
        assert ends[0] == ends[1]


def test_an_unreadable_id_column_does_not_hide_the_rest(tmp_path: Path, model: Path) -> None:
    ids = [f"{row:09} is damaged" for row in range(50)]
    shard = write_rows(tmp_path / "a.parquet", {"prompt": ["x"] * 50, "id": ids})
    damaged(shard, group=0, column=1)
    report = check(shard, model, tmp_path / "out", {"input.id_column": "id"})
    assert report.exit_code == 5
    assert report.ids is not None
    assert report.ids.unread is not None
    assert [each.column for each in report.damage] == ["id"]


def test_the_output_directory_is_read_and_left_as_it_is(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", ["a", "bb", None, "dddd"])
    out = tmp_path / "out"
    keys: dict[str, object] = {"output.chunk_rows": 2}
    assert check(shard, model, out, keys).previous.exists is False
    assert not out.exists()
    run(shard, model, out, keys)
    (out / ".part-00000-00001.parquet.0123abcd.tmp").write_bytes(b"of a run that died")
    (out / "part-00000-00001.parquet").unlink()
    before = contents(tmp_path)
    report = check(shard, model, out, keys)
    assert contents(tmp_path) == before
    assert report.previous.done == {(0, 0)}
    assert report.previous.totals.num_rows == 2
    assert (report.work.rows, report.left.rows, report.left.prompt_tokens) == (3, 1, 4)
    assert report.to_json()["output"] == {
        "directory": str(out),
        "exists": True,
        "parts_done": 1,
        "rows_done": 2,
        "fingerprint_matches": True,
        "differences": [],
    }
    assert report.exit_code == 3


def test_another_jobs_output_is_refused_with_the_differences(tmp_path: Path, model: Path) -> None:
    shard, out = write_rows(tmp_path / "in.parquet", ["a", "b"]), tmp_path / "out"
    run(shard, model, out)
    other: dict[str, object] = {"sampling.temperature": 0.5}
    report = check(shard, model, out, other)
    assert (report.status, report.exit_code) == ("refused", 2)
    assert report.previous.differences == ["sampling.temperature: null -> 0.5"]
    assert report.previous.done == set()
    with pytest.raises(ConfigError, match="another job"):
        run(shard, model, out, other)
    os.unlink(out / "_adaflash" / "job.json")
    assert "was written by another job" in check(shard, model, out, other).refusals[0]


def test_an_output_in_the_way_is_refused(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in" / "in.parquet", ["a"])
    (tmp_path / "file").write_text("x")
    assert check(shard, model, tmp_path / "file").exit_code == 2
    assert "holds the input file" in check(shard, model, tmp_path / "in").refusals[0]
    assert "holds the input file" in check(shard, model, tmp_path).refusals[0]
    assert "inside the input" in check(shard.parent, model, shard.parent / "out").refusals[0]


def test_what_says_nothing_of_rows_ends_as_in_a_run(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", ["a"])
    out = tmp_path / "out"
    wrong: list[tuple[Path, Path, dict[str, object]]] = [
        (tmp_path / "missing.parquet", model, {}),
        (shard, tmp_path / "no-model", {}),
        (shard, model, {"engine.context": CONTEXT + 1}),
        (shard, model, {"engine.kv_memory": "1KB"}),
        (shard, model, {"sampling.stop_token_ids": [10_000]}),
        (shard, model, {"input.prompt_column": "nothing"}),
        (shard, model, {"input.id_column": "nothing"}),
    ]
    for paths, folder, keys in wrong:
        said = []
        for work in (check, run):
            with pytest.raises(AdaflashError) as caught:
                work(paths, folder, out, keys)
            said.append((caught.value.exit_code, caught.value.message))
        assert said[0] == said[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_models_facts_are_those_of_the_loaded_model(architecture: str, tmp_path: Path) -> None:
    loaded = tiny_model(architecture)
    loaded.save_pretrained(tmp_path)
    target = Target.of(loaded, architecture)
    for dtype, size in (("auto", 4), ("bfloat16", 2)):
        facts = read_model_facts(
            spec_of(tmp_path, tmp_path, tmp_path, {"model.dtype": dtype}), tmp_path
        )
        assert facts.kv_bytes_per_token * 4 == target.bytes_per_token * size
        assert facts.context == facts.made_for == target.context
        shape = (facts.vocab_size, facts.num_layers, facts.hidden_size)
        assert shape == (target.vocab_size, target.num_layers, target.hidden_size)
    weights = sum(parameter.nbytes for parameter in loaded.parameters())
    assert 0.4 * weights < facts.weight_bytes < 0.7 * weights + 20_000


@pytest.mark.parametrize("memory", ["64KiB", "1GiB"])
@pytest.mark.parametrize("with_drafter", [False, True])
def test_kv_memory_is_laid_out_as_in_a_run(
    tmp_path: Path, model: Path, memory: str, with_drafter: bool
) -> None:
    keys: dict[str, object] = {"engine.kv_memory": memory, "engine.concurrency": 3}
    drafter = tiny_drafter_folder(tmp_path / "drafter", block_size=13) if with_drafter else None
    if drafter is not None:
        keys["speculation.drafter"] = str(drafter)
    spec = spec_of(tmp_path, model, tmp_path, keys)
    facts = read_drafter_facts(spec, model)
    assert (facts.block == 0) == (drafter is None)
    plan = DecoderPlan(
        folder=model,
        name="m",
        dtype="float32",
        drafter=drafter,
        concurrency=3,
        kv_bytes=spec.engine.kv_bytes,
        shares_states=spec.shares_states,
    )
    decoder = assemble(plan, notify=print).decoder
    need = kv_need(spec, read_model_facts(spec, model), facts)
    told = f"KV memory for {need.num_tokens // PAGE * PAGE} tokens"
    assert decoder.describe().endswith(told)


def test_kv_memory_at_lengths(tmp_path: Path, model: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", ["x" * 24] * 9 + ["x" * 200])
    keys: dict[str, object] = {"engine.kv_memory": "150KB", "engine.concurrency": 4}
    report = check(shard, model, tmp_path / "out", keys)
    kv: Any = report.to_json()["kv_memory"]
    per_token = Target.load(model, "m", dtype=torch.float32).bytes_per_token
    assert (kv["bytes_per_token"], kv["available_bytes"], kv["given"]) == (per_token, 150_000, True)
    for name, limit in (("p50", 24 + NEW), ("p99", 208), ("max", 208)):
        pages = -(-limit // PAGE)
        most = kv["tokens"] // PAGE // pages
        assert kv["at_lengths"][name] == {
            "tokens": limit,
            "bytes": 4 * pages * PAGE * per_token,
            "requests_at_once": min(4, most),
        }
    assert kv["at_lengths"]["max"]["requests_at_once"] < 4
    assert any("KV memory holds" in line for line in report.warnings)


def about(model: Path, facts: ModelFacts, **changes: object) -> str:
    """As `engine.profile.about` writes it."""
    said: dict[str, object] = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "attention": "fast",
        "dtype": f"torch.{facts.dtype}",
        "target": [str(model), facts.num_layers, facts.hidden_size, facts.vocab_size],
        "drafter": "",
        "torch": torch.__version__,
    }
    return json.dumps(said | changes, sort_keys=True)


def keep_costs(folder: Path, description: str, seconds: float) -> None:
    """Of a machine where a pass takes the same for any number of tokens, and all else nothing."""
    cost = StepCost(description)
    for _ in range(8):
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
            cost.observe_target(tokens, tokens, tokens * PAGE, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    cost.save(folder / "costs.json")


def test_time_is_told_from_steps_of_earlier_jobs(tmp_path: Path, model: Path, cache: Path) -> None:
    shard, out = write_rows(tmp_path / "in.parquet", ["x" * 10] * 32), tmp_path / "out"
    keys: dict[str, object] = {"engine.concurrency": 4, "output.chunk_rows": 16}
    unknown = check(shard, model, out, keys).time
    assert unknown.at_most_s is None
    assert unknown.reason == "no job of this model has run here"
    facts = read_model_facts(spec_of(shard, model, out), model)
    for changes in ({"machine": "another"}, {"threads": 2}, {"dtype": "torch.float16"}):
        keep_costs(cache / "step-costs", about(model, facts, **changes), 0.5)
        assert check(shard, model, out, keys).time == unknown
    keep_costs(cache / "step-costs", about(model, facts), 0.5)
    steps = 32 * NEW / 4
    told = check(shard, model, out, keys).time
    assert told.at_most_s == pytest.approx(0.5 * steps, rel=0.02)
    assert told.likely_s is None
    # A budget that is full of prompts makes more steps of it.
    narrow = check(shard, model, out, keys | {"engine.token_budget": 6}).time
    assert narrow.at_most_s == pytest.approx(0.5 * 32 * (NEW + 10) / 6, rel=0.02)


def test_rows_that_are_done_tell_how_long_completions_are(
    tmp_path: Path, model: Path, cache: Path
) -> None:
    shard, out = write_rows(tmp_path / "in.parquet", ["x" * 10] * 32), tmp_path / "out"
    keys: dict[str, object] = {
        "engine.concurrency": 4,
        "output.chunk_rows": 16,
        "sampling.stop_token_ids": list(range(3, 259, 2)),
        "sampling.temperature": 2.0,
    }
    run(shard, model, out, keys)
    (out / "part-00000-00001.parquet").unlink()
    keep_costs(
        cache / "step-costs", about(model, read_model_facts(spec_of(shard, model, out), model)), 0.5
    )
    report = check(shard, model, out, keys)
    mean = report.previous.mean_completion_tokens
    assert mean is not None
    assert 1.0 <= mean < NEW
    assert report.time.at_most_s == pytest.approx(0.5 * 16 * NEW / 4, rel=0.02)
    assert report.time.likely_s == pytest.approx(0.5 * 16 * mean / 4, rel=0.02)
    run(shard, model, out, keys)
    done = check(shard, model, out, keys)
    assert (done.time.at_most_s, done.disk.at_most, done.left.requests) == (0.0, 0, 0)


def test_a_disk_that_is_too_small_is_told(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, out = write_rows(tmp_path / "in.parquet", ["x" * 10] * 32), tmp_path / "a" / "b"
    report = check(shard, model, out)
    run(shard, model, out)
    written = sum(path.stat().st_size for path in out.glob("part-*"))
    assert written / 4 < report.disk.at_most < 20 * written
    assert report.disk.fits
    full = SimpleNamespace(free=report.disk.at_most - 1)
    shutil.rmtree(out)
    monkeypatch.setattr(disk_need.shutil, "disk_usage", lambda path: full)  # type: ignore[attr-defined]
    assert any("may not fit" in line for line in check(shard, model, out).warnings)


def flags(shard: Path, model: Path, out: Path) -> list[str]:
    return [
        *("check", str(shard), "--model", str(model), "--dtype", "float32", "--out", str(out)),
        *("--no-chat-template", "--max-new-tokens", str(NEW)),
    ]


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code or 0


def test_the_command_prints_tables_or_one_object(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shard, out = write_rows(tmp_path / "in.parquet", ["a", None, "b" * 999]), tmp_path / "out"
    typed = flags(shard, model, out)
    assert exit_code(*typed) == 3
    shown, err = capfd.readouterr()
    assert err == ""
    for words in (
        "3 in 1 file",
        "null_prompt: 1 row",
        f"{shard} row 1",
        f"{shard} row 2",
        "unknown: no job of this model has run here",
        "some rows will carry errors (exit code 3)",
    ):
        assert words in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())
    assert exit_code(*typed, "--json") == 3
    shown, err = capfd.readouterr()
    assert err == ""
    assert shown.count("\n") == 1
    said = json.loads(shown)
    assert (said["status"], said["exit_code"], said["rows"]) == ("row_errors", 3, 3)
    assert said["errors"]["kinds"]["prompt_too_long"]["first"][0]["row"] == 2
    assert not out.exists()


def test_all_rows_can_be_had_as_a_file_or_as_lines(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shard = write_rows(tmp_path / "in.parquet", [None] * 20 + ["a"])
    typed, listed = flags(shard, model, tmp_path / "out"), tmp_path / "listed.parquet"
    assert exit_code(*typed, "--rows", str(listed)) == 3
    rows = pq.read_table(listed).to_pylist()
    assert [row["row"] for row in rows] == list(range(20))
    assert rows[3] == {
        "file": str(shard),
        "row": 3,
        "kind": "null_prompt",
        "message": "the prompt is null",
        "effect": "error_row",
    }
    capfd.readouterr()
    assert exit_code(*typed, "--rows", "-") == 3
    lines, report = capfd.readouterr()
    assert [json.loads(line) for line in lines.splitlines()] == rows
    assert "exit code 3" in report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "listed.parquet"]


def test_a_file_of_rows_is_no_input_of_the_next_run(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_rows(tmp_path / "in" / "in.parquet", ["a"]).parent
    rows = ("--rows", str(folder / "rows.parquet"))
    assert exit_code(*flags(folder, model, tmp_path / "out"), *rows) == 2
    assert "in the input directory" in capfd.readouterr().err
    assert exit_code(*flags(folder / "*.parquet", model, tmp_path / "out"), *rows) == 2
    assert "one that the input" in capfd.readouterr().err
    assert exit_code(*flags(folder / "in.parquet", model, tmp_path / "out"), *rows) == 0


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("out/rows.parquet", "is in the output directory"),
        ("in.parquet", "is an input file"),
        ("rows.txt", "is no *.parquet"),
        ("missing/rows.parquet", "cannot write"),
    ],
)
def test_a_file_of_rows_spoils_nothing(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str], rows: str, said: str
) -> None:
    shard = write_rows(tmp_path / "in.parquet", ["a"])
    before = contents(tmp_path)
    typed = flags(shard, model, tmp_path / "out")
    assert exit_code(*typed, "--rows", str(tmp_path / rows)) in (1, 2)
    assert said in capfd.readouterr().err
    assert contents(tmp_path) == before
    assert exit_code(*typed, "--json", "--rows", "-") == 2


@pytest.mark.parametrize(("limit", "code"), [("1", 4), ("2", 3), ("49%", 4), ("50%", 3), (None, 3)])
def test_more_errors_than_allowed_have_a_code_of_their_own(
    tmp_path: Path, model: Path, limit: str | None, code: int
) -> None:
    shard, out = write_rows(tmp_path / "in.parquet", ["a", None, "b", ""]), tmp_path / "out"
    keys: dict[str, object] = {} if limit is None else {"run.max_errors": limit}
    assert check(shard, model, out, keys).exit_code == code
    assert run(shard, model, out, keys).exit_code == code


def test_long_inputs_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(listener.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    stream = io.StringIO()
    with listener.Listener(stream) as told:
        told.begin(100_000)
        for _ in range(100):
            now[0] += 0.3
            told.advance(1000)
    assert stream.getvalue().splitlines() == [
        "checked 7,000 of 100,000 rows",
        "checked 41,000 of 100,000 rows",
        "checked 75,000 of 100,000 rows",
    ]


def test_tables_keep_to_the_width_of_a_terminal(model: Path, tmp_path: Path) -> None:
    shard = write_rows(tmp_path / "in.parquet", ["a", "<|im_end|>", None])
    report = check(shard, model, tmp_path / "out")
    stream = io.StringIO()
    print_report(report, Console(file=stream, force_terminal=True, width=60, no_color=True))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= 60
    assert any("null_prompt: 1 row" in line for line in lines)


def test_what_cannot_be_checked_is_said_in_json_too(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.parquet"
    assert exit_code(*flags(missing, model, tmp_path / "out"), "--json") == 5
    shown, err = capfd.readouterr()
    said = json.loads(shown)
    assert (said["status"], said["exit_code"]) == ("failed", 5)
    assert said["message"] in err


def test_rows_are_read_chunk_by_chunk(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a chunk is looked at, no other one is in memory."""
    seen: list[Any] = []

    def watched(*args: Any, **options: Any) -> Any:
        for chunk in read_chunks(*args, **options):
            assert sum(table() is not None for table in seen) <= 1
            seen.append(weakref.ref(chunk.table))
            yield chunk

    monkeypatch.setattr(verdicts, "read_chunks", watched)
    shard = write_rows(tmp_path / "in.parquet", ["a"] * 50)
    check(shard, model, tmp_path / "out", {"output.chunk_rows": 5})
    assert len(seen) == 10
