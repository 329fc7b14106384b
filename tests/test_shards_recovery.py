"""What counts as done after a run that ended, well or not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.recovery import Committed, committed, differences, fingerprint
from adaflash_batch.shards.writer import PartFooter, Totals, part_name, write_part
from adaflash_batch.stats import SpeculationCounts

CHUNK_ROWS = 10
SHARDS = [
    ShardInfo(Shard(0, "a.parquet", "/in/a.parquet"), 25, pa.schema([]), "digest-a"),
    ShardInfo(Shard(1, "b.parquet", "/in/b.parquet"), 10, pa.schema([]), "digest-b"),
]


def footer_of(shard: int, chunk: int, **changes: Any) -> PartFooter:
    info = SHARDS[shard]
    num_rows = min(CHUNK_ROWS, info.num_rows - chunk * CHUNK_ROWS)
    counts = SpeculationCounts(steps=2, drafted=7, verified=5, accepted=3, accepted_hist=[0, 1, 1])
    sums = Totals(num_rows, num_rows, 1, 100, 50, 0, counts)
    footer = PartFooter(
        "job", info.shard.name, info.digest, shard, chunk, chunk * CHUNK_ROWS, sums, chunk
    )
    return replace(footer, **changes)


def commit(directory: Path, footer: PartFooter, name: str | None = None) -> Path:
    table = pa.table({"prompt": ["p"] * footer.totals.num_output_rows})
    name = name or part_name(footer.shard_index, footer.chunk_index)
    write_part(str(directory), name, table, footer)
    return directory / name


def look(directory: Path) -> Committed:
    return committed(str(directory), "job", SHARDS, CHUNK_ROWS)


def test_nothing_is_there(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "not made yet"):
        assert look(directory) == Committed()


def test_parts_are_found_and_summed(tmp_path: Path) -> None:
    for sequence, (shard, chunk) in enumerate([(1, 0), (0, 2), (0, 0)]):
        commit(tmp_path, footer_of(shard, chunk, sequence=sequence, drafter_version=9 - sequence))
    found = look(tmp_path)
    assert found.done == {(0, 0), (0, 2), (1, 0)}
    assert found.is_done(0, 2)
    assert not found.is_done(0, 1)
    assert found.notes == []
    assert (found.drafter_version, found.num_committed) == (7, 3), "that of the last one committed"
    assert found.totals.num_rows == found.totals.num_output_rows == 25
    assert (found.totals.num_errors, found.totals.completion_tokens) == (3, 150)
    assert found.totals.counts.accepted_hist == [0, 3, 3]


@pytest.mark.parametrize("versions", [(1, 4, 2), (4, 2, 1), (3, 0, None), (None, 1, 0)])
def test_the_part_that_was_committed_last_names_the_version(
    versions: tuple[int | None, ...], tmp_path: Path
) -> None:
    """Wherever it stands among the files, and also after a rollback to a lower number."""
    places = [(0, 2), (1, 0), (0, 1)]
    for sequence, ((shard, chunk), version) in enumerate(zip(places, versions, strict=True)):
        footer = footer_of(shard, chunk, sequence=sequence + 5, drafter_version=version)
        commit(tmp_path, footer)
    found = look(tmp_path)
    assert (found.drafter_version, found.num_committed) == (versions[-1], 8)
    # What was lost is done again; of what is left the last one counts.
    (tmp_path / part_name(0, 1)).unlink()
    found = look(tmp_path)
    assert (found.drafter_version, found.num_committed) == (versions[1], 7)


def test_parts_of_before_there_was_an_order_are_read(tmp_path: Path) -> None:
    for shard, chunk, version in [(0, 0, 1), (0, 1, 3), (1, 0, 2)]:
        commit(tmp_path, footer_of(shard, chunk, drafter_version=version))
    for path in tmp_path.iterdir():
        table = pq.read_table(path)
        table = table.replace_schema_metadata(
            {k: v for k, v in table.schema.metadata.items() if k != b"adaflash.sequence"}
        )
        pq.write_table(table, path)
    found = look(tmp_path)
    assert len(found.done) == 3
    assert (found.drafter_version, found.num_committed) == (3, 1)
    # A part of today is later than all of them.
    footer = footer_of(0, 2, sequence=found.num_committed, drafter_version=0)
    commit(tmp_path, footer)
    found = look(tmp_path)
    assert (found.drafter_version, found.num_committed) == (0, 2)


def test_only_footers_are_read(tmp_path: Path) -> None:
    path = commit(tmp_path, footer_of(0, 0))
    content = bytearray(path.read_bytes())
    content[4:20] = b"\xff" * 16
    path.write_bytes(content)
    assert look(tmp_path).done == {(0, 0)}


@pytest.mark.parametrize("kept", [0, 1, 4, 30, -1, -9])
def test_torn_part_is_missing_and_noted(kept: int, tmp_path: Path) -> None:
    commit(tmp_path, footer_of(0, 0))
    torn = commit(tmp_path, footer_of(0, 1))
    torn.write_bytes(torn.read_bytes()[:kept])
    found = look(tmp_path)
    assert found.done == {(0, 0)}
    assert len(found.notes) == 1
    assert torn.name in found.notes[0]
    commit(tmp_path, footer_of(0, 1))
    assert look(tmp_path).done == {(0, 0), (0, 1)}


def test_part_with_other_rows_than_it_says_is_missing(tmp_path: Path) -> None:
    footer = footer_of(0, 0)
    write_part(str(tmp_path), part_name(0, 0), pa.table({"prompt": ["p"]}), footer)
    found = look(tmp_path)
    assert found.done == set()
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "other"}, "another job"),
        ({"shard_digest": "other"}, "a.parquet has changed"),
        ({"shard_name": "z.parquet"}, "belongs to the input file z.parquet"),
        ({"first_row": 5}, "no chunk of 10 rows"),
        ({"totals": Totals(num_rows=4, num_output_rows=4)}, "no chunk of 10 rows"),
        ({"shard_index": 1}, "renamed"),
        ({"chunk_index": 1}, "renamed"),
    ],
)
def test_part_of_something_else_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = commit(tmp_path, footer_of(0, 0, **changes), part_name(0, 0))
    with pytest.raises(ConfigError, match=words) as caught:
        look(tmp_path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(("shard", "chunk"), [(7, 0), (0, 3), (1, 1)])
def test_part_beyond_the_input_is_refused(shard: int, chunk: int, tmp_path: Path) -> None:
    footer = footer_of(0, 0)
    info = SHARDS[min(shard, 1)]
    footer = replace(
        footer,
        shard_index=shard,
        chunk_index=chunk,
        first_row=chunk * CHUNK_ROWS,
        shard_name=info.shard.name,
        shard_digest=info.digest,
    )
    commit(tmp_path, footer)
    with pytest.raises(ConfigError):
        look(tmp_path)


def test_other_size_of_chunks_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, footer_of(0, 0))
    with pytest.raises(ConfigError, match="no chunk of 20 rows") as caught:
        committed(str(tmp_path), "job", SHARDS, 20)
    assert "--chunk-rows" in str(caught.value.hint)


def test_somebody_elses_file_is_never_overwritten_unasked(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / part_name(0, 0))
    with pytest.raises(ConfigError, match="not written by this version"):
        look(tmp_path)


def test_foreign_files_are_noted_or_ignored_and_kept(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "data.parquet")
    kept = ["notes.txt", ".hidden.parquet", "_meta.parquet", "part-1-2.parquet", ".x.tmp"]
    for name in kept:
        (tmp_path / name).write_text("x")
    (tmp_path / "part-00000-00000.parquet").mkdir()
    found = look(tmp_path)
    assert found.done == set()
    assert [note.split("/")[-1].split()[0] for note in found.notes] == [
        "data.parquet",
        "part-1-2.parquet",
    ]
    assert all((tmp_path / name).exists() for name in kept)


def test_temporary_files_of_a_dead_run_are_removed(tmp_path: Path) -> None:
    commit(tmp_path, footer_of(0, 0))
    (tmp_path / ".part-00000-00001.parquet.0123abcd.tmp").write_bytes(b"half")
    assert look(tmp_path).done == {(0, 0)}
    assert [path.name for path in tmp_path.iterdir()] == [part_name(0, 0)]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Dots in keys would make two nestings look alike; ours are names.
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text("abc", min_size=1, max_size=2), json_values, max_size=4)


@given(json_objects, json_objects)
def test_differences_are_empty_iff_fingerprints_are_equal(old: Any, new: Any) -> None:
    assert (differences(old, new) == []) == (fingerprint(old) == fingerprint(new))


@given(json_objects)
def test_fingerprint_survives_json_and_the_order_of_keys(fields: Any) -> None:
    again = json.loads(json.dumps(dict(reversed(fields.items()))))
    assert fingerprint(again) == fingerprint(fields)
    assert differences(fields, again) == []


def test_differences_read_like_settings() -> None:
    old = {"sampling": {"temperature": 0.0, "stop": ("a",), "n": 1}, "model": "m", "gone": True}
    new = {"sampling": {"temperature": 0.7, "stop": ["a"], "n": 1}, "model": "M", "new": None}
    assert differences(old, new) == [
        "gone: true -> (absent)",
        'model: "m" -> "M"',
        "new: (absent) -> null",
        "sampling.temperature: 0.0 -> 0.7",
    ]


def test_fingerprint_refuses_what_has_no_canonical_form() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        fingerprint({"x": float("nan")})
    with pytest.raises(TypeError):
        fingerprint({"x": object()})
