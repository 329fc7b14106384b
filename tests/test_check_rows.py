"""What `check` says of rows is what `run` does to them."""

import string
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checks import Heard, check
from folders import (
    CONTEXT,
    TEMPLATE,
    VOCABULARY,
    parts,
    run,
    tiny_drafter_folder,
    tiny_model_folder,
    write_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

NEW = 8
TURN = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}{% endfor %}" + TEMPLATE
)


# The prompts themselves need not be text.
_WHAT_IT_IS = ["file", "row", "sample", "error"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), template=STRICT)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer knows tokens that it has no logits for."""
    return tiny_model_folder(tmp_path_factory.mktemp("small"), vocab_size=VOCABULARY - 40)


@pytest.fixture
def room() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)


def run_errors(out: Path) -> list[tuple[str, int, str, str]]:
    """(file, row, kind, message) of the rows that a run gave errors, each row once."""
    found = []
    for part in parts(out):
        for row in pq.read_table(part, columns=_WHAT_IT_IS).to_pylist():
            if row["error"] and row["sample"] == 0:
                error = row["error"]
                found.append((row["file"], row["row"], error["kind"], error["message"]))
    return found


def agree(shards: list[Path], model: Path, keys: dict[str, object]) -> Heard:
    """Check first, so that nothing that a run leaves can help; then run, and compare."""
    out = shards[0].parent / "out"
    heard = Heard()
    report = check(shards, model, out, keys, heard=heard)
    assert not out.exists()
    summary = run(shards, model, out, keys)
    assert heard.errors() == run_errors(out)
    assert report.exit_code == summary.exit_code
    assert report.num_rows == summary.fields["rows"] == heard.total == heard.done
    served = {(shard, row) for shard, row, *_ in heard.errors()}
    assert report.work.rows == report.num_rows - len(served)
    return heard


def write(folder: Path, name: str, columns: dict[str, Any]) -> Path:
    """A file whose rows say where they are from."""
    count = len(next(iter(columns.values())))
    return write_rows(folder / name, {**columns, "file": [name] * count, "row": range(count)})


SPECIAL = st.sampled_from(["<|im_end|>", "<s>", "a<|im_start|>user\n"])
SHORT = st.text(max_size=12) | SPECIAL | st.sampled_from(["👩‍👩‍👧", "🇹🇭", "ไทย", "", " ", "\n\t"])
LONG = st.integers(CONTEXT - 60, CONTEXT + 2).map(lambda size: ("ab " * size)[:size])
PROMPT = st.none() | SHORT | LONG
WHOLE = st.integers(-1, 40) | st.none()
COLUMNS: dict[str, tuple[Any, Any]] = {
    "max_new_tokens": (WHOLE, pa.int64()),
    "temperature": (st.sampled_from([None, 0.0, 1.5, -1.0, float("nan")]), pa.float64()),
    "n": (st.sampled_from([None, 0, 1, 2]), pa.int32()),
    "stop_token_ids": (st.lists(st.integers(-1, VOCABULARY), max_size=2), pa.list_(pa.int64())),
    "min_new_tokens": (st.sampled_from([None, 0, NEW, NEW + 1]), pa.int64()),
}
KEYS = st.fixed_dictionaries(
    {
        "prompt.chat_template": st.booleans(),
        "prompt.special_tokens": st.sampled_from(["text", "parse"]),
        "prompt.on_long_prompt": st.sampled_from(["error", "truncate-left", "truncate-right"]),
        "output.chunk_rows": st.integers(1, 4),
        "engine.kv_memory": st.sampled_from(["4MiB", "30KB"]),
        "speculation.lookup": st.booleans(),
    }
)


@st.composite
def sampled_rows(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(1, 5))
    columns = {"prompt": pa.array(draw(st.lists(PROMPT, min_size=size, max_size=size)))}
    columns["prompt"] = columns["prompt"].cast(pa.string())
    for name in draw(st.sets(st.sampled_from(sorted(COLUMNS)), max_size=2)):
        values, arrow_type = COLUMNS[name]
        columns[name] = pa.array(draw(st.lists(values, min_size=size, max_size=size)), arrow_type)
    return columns


@settings(max_examples=25)
@given(first=sampled_rows(), second=st.lists(PROMPT, max_size=3), keys=KEYS)
def test_texts(
    model: Path, first: dict[str, Any], second: list[str | None], keys: dict[str, object]
) -> None:
    with TemporaryDirectory() as folder:
        names = sorted(set(first) - {"prompt"})
        other = {"prompt": pa.array(second, pa.large_string())}
        other |= {name: pa.nulls(len(second), COLUMNS[name][1]) for name in names}
        shards = [write(Path(folder), "a.parquet", first), write(Path(folder), "b.parquet", other)]
        agree(shards, model, {**keys, "input.columns": {name: name for name in names}})


ROLE = st.sampled_from(["user", "assistant", "system", "", None])
SAID = st.lists(st.fixed_dictionaries({"role": ROLE, "content": st.none() | SHORT}), max_size=3)


@settings(max_examples=15)
@given(rows=st.lists(st.none() | SAID, min_size=1, max_size=6), keys=KEYS)
def test_conversations(
    model: Path, rows: list[list[dict[str, str | None]] | None], keys: dict[str, object]
) -> None:
    with TemporaryDirectory() as folder:
        shard = write(Path(folder), "a.parquet", {"messages": pa.array(rows, TURN)})
        agree([shard], model, {**keys, "prompt.chat_template": True})


def test_rows_of_every_kind(model: Path, room: Path) -> None:
    """What hypothesis need not find."""
    talks: list[Any] = [
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": None}],
        [],
        None,
        [{"role": "user", "content": "x" * CONTEXT}],
        [{"role": "user", "content": "y" * 150}],
    ]
    columns = {"messages": pa.array(talks, TURN), "limit": [0, *[None] * 6]}
    shard = write(room, "a.parquet", columns)
    keys: dict[str, object] = {
        "prompt.chat_template": True,
        "input.columns": {"max_new_tokens": "limit"},
        "engine.kv_memory": "30KB",
    }
    heard = agree([shard], model, keys)
    assert [kind for _, _, kind, _ in heard.errors()] == [
        *("bad_sampling", "template_failed", "bad_messages", "empty_prompt", "null_prompt"),
        *("prompt_too_long", "kv_memory_too_small"),
    ]


def test_tokens_beyond_the_model_and_text_that_is_none(small: Path, room: Path) -> None:
    letters = [*string.ascii_letters, "é", "ÿ", "\u00ad"]
    texts = pa.array([letter.encode() for letter in letters] + [b"\xff"], pa.binary())
    buffers = texts.buffers()
    column = pa.StringArray.from_buffers(len(texts), buffers[1], buffers[2])
    heard = agree([write(room, "a.parquet", {"prompt": column})], small, {})
    assert {kind for _, _, kind, _ in heard.errors()} == {"unknown_token", "bad_text"}
    rejects = pq.read_table(room / "out" / "_adaflash" / "rejects.parquet").to_pylist()
    assert [(row["row"], row["kind"]) for row in rejects] == [
        (row, kind) for _, row, kind, _ in heard.errors()
    ]
    assert rejects[-1]["prompt"] == "\\xff"


def test_samples_of_a_row_count_as_one_row(model: Path, room: Path) -> None:
    shard = write(room, "a.parquet", {"prompt": ["x", None, "y" * CONTEXT]})
    heard = agree([shard], model, {"sampling.n": 3})
    assert [row for _, row, *_ in heard.errors()] == [1, 2]


def test_a_drafter_takes_its_share_of_kv_memory(model: Path, room: Path) -> None:
    drafter = tiny_drafter_folder(room / "drafter")
    shard = write(room, "a.parquet", {"prompt": ["x" * size for size in range(1, 120, 7)]})
    keys: dict[str, object] = {
        "speculation.drafter": str(drafter),
        "engine.kv_memory": "60KB",
        "adapt.when": "off",
    }
    heard = agree([shard], model, keys)
    assert 0 < len(heard.errors()) < 17
