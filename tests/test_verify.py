"""verify: every damage is found and named, and nothing that is sound is called damaged."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reviewed_jobs import Job, change_job, changed, command, refoot, rewrite

from adaflash_batch.errors import ConfigError, InputError
from adaflash_batch.review.job_output import JobOutput
from adaflash_batch.review.problems import ROWS_LISTED, Problems
from adaflash_batch.review.status import read_status
from adaflash_batch.review.verify import Verification, verify
from adaflash_batch.shards.footer import PartFooter
from adaflash_batch.shards.fresh import mark_whole
from adaflash_batch.shards.locations import LOCAL


def told(found: Verification) -> str:
    return "\n".join(map(str, found.problems))


def test_a_finished_job_is_sound_and_complete(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    found = verify(job.opened())
    assert told(found) == ""
    assert (found.rows, found.rows_missing, found.parts, found.parts_expected) == (11, 0, 5, 5)
    assert (found.exit_code, found.errors, found.gaps) == (0, 2, [])
    code, out, _ = command(capfd, "verify", job.out, "--json")
    assert code == 0
    assert out.count("\n") == 1
    said = json.loads(out)
    assert (said["sound"], said["complete"], said["output_rows"]) == (True, True, found.output_rows)
    assert said["audit"] is None
    code, out, _ = command(capfd, "verify", job.out)
    assert (code, out.splitlines()[-1]) == (0, "sound and complete")


def test_nothing_is_written(job: Job) -> None:
    before = {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in job.folder.rglob("*") if p.is_file()
    }
    verify(job.opened())
    after = {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in job.folder.rglob("*") if p.is_file()
    }
    assert after == before


def test_missing_parts_are_incomplete_not_damaged(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    for chunk in (1, 2):
        job.part(0, chunk).unlink()
    (job.out / "_adaflash" / "rejects.parquet").unlink(missing_ok=True)
    found = verify(job.opened())
    assert (told(found), found.exit_code, found.rows_missing) == ("", 75, 4)
    assert [str(gap) for gap in found.gaps] == ["a.parquet: rows 3 to 6 (chunks 1 to 2)"]
    code, out, _ = command(capfd, "verify", job.out)
    assert code == 75
    assert "missing: a.parquet: rows 3 to 6 (chunks 1 to 2)" in out
    assert out.splitlines()[-1] == "sound, but 4 rows are missing"


def swap(job: Job) -> None:
    one, other = job.part(0, 0), job.part(0, 1)
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def truncate(job: Job) -> None:
    data = job.part(0, 1).read_bytes()
    job.part(0, 1).write_bytes(data[: len(data) // 2])


def flip_a_bit_of_a_text(job: Job) -> None:
    part = job.part(0, 0)
    group = pq.read_metadata(part).row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    column = next(each for each in columns if each.path_in_schema == "completion")
    data = bytearray(part.read_bytes())
    data[column.dictionary_page_offset + column.total_compressed_size - 3] ^= 4
    part.write_bytes(data)


def drop_a_row(job: Job) -> None:
    rewrite(job.part(0, 0), lambda table: pa.concat_tables([table.slice(0, 1), table.slice(2)]))


def drop_a_sample(job: Job) -> None:
    part = job.part(1, 0)
    rewrite(part, lambda table: table.slice(0, table.num_rows - 1))
    table = pq.read_table(part)
    footer = PartFooter.from_metadata(table.schema.metadata)
    assert footer is not None
    tokens = sum(usage["completion_tokens"] for usage in table["usage"].to_pylist())
    refoot(part, num_output_rows=table.num_rows, completion_tokens=tokens)


def not_utf8(table: Any) -> Any:
    index = table.schema.get_field_index("completion")
    texts = [b"\xff\xfe", *table["completion"].cast(pa.binary()).to_pylist()[1:]]
    broken = pa.array(texts, pa.binary()).view(pa.string())
    return table.set_column(index, table.schema.field("completion"), broken)


def recast(table: Any) -> Any:
    index = table.schema.get_field_index("tags")
    return table.set_column(index, "tags", table["tags"].cast(pa.large_list(pa.string())))


def with_metadata(table: Any) -> Any:
    return table.replace_schema_metadata({"made_by": "test"})


def change_the_input(job: Job) -> None:
    table = pq.read_table(job.folder / "b.parquet")
    pq.write_table(changed("id", 2, 99)(table), job.folder / "b.parquet")


def set_error(row: int, error: object) -> Callable[[Job], None]:
    return lambda job: rewrite(job.part(0, 0), changed("error", row, error))


def text(
    column: str, row: int, value: Any, part: tuple[int, int] = (0, 0)
) -> Callable[[Job], None]:
    return lambda job: rewrite(job.part(*part), changed(column, row, value))


def versions(first: int, last: int, named: int) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        for number in range(first, last + 1):
            (job.out / "_adaflash" / "drafter" / f"v{number:06}").mkdir(parents=True)
        refoot(job.part(0, 0), drafter_version=named)

    return change


PART = "part-00000-00000.parquet"
DAMAGES: list[tuple[str, Callable[[Job], object], list[str]]] = [
    (
        "two parts swapped",
        swap,
        [
            f"{PART}: has the wrong name: it holds chunk 1 of input file 0 (a.parquet)",
            "part-00000-00001.parquet: has the wrong name: it holds chunk 0",
        ],
    ),
    (
        "a part there twice",
        lambda job: shutil.copy(job.part(0, 0), job.part(0, 7)),
        ["part-00000-00007.parquet: has the wrong name", f"holds the same rows as {PART}"],
    ),
    (
        "a part of no input",
        lambda job: job.part(1, 1).rename(job.part(5, 1)),
        ["part-00005-00001.parquet: has the wrong name: it holds chunk 1 of input file 1"],
    ),
    (
        "a name of six digits",
        lambda job: job.part(1, 1).rename(job.out / "part-000001-00001.parquet"),
        ["part-000001-00001.parquet: has the wrong name"],
    ),
    (
        "a stranger",
        lambda job: shutil.copy(job.part(0, 0), job.out / "copy.parquet"),
        ["copy.parquet: is no part of this job"],
    ),
    (
        "a stranger below",
        lambda job: (
            shutil.copytree(job.out / "_adaflash", job.out / "old")
            and shutil.copy(job.part(0, 0), job.out / "old")
        ),
        [f"old/{PART}: is no part of this job"],
    ),
    ("a truncated part", truncate, ["part-00000-00001.parquet: cannot be read as Parquet"]),
    ("a flipped bit", flip_a_bit_of_a_text, [f"{PART}: cannot be read to its end", "CRC"]),
    ("a row dropped", drop_a_row, [f"{PART}: holds ", "its footer says"]),
    (
        "a sample dropped",
        drop_a_sample,
        ["part-00001-00000.parquet, row 2, column sample: begins 1 samples, the job asks for 2"],
    ),
    (
        "rows in another order",
        lambda job: rewrite(job.part(1, 0), lambda table: table.take([0, 1, 3, 2])),
        [
            "part-00001-00000.parquet, row 1, column sample: begins 2 samples, the job asks for 1",
            "part-00001-00000.parquet, row 3, column sample: begins 1 samples, the job asks for 2",
        ],
    ),
    (
        "a sample there twice",
        lambda job: rewrite(job.part(1, 0), lambda table: table.take([0, 1, 3, 3])),
        ["part-00001-00000.parquet, row 3, column sample: is 1, it follows 1"],
    ),
    (
        "columns in another order",
        lambda job: rewrite(
            job.part(0, 0), lambda table: table.select([1, 0, *range(2, table.num_columns)])
        ),
        [f"{PART}, column prompt: stands where id should"],
    ),
    (
        "metadata lost",
        lambda job: pq.write_table(
            with_metadata(pq.read_table(job.folder / "a.parquet")), job.folder / "a.parquet"
        ),
        [f"{PART}: has not the input's schema metadata 'made_by'"],
    ),
    ("a text lost", text("completion", 0, None), [f"{PART}, row 0, column completion: is null"]),
    (
        "a text that is not UTF-8",
        lambda job: rewrite(job.part(0, 0), not_utf8),
        [f"{PART}, row 0, column completion: is not valid UTF-8"],
    ),
    (
        "an input value changed in a part",
        text("prompt", 1, "another"),
        [f"{PART}, row 1, column prompt: is not what the input file a.parquet has"],
    ),
    (
        "a number changed in a part",
        text("share", 0, 5.0, (0, 1)),
        ["part-00000-00001.parquet, row 0, column share: is not what the input file"],
    ),
    (
        "a list changed in a part",
        text("tags", 1, ["other"]),
        [f"{PART}, row 1, column tags: is not what the input file"],
    ),
    (
        "an input changed",
        change_the_input,
        [
            "b.parquet: has changed since the job began",
            "part-00001-00000.parquet, row 2, column id: is not what the input file b.parquet has",
            "part-00001-00000.parquet, row 3, column id: is not what the input file b.parquet has",
        ],
    ),
    (
        "a count changed",
        text("usage", 0, {"prompt_tokens": 9}),
        [f"{PART}: its footer says ", "prompt_tokens, its rows come to"],
    ),
    (
        "a text longer than it may be",
        text("usage", 1, {"completion_tokens": 6}),
        [f"{PART}, row 1, column usage: completion_tokens is above max_new_tokens"],
    ),
    (
        "a text shorter than where it was cut",
        text("usage", 1, {"completion_tokens": 4}),
        [f"{PART}, row 1, column usage: completion_tokens is below max_new_tokens, at which"],
    ),
    (
        "accepted above verified",
        text("spec", 1, {"accepted": 3}),
        [
            f"{PART}, row 1, column spec: accepted is above verified",
            f"{PART}, row 1, column spec: accepted_hist does not come to accepted",
            f"{PART}: its footer says 0 accepted, its rows come to 3",
        ],
    ),
    (
        "a histogram changed",
        text("spec", 1, {"accepted_hist": [1, 3]}),
        [f"{PART}, row 1, column spec: accepted_hist does not come to accepted"],
    ),
    (
        "steps changed",
        text("spec", 0, {"steps": 1}),
        [f"{PART}, row 0, column spec: accepted_hist does not sum to steps"],
    ),
    (
        "a count lost",
        text("spec", 0, {"drafted": None}),
        [f"{PART}, row 0, column spec: drafted is null"],
    ),
    (
        "a footer changed",
        lambda job: refoot(job.part(0, 0), completion_tokens=1),
        [f"{PART}: its footer says 1 completion_tokens, its rows come to "],
    ),
    (
        "errors miscounted",
        lambda job: refoot(job.part(0, 0), num_errors=0),
        [f"{PART}: its footer says 0 num_errors, its rows come to 1"],
    ),
    (
        "a reason that is none",
        text("finish_reason", 0, "enough"),
        [f"{PART}, row 0, column finish_reason: is not stop, length or error"],
    ),
    (
        "an error beside a text",
        set_error(0, {"kind": "bad", "message": "no"}),
        [
            f"{PART}, row 0, column completion: holds a text beside an error",
            f"{PART}, row 0, column finish_reason: does not say error and there is one",
            f"{PART}, row 0, column usage: completion_tokens is not 0 beside an error",
        ],
    ),
    (
        "an error lost",
        lambda job: rewrite(job.part(0, 0), changed("error", 2, None)),
        [
            f"{PART}, row 2, column completion: is null and there is no error",
            f"{PART}, row 2, column finish_reason: says error and there is none",
        ],
    ),
    (
        "an error without a kind",
        set_error(2, {"kind": ""}),
        [f"{PART}, row 2, column error: has no kind"],
    ),
    (
        "a time below zero",
        text("timing", 0, {"decode_s": -1.0}),
        [f"{PART}, row 0, column timing: decode_s is no number of seconds"],
    ),
    (
        "a column of another type",
        lambda job: rewrite(job.part(0, 0), recast),
        [f"{PART}, column tags: is large_list<"],
    ),
    (
        "a column lost",
        lambda job: rewrite(job.part(0, 0), lambda table: table.drop_columns(["timing"])),
        [f"{PART}, column timing: is missing"],
    ),
    (
        "a column more",
        lambda job: rewrite(
            job.part(0, 0), lambda table: table.append_column("more", table.column("id"))
        ),
        [f"{PART}, column more: should not be there"],
    ),
    (
        "a part of another job",
        lambda job: refoot(job.part(0, 0), fingerprint="0" * 64),
        [f"{PART}: was written by another job: its fingerprint is 000000000000…"],
    ),
    (
        "a part of another input",
        lambda job: refoot(job.part(0, 0), shard_name="c.parquet"),
        [f"{PART}: belongs to input file 0 (c.parquet), the job has a.parquet in its place"],
    ),
    (
        "a part of an older input",
        lambda job: refoot(job.part(0, 0), shard_digest="0"),
        [f"{PART}: was made from another state of the input file a.parquet"],
    ),
    (
        "rows of another place",
        lambda job: refoot(job.part(0, 0), first_row=1),
        [f"{PART}: holds 3 input rows from row 1 on, its chunk has 3 from row 0 on"],
    ),
    (
        "a footer of nobody",
        lambda job: pq.write_table(
            pq.read_table(job.part(0, 0)).replace_schema_metadata(None), job.part(0, 0)
        ),
        [f"{PART}: has no footer of a part"],
    ),
    (
        "facts changed",
        lambda job: change_job(job, lambda said: said["text_facts"].update({"sampling.seed": 3})),
        ["_adaflash/job.json: has been changed: its fingerprint is not that of its facts"],
    ),
    (
        "inputs changed",
        lambda job: change_job(job, lambda said: said["inputs"][0].update(digest="0")),
        [
            "_adaflash/job.json: lists other input files",
            "a.parquet: has changed since the job began",
            f"{PART}: was made from another state of the input file a.parquet",
        ],
    ),
    (
        "a version lost",
        versions(2, 6, named=7),
        ["v000007: is not there: parts were committed with version 7"],
    ),
    (
        "an old version lost that newer ones had not pushed out",
        versions(3, 9, named=2),
        ["v000002: is not there"],
    ),
]


@pytest.mark.parametrize(
    ("damage", "expected"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES]
)
def test_every_damage_is_found_and_named(
    job: Job, damage: Callable[[Job], object], expected: list[str]
) -> None:
    damage(job)
    found = verify(job.opened())
    assert found.exit_code == 1
    for line in expected:
        assert line in told(found)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_called_sound_after_a_flipped_bit_reads_as_before(job: Job, seed: int) -> None:
    part, dice = job.part(0, 0), random.Random(seed)
    data, rows = part.read_bytes(), pq.read_table(part)
    num_found = 0
    for _ in range(40):
        flipped = bytearray(data)
        flipped[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        part.write_bytes(flipped)
        found = verify(job.opened())
        if found.exit_code == 0:
            same = pq.read_table(part)
            assert same.schema.names == rows.schema.names
            assert same.drop_columns("share").equals(rows.drop_columns("share"))
        else:
            assert found.problems
            assert all(problem.file == part.name for problem in found.problems)
            num_found += 1
    assert num_found > 0


def test_only_what_is_wrong_is_called_wrong(job: Job) -> None:
    rewrite(job.part(0, 0), changed("prompt", 1, "another"))
    assert len(verify(job.opened()).problems) == 1
    assert verify(job.opened(), compare_inputs=False).problems == []


def test_inputs_that_are_gone(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    (job.folder / "b.parquet").unlink()
    with pytest.raises(InputError, match=r"b\.parquet") as caught:
        verify(job.opened())
    assert caught.value.hint == "--no-inputs looks at the output alone"
    assert command(capfd, "verify", job.out)[0] == 5
    code, out, _ = command(capfd, "verify", job.out, "--no-inputs")
    assert code == 0
    assert "input files left out" in out
    # Without an input file the parts of one are held against each other.
    rewrite(job.part(1, 1), lambda table: table.drop_columns(["tags"]))
    found = verify(job.opened(), compare_inputs=False)
    assert told(found).startswith("part-00001-00001.parquet, column tags: is missing")
    assert len(found.problems) == 1


def test_what_a_kill_leaves_is_told_and_is_no_damage(job: Job) -> None:
    (job.out / ".part-00000-00001.parquet.0a1b2c3d.tmp").write_bytes(b"half")
    journals = job.out / "_adaflash" / "journal"
    journals.mkdir(exist_ok=True)
    (journals / "00000-00001.jsonl").write_bytes(b"")
    found = verify(job.opened())
    assert found.exit_code == 0
    assert any(".part-00000-00001.parquet.0a1b2c3d.tmp" in note for note in found.notes)
    assert any("journals of chunks that are committed" in note for note in found.notes)
    job.part(0, 1).unlink()
    found = verify(job.opened())
    assert any("journals of chunks that are not whole" in note for note in found.notes)


def test_an_output_that_is_being_replaced_says_so(job: Job) -> None:
    fresh = job.out / "_adaflash" / "fresh"
    (fresh / "_adaflash").mkdir(parents=True)
    shutil.copy(job.out / "_adaflash" / "job.json", fresh / "_adaflash")
    found = verify(job.opened())
    assert (found.exit_code, found.notes) == (
        0,
        ["run --fresh is making a new output, or was killed while it did"],
    )
    mark_whole(LOCAL, str(job.out))
    found = verify(job.opened())
    assert (found.exit_code, len(found.notes)) == (0, 1)
    assert "run the job again to finish that" in found.notes[0]
    assert "run the job again to finish that" in read_status(job.opened()).notes[0]


def test_versions_that_newer_ones_have_pushed_out_are_only_told(job: Job) -> None:
    versions(3, 10, named=2)(job)
    found = verify(job.opened())
    assert found.exit_code == 0
    assert any("1 older versions" in note for note in found.notes)


def rejects(job: Job, change: Callable[[list[dict[str, Any]]], object]) -> None:
    said = {"message": "the prompt is null", "prompt": None, "input": "a.parquet", "sample": 0}
    rows = [
        {**said, "row": 2, "kind": "null_prompt", "part": PART},
        {
            **said,
            "row": 4,
            "kind": "empty_prompt",
            "message": "the prompt is empty",
            "part": "part-00000-00001.parquet",
        },
    ]
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows), job.out / "_adaflash" / "rejects.parquet")


def test_rejects_are_the_rows_with_errors(job: Job) -> None:
    rejects(job, lambda rows: None)
    assert told(verify(job.opened())) == ""
    rejects(job, lambda rows: rows.pop())
    assert "rejects.parquet: has 0 errors of part-00000-00001.parquet, which holds 1" in told(
        verify(job.opened())
    )
    rejects(job, lambda rows: rows[0].update(row=1))
    assert f"rejects.parquet: has other errors of {PART}" in told(verify(job.opened()))
    (job.out / "_adaflash" / "rejects.parquet").write_bytes(b"no")
    assert "rejects.parquet: cannot be read" in told(verify(job.opened()))


def test_the_rows_of_one_fault_are_listed_up_to_a_limit() -> None:
    problems = Problems()
    for begin in (0, 50):
        problems.add_rows("part", "column", range(begin, begin + 50), "is wrong")
    problems.add_rows("part", "other", [3], "is wrong")
    problems.end_file()
    assert len(problems.found) == ROWS_LISTED + 2
    assert str(problems.found[-1]) == "part, column column: is wrong, in 80 more rows, too"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no job"),
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "'spec' is missing"),
        ('{"fingerprint": "x", "text_facts": {}, "spec": {"input": {"paths": ["a"]}}}', "output"),
    ],
)
def test_a_directory_without_a_usable_job_is_refused(
    tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "_adaflash").mkdir()
        (tmp_path / "_adaflash" / "job.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        JobOutput.open(str(tmp_path))


def test_an_older_job_that_does_not_list_its_inputs_says_so(job: Job) -> None:
    change_job(job, lambda said: said.pop("inputs") and None)
    with pytest.raises(ConfigError, match="does not list the input files") as caught:
        job.opened()
    assert "run the job again" in str(caught.value.hint)
