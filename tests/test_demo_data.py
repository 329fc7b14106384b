"""The demo prompts are those of their script."""

import runpy
from pathlib import Path

import polars as pl
from polars.testing import assert_frame_equal

DATA = Path(__file__).parent.parent / "data"


def test_the_demo_prompts_are_what_the_script_makes(tmp_path: Path) -> None:
    made = runpy.run_path(str(DATA / "make_prompts.py"))["make_table"]()
    shipped = pl.read_parquet(DATA / "prompts.parquet")
    assert_frame_equal(shipped, made)


def test_the_demo_prompts_are_all_different() -> None:
    shipped = pl.read_parquet(DATA / "prompts.parquet")
    assert shipped.height == 64
    assert shipped["id"].n_unique() == shipped["prompt"].n_unique() == 64
    assert shipped["topic"].value_counts()["count"].unique().to_list() == [8]
