"""Whatever order rows come in, each chunk is committed once, when it is whole."""

from collections import Counter
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.request import Completion, Prompt, RowError, RowKey, Sampling
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.open_chunks import OpenChunks
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.schema import OutputRow, build_table, output_schema

REFUSED = RowError("null_prompt", "the prompt is null")


def make_chunks(shard: int, samples: list[int], chunk_rows: int) -> list[Chunk]:
    """The chunks of a file whose rows want so many samples each; 0 stands for a row refused."""
    prompts = [
        Prompt(shard, row, row, "x", Sampling(n=n or 2), None if n else REFUSED)
        for row, n in enumerate(samples)
    ]
    table = pa.table({"row": range(len(samples))})
    return [
        Chunk(
            Shard(shard, f"{shard}.parquet", ""),
            index,
            first_row,
            table.slice(first_row, chunk_rows),
            prompts[first_row : first_row + chunk_rows],
        )
        for index, first_row in enumerate(range(0, len(samples), chunk_rows))
    ]


def completed(key: RowKey) -> OutputRow:
    return OutputRow(str(key), Completion(key, [1], "stop", 1))


class Recorder:
    """Commits into a dictionary, looking at each chunk as the writer would."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def commit(self, chunk: Chunk, rows: dict[RowKey, OutputRow]) -> None:
        key = (chunk.shard.index, chunk.index)
        assert key not in self.parts
        table = build_table(chunk, rows, output_schema(chunk.table.schema))
        values = (table.column(name).to_pylist() for name in ("row", "sample"))
        self.parts[key] = list(zip(*values, strict=True))


files = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=3)


@given(files, st.integers(1, 5), st.randoms(use_true_random=False))
def test_each_chunk_is_committed_once_and_when_whole(
    shards: list[list[int]], chunk_rows: int, dice: Random
) -> None:
    recorder = Recorder()
    opened = OpenChunks(chunk_rows, recorder.commit)
    coming = [c for shard, n in enumerate(shards) for c in make_chunks(shard, n, chunk_rows)]
    due: list[Prompt | RowKey] = []
    left: Counter[tuple[int, int]] = Counter()
    while coming or due:
        if coming and (not due or dice.random() < 0.3):
            chunk = coming.pop(0)
            opened.begin(chunk)
            news = events(chunk)
            left[chunk.shard.index, chunk.index] = len(news)
            due += news
            continue
        event = due.pop(dice.randrange(len(due)))
        finish(opened, event, is_last=not any(same_row(event, other) for other in due))
        left[event.shard, event.row // chunk_rows] -= 1
        assert recorder.parts.keys() == {key for key, count in left.items() if count == 0}
        assert opened.num_open == sum(count > 0 for count in left.values())
    expected = [
        (row, k) for shard in shards for row, n in enumerate(shard) for k in range(max(n, 1))
    ]
    assert [pair for key in sorted(recorder.parts) for pair in recorder.parts[key]] == expected


def events(chunk: Chunk) -> list[Prompt | RowKey]:
    """What will come of a chunk: samples one by one, and whole rows refused."""
    found: list[Prompt | RowKey] = []
    for prompt in chunk.prompts:
        keys = [RowKey(prompt.shard, prompt.row, k) for k in range(prompt.sampling.n)]
        found += keys if prompt.error is None else [prompt]
    return found


def same_row(event: Prompt | RowKey, other: Prompt | RowKey) -> bool:
    return (event.shard, event.row) == (other.shard, other.row)


def finish(opened: OpenChunks, event: Prompt | RowKey, *, is_last: bool) -> None:
    if isinstance(event, Prompt):
        opened.refuse(event, REFUSED)
        return
    assert opened.prompt(event).row == event.row
    assert opened.put(event, completed(event)) is is_last


def test_the_same_sample_twice_is_a_bug_of_ours() -> None:
    (chunk,) = make_chunks(0, [2, 1], 2)
    opened = OpenChunks(2, lambda chunk, rows: None)
    opened.begin(chunk)
    key = RowKey(0, 0, 1)
    opened.put(key, completed(key))
    with pytest.raises(AssertionError, match="twice"):
        opened.put(key, completed(key))


def test_an_error_in_the_commit_comes_through() -> None:
    (chunk,) = make_chunks(0, [1], 2)

    def fail(chunk: Chunk, rows: dict[RowKey, OutputRow]) -> None:
        raise OSError("disk full")

    opened = OpenChunks(2, fail)
    opened.begin(chunk)
    with pytest.raises(OSError, match="disk full"):
        opened.put(RowKey(0, 0, 0), completed(RowKey(0, 0, 0)))
