"""Shares of a job: every chunk is in exactly one of them, and a wrong index is refused."""

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash_batch.errors import ConfigError
from adaflash_batch.shards.inputs import Shard
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.portion import index_from, one_of, read_name
from adaflash_batch.shards.reader import num_chunks

sizes = st.lists(st.integers(0, 25), min_size=1, max_size=5)


def infos_of(sizes: list[int]) -> list[ShardInfo]:
    return [
        ShardInfo(Shard(n, f"{n}", f"/{n}"), size, pa.schema([]), "")
        for n, size in enumerate(sizes)
    ]


@given(sizes, st.integers(1, 7), st.integers(1, 9))
def test_every_chunk_is_in_exactly_one(sizes: list[int], chunk_rows: int, count: int) -> None:
    infos = infos_of(sizes)
    shares = [one_of(infos, chunk_rows, index, count) for index in range(count)]
    held = [0] * count
    for info in infos:
        for chunk in range(num_chunks(info.num_rows, chunk_rows)):
            holders = [i for i, share in enumerate(shares) if share.holds(info.shard.index, chunk)]
            assert len(holders) == 1
            held[holders[0]] += min(chunk_rows, info.num_rows - chunk * chunk_rows)
    assert held == [share.num_rows for share in shares]
    lengths = [share.end - share.first for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert not shares[0].holds(len(sizes), 0)
    assert all(not a.overlaps(b) for a, b in pairwise(shares))
    assert all(share.overlaps(share) == (share.end > share.first) for share in shares)
    assert [read_name(share.name) for share in shares] == [(index, count) for index in range(count)]


def test_shares_of_another_count_overlap() -> None:
    infos = infos_of([100])
    assert one_of(infos, 10, 0, 2).overlaps(one_of(infos, 10, 1, 4))
    assert not one_of(infos, 10, 0, 2).overlaps(one_of(infos, 10, 3, 4))
    assert one_of(infos, 10, 0, 1).overlaps(one_of(infos, 10, 3, 4))


@pytest.mark.parametrize("name", ["", "lock", "2-of-1", "1-of-1", "a-of-b", "1-of-"])
def test_other_names_are_none(name: str) -> None:
    assert read_name(name) is None


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_the_scheduler_says_which(scheduler: str) -> None:
    variable = {"slurm": "SLURM_ARRAY_TASK_ID", "kubernetes": "JOB_COMPLETION_INDEX"}[scheduler]
    assert index_from(scheduler, 8, {variable: "7"}) == 7
    for value in (None, "", " ", "8", "-1", "x", "1.0"):
        given = {} if value is None else {variable: value}
        with pytest.raises(ConfigError, match=variable):
            index_from(scheduler, 8, given)
