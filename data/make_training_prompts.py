"""Write prompts to train a drafter on: templates of our own and puzzles of reasoning-gym.

Usage: python data/make_training_prompts.py --count 20000 --seed 0 --out FILE [--templates-only]

Columns id, domain, split, prompt. Domains take turns, so that every stretch of the file is
balanced. Prompts of split `heldout` come from families of templates, phrases and puzzle generators
that split `train` never uses. The same count and seed give the same file.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import polars as pl

HERE = Path(__file__).parent
PUZZLES = "reasoning"

# Text puzzles that a small chat model answers in words. gsm_symbolic is an evaluation set.
GENERATORS = {
    "train": (
        *("aiw", "basic_arithmetic", "calendar_arithmetic", "chain_sum", "coin_flip"),
        *("complex_arithmetic", "family_relationships", "fraction_simplification", "gcd"),
        *("knights_knaves", "leg_counting", "letter_counting", "number_filtering"),
        *("number_sorting", "prime_factorization", "sentence_reordering", "simple_equations"),
        *("simple_geometry", "spell_backward", "time_intervals", "word_sequence_reversal"),
    ),
    "heldout": ("caesar_cipher", "lcm", "syllogism", "word_sorting"),
}
LONGEST_PUZZLE = 800

# Slots this long keep their last tenth for the held-out split.
LONG_SLOT = 30
# A family that repeats itself this often in a row has nothing new to say.
PATIENCE = 200

SLOT = re.compile(r"\{([A-Za-z_]+)(?:\.\w+)?(?::(\d+)-(\d+))?\}")

ARTICLE = re.compile(r"\b([Aa]) (?=[aei]|o(?!ne)|un(?!i))")

Slots = Mapping[str, Sequence[str]]


class CannotMakeError(Exception):
    """Why the prompts asked for cannot be made, and a hint."""


def read_phrases() -> tuple[Slots, dict[str, dict[str, list[str]]]]:
    """The slots, and the families of each domain: {domain: {split: templates}}."""
    with (HERE / "training_phrases.toml").open("rb") as file:
        phrases = tomllib.load(file)
    slots = phrases.pop("slots")
    return slots, {
        domain: {"train": families["train"], "heldout": families["held_out"]}
        for domain, families in phrases.items()
    }


def slots_of(slots: Slots, split: str) -> Slots:
    """The entries that a split may use."""

    def part(entries: Sequence[str]) -> Sequence[str]:
        kept = len(entries) - len(entries) // 10
        return entries[:kept] if split == "train" else entries[kept:]

    return {
        name: part(entries) if len(entries) >= LONG_SLOT else entries
        for name, entries in slots.items()
    }


def expand(template: str, slots: Slots, draw: random.Random) -> str:
    """Fill in a template; see the top of training_phrases.toml for its language."""
    entries: dict[str, str] = {}
    texts: dict[str, str] = {}

    def fill(slot: re.Match[str]) -> str:
        written = slot[0].lower()
        if written not in texts:
            texts[written] = choose(written, *slot.groups())
        text = texts[written]
        return text if written == slot[0] else text[0].upper() + text[1:]

    def choose(written: str, name: str, low: str | None, high: str | None) -> str:
        if low is not None and high is not None:
            return str(draw.randint(int(low), int(high)))
        possible = slots[name.lower()]
        taken = {entry for other, entry in entries.items() if is_slot(other, name.lower())}
        free = [entry for entry in possible if entry not in taken]
        entries[written] = draw.choice(free or possible)
        return SLOT.sub(fill, entries[written])

    return ARTICLE.sub(r"\1n ", SLOT.sub(fill, template))


def is_slot(text: str, name: str) -> bool:
    """Whether {name} or {name.something} is written there."""
    return text.startswith((f"{{{name}}}", f"{{{name}."))


def template_prompts(families: Sequence[str], slots: Slots, draw: random.Random) -> Iterator[str]:
    """Prompts of the families in turn, without end."""
    while True:
        for template in families:
            yield expand(template, slots, draw)


def puzzle_prompts(names: Sequence[str], seed: int, wanted: int) -> Iterator[str]:
    """Questions of reasoning-gym's generators in turn; enough for `wanted` and some to spare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import reasoning_gym
        except ImportError as error:
            raise CannotMakeError(
                "reasoning-gym is not installed",
                "pip install 'adaflash-batch[train]', or leave it out with --templates-only",
            ) from error
        size = 2 * wanted // len(names) + 10
        made = [reasoning_gym.create_dataset(name, size=size, seed=seed) for name in names]
        for number in range(size):
            for questions in made:
                question = questions[number]["question"].strip()
                if len(question) <= LONGEST_PUZZLE:
                    yield question


