"""Prompts to train a drafter on: enough, different, balanced, and apart from what is measured."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest
from polars.testing import assert_frame_equal

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("maker", DATA / "make_training_prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table(maker: ModuleType) -> pl.DataFrame:
    made = maker.make_table(20_000, seed=0, templates_only=True)
    assert isinstance(made, pl.DataFrame)
    return made


def test_twenty_thousand_different_prompts_come_of_templates_alone(table: pl.DataFrame) -> None:
    assert table.columns == ["id", "domain", "split", "prompt"]
    assert table.height == 20_000
    assert table["id"].n_unique() == 20_000
    assert table["prompt"].str.to_lowercase().n_unique() == 20_000
    assert table["prompt"].str.len_chars().min() >= 15  # type: ignore[operator]
    assert table["prompt"].str.len_chars().max() <= 1500  # type: ignore[operator]


def test_domains_are_balanced_also_in_every_stretch(table: pl.DataFrame) -> None:
    counts = table["domain"].value_counts()["count"]
    assert len(counts) == 12
    assert max(counts) - min(counts) <= 1
    stretch = table[6000:6120]["domain"].value_counts()["count"]
    assert stretch.to_list() == [10] * 12
    for domain in table["domain"].unique():
        heldout = table.filter(domain=domain, split="heldout").height
        assert heldout == round(table.filter(domain=domain).height * 0.05)


def test_no_slot_is_left_open(table: pl.DataFrame) -> None:
    left = table.filter(pl.col("prompt").str.contains(r"\{[A-Za-z_.]+\d?(:\d|\})"))
    assert left["prompt"].to_list() == []


def test_no_demo_prompt_is_trained_on(maker: ModuleType, table: pl.DataFrame) -> None:
    demo = maker.demo_prompts()
    assert len(demo) == 64
    assert not demo & {maker.key(prompt) for prompt in table["prompt"]}
    prompts = iter(["Fresh one", next(iter(demo)).upper().replace(" ", "  "), "Fresh  ONE", "Two"])
    assert maker.distinct(prompts, 2, set(demo), "test") == ["Fresh one", "Two"]


def test_the_seed_alone_decides(maker: ModuleType, table: pl.DataFrame) -> None:
    random.seed(5)
    assert_frame_equal(maker.make_table(20_000, seed=0, templates_only=True), table)
    other = maker.make_table(600, seed=1, templates_only=True)
    assert len(set(other["prompt"]) & set(table["prompt"])) < 100


def test_held_out_prompts_share_no_family_and_no_reserved_phrase(
    maker: ModuleType, table: pl.DataFrame
) -> None:
    slots, domains = maker.read_phrases()
    train, heldout = (table.filter(split=split) for split in ("train", "heldout"))
    for domain, families in domains.items():
        assert len(families["heldout"]) >= 2
        assert not set(families["train"]) & set(families["heldout"]), domain
    for name in ("subject", "topic", "code_task"):
        reserved = maker.slots_of(slots, "heldout")[name]
        assert set(reserved).isdisjoint(maker.slots_of(slots, "train")[name])
        assert len(reserved) >= 4
        phrase = re.compile("|".join(map(re.escape, reserved)), re.IGNORECASE)
        assert not [prompt for prompt in train["prompt"] if phrase.search(prompt)], name
        assert sum(bool(phrase.search(prompt)) for prompt in heldout["prompt"]) > 10


def test_every_slot_is_known_and_used(maker: ModuleType) -> None:
    slots, domains = maker.read_phrases()
    templates = [t for families in domains.values() for part in families.values() for t in part]
    texts = [*templates, *(entry for entries in slots.values() for entry in entries)]
    used = {name.lower() for text in texts for name, low, _ in maker.SLOT.findall(text) if not low}
    assert used == set(slots)
    assert all(len(set(entries)) == len(entries) for entries in slots.values())


def test_a_slot_is_one_thing_all_through_a_prompt(maker: ModuleType) -> None:
    slots = {"name": ["Ann", "Bob", "Cid"], "pair": ["{name} of {place}"], "place": ["Ur"]}
    template = "{name}, {name.2}, {pair}, {name.2}; {number.a:1-9} {number:10-12} {number.a:1-9}"
    seen = set()
    for seed in range(40):
        text = maker.expand(template, slots, random.Random(seed))
        match = re.fullmatch(r"(\w+), (\w+), \1 of Ur, \2; (\d) (1[012]) \3", text)
        assert match is not None, text
        assert match[1] != match[2]
        seen.add(match[1])
    assert seen == {"Ann", "Bob", "Cid"}


def test_articles_and_capitals_fit_the_word(maker: ModuleType) -> None:
    slots = {"job": ["architect", "nurse"], "thing": ["a {job}"]}
    texts = {
        maker.expand("{Thing}, a {job}, a one-line note", slots, random.Random(seed))
        for seed in range(20)
    }
    assert texts == {
        "An architect, an architect, a one-line note",
        "A nurse, a nurse, a one-line note",
    }


def test_an_exhausted_domain_says_so(maker: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(maker.CannotMakeError, match="tiny has only 2 of 3"):
        maker.distinct(
            maker.template_prompts(["A {x}"], {"x": ["1", "2"]}, random.Random(0)), 3, set(), "tiny"
        )


def test_the_script_writes_a_file(
    maker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prompts.parquet"
    assert maker.main(["--count", "50", "--seed", "3", "--out", str(out), "--templates-only"]) == 0
    made = maker.make_table(50, seed=3, templates_only=True)
    assert_frame_equal(pl.read_parquet(out), made)
    with pytest.raises(SystemExit):
        maker.main(["--count", "0", "--out", str(out)])
    assert "--count" in capsys.readouterr().err


def test_without_reasoning_gym_the_script_says_what_to_do(
    maker: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    out = tmp_path / "prompts.parquet"
    assert maker.main(["--count", "50", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "error: reasoning-gym is not installed" in message
    assert "--templates-only" in message
    assert not out.exists()


def test_puzzles_take_turns_with_the_other_domains(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ModuleType("reasoning_gym")

    def create_dataset(name: str, size: int, seed: int) -> list[dict[str, str]]:
        return [{"question": f" {name} {seed} {n}?" + "x" * 900 * (n % 2)} for n in range(size)]

    vars(made)["create_dataset"] = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", made)
    table = maker.make_table(1300, seed=0)
    puzzles = table.filter(domain="reasoning")
    assert puzzles.height == 100
    assert puzzles["prompt"].str.len_chars().max() < 900
    for split, names in maker.GENERATORS.items():
        found = {prompt.split()[0] for prompt in puzzles.filter(split=split)["prompt"]}
        assert found == set(names)
    assert "gsm_symbolic" not in {name for names in maker.GENERATORS.values() for name in names}