def distinct(prompts: Iterator[str], wanted: int, used: set[str], domain: str) -> list[str]:
    """The first `wanted` prompts not in `used`, which they join."""
    found: list[str] = []
    idle = 0
    while len(found) < wanted:
        prompt = next(prompts, None)
        idle += 1
        if prompt is None or idle > PATIENCE:
            raise CannotMakeError(
                f"{domain} has only {len(found)} of {wanted} different prompts", "Lower --count"
            )
        if key(prompt) not in used:
            used.add(key(prompt))
            found.append(prompt)
            idle = 0
    return found


def key(prompt: str) -> str:
    """What makes two prompts the same: words, whatever their case and spacing."""
    return " ".join(prompt.lower().split())


def demo_prompts() -> set[str]:
    """Keys of the prompts that no training prompt may be."""
    return {key(prompt) for prompt in pl.read_parquet(HERE / "prompts.parquet")["prompt"]}


def make_table(
    num_prompts: int, seed: int, heldout_share: float = 0.05, templates_only: bool = False
) -> pl.DataFrame:
    """num_prompts prompts, as equally many of each domain as can be."""
    slots, domains = read_phrases()
    names = [*domains] if templates_only else [*domains, PUZZLES]
    used = demo_prompts()

    def make(domain: str, split: str, wanted: int) -> list[tuple[str, str, str, str]]:
        draw = random.Random(f"{seed} {domain} {split}")
        if domain == PUZZLES:
            source = puzzle_prompts(GENERATORS[split], draw.getrandbits(31), wanted)
        else:
            source = template_prompts(domains[domain][split], slots_of(slots, split), draw)
        prompts = distinct(source, wanted, used, f"{domain} ({split})")
        return [(f"{domain}-{split}-{n}", domain, split, text) for n, text in enumerate(prompts)]

    rows = []
    for place, domain in enumerate(names):
        share = num_prompts // len(names) + (place < num_prompts % len(names))
        heldout = round(share * heldout_share)
        made = make(domain, "train", share - heldout) + make(domain, "heldout", heldout)
        random.Random(f"{seed} {domain}").shuffle(made)
        rows.append(made)
    turns = [row for turn in zip_longest(*rows) for row in turn if row is not None]
    columns = ("id", "domain", "split", "prompt")
    return pl.DataFrame(turns, schema=dict.fromkeys(columns, pl.String), orient="row")


def main(arguments: Sequence[str]) -> int:
    """Parse, make, write; the exit code."""
    parser = argparse.ArgumentParser(description="Write prompts to train a drafter on.")
    parser.add_argument("--count", type=int, required=True, help="prompts, all domains together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="Parquet file")
    parser.add_argument("--heldout-share", type=float, default=0.05)
    parser.add_argument("--templates-only", action="store_true", help="without reasoning-gym")
    given = parser.parse_args(arguments)
    if given.count < 1 or not 0 <= given.heldout_share < 1:
        parser.error("--count must be 1 or more, --heldout-share from 0 to below 1")
    try:
        table = make_table(given.count, given.seed, given.heldout_share, given.templates_only)
    except CannotMakeError as error:
        message, hint = error.args
        print(f"error: {message}\nhint: {hint}", file=sys.stderr)
        return 2
    table.write_parquet(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
