"""Write data/prompts.parquet: 64 demo prompts of our own, eight of each topic.

Usage: python data/make_prompts.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl

EXPLANATIONS = [
    ("why the sky is blue", "a ten-year-old"),
    ("how a refrigerator keeps food cold", "a curious neighbour"),
    ("what inflation is", "a student"),
    ("how tides come about", "someone who lives far from the sea"),
    ("why bread rises", "a beginner in the kitchen"),
    ("how a search engine finds pages", "a grandparent"),
    ("what a prime number is", "a class of twelve-year-olds"),
    ("why leaves change colour in autumn", "a hiker"),
]
STORIES = [
    ("a lighthouse keeper", "a letter that arrives forty years late"),
    ("a young violinist", "a broken string before the concert"),
    ("a postman in the mountains", "an unexpected snowfall"),
    ("two sisters", "a map found in an attic"),
    ("a robot gardener", "the last rose of the summer"),
    ("a night-shift baker", "a stranger who cannot sleep"),
    ("an old sailor", "a ship in a bottle"),
    ("a librarian", "a book that nobody borrowed"),
]
FUNCTIONS = [
    ("is_leap_year(year)", "tells whether a year is a leap year"),
    ("count_words(text)", "returns a dictionary from word to how often it occurs"),
    ("flatten(nested)", "turns a list of lists into one list"),
    ("fibonacci(n)", "returns the first n Fibonacci numbers"),
    ("is_palindrome(text)", "ignores case and spaces"),
    ("running_mean(values, size)", "returns the mean of each window of the given size"),
    ("to_roman(number)", "writes a number from 1 to 3999 in Roman numerals"),
    ("merge_sorted(left, right)", "merges two sorted lists into one sorted list"),
]
SHOPPING = [
    ("Mara", 3, "notebooks", 4, 2, "pens", 1),
    ("Jonas", 5, "apples", 2, 4, "pears", 3),
    ("Aiko", 2, "cinema tickets", 9, 3, "lemonades", 3),
    ("Tomas", 6, "bread rolls", 1, 2, "jars of honey", 7),
    ("Lena", 4, "tulips", 2, 7, "daisies", 1),
    ("Omar", 8, "stamps", 1, 5, "postcards", 2),
    ("Priya", 3, "train tickets", 12, 2, "sandwiches", 5),
    ("Felix", 7, "candles", 3, 1, "lantern", 15),
]
SENTENCES = [
    "The meeting is postponed because the room is flooded",
    "We can not deliver your order this week, sorry",
    "Your report was too long and nobody read it",
    "I need the keys back by Friday or we have a problem",
    "The new schedule works badly for people with children",
    "Please stop parking in front of the gate",
    "We lost the data but we are working on it",
    "The coffee machine is broken again and nobody told me",
]
LISTS = [
    ("five ideas", "a rainy afternoon with children"),
    ("six things to check", "renting a flat"),
    ("four exercises", "someone who sits all day"),
    ("seven items to pack", "a weekend by the sea"),
    ("five questions to ask", "a first job interview"),
    ("six vegetables that grow well", "a small balcony"),
    ("four ways to save water", "a household of three"),
    ("five steps to follow", "changing a bicycle tyre"),
]
TRANSLATIONS = [
    ("French", "Good morning, where is the railway station?"),
    ("Spanish", "The soup is hot, but the bread is cold."),
    ("German", "My brother plays the piano every evening."),
    ("Italian", "We would like a table for four, please."),
    ("French", "It rained all night and the street is wet."),
    ("Spanish", "She bought a red umbrella at the market."),
    ("German", "Could you tell me what time the shop opens?"),
    ("Italian", "Tomorrow we are going to the mountains."),
]
NOTICES = [
    ("the choir", "Tuesday 4 March", "19:30", "the old town hall", "Ines Falk"),
    ("the chess club", "Friday 11 April", "18:00", "the library on Mill Street", "Karel Novak"),
    ("the garden society", "Sunday 18 May", "10:15", "the greenhouse", "Ruth Adeyemi"),
    ("the repair café", "Saturday 7 June", "14:00", "the fire station", "Paul Lindgren"),
    ("the book circle", "Monday 14 July", "20:00", "the café by the bridge", "Sofia Ricci"),
    ("the running group", "Wednesday 6 August", "06:45", "the north gate", "Ben Okoro"),
    ("the film evening", "Thursday 25 September", "21:00", "the school gym", "Mina Park"),
    ("the bird watchers", "Sunday 5 October", "05:30", "the pier", "Hugo Bernard"),
]


def make_prompts() -> Iterator[tuple[str, str]]:
    """Yield (topic, prompt)."""
    for subject, reader in EXPLANATIONS:
        yield "explanation", f"Explain {subject} to {reader} in one short paragraph."
    for hero, thing in STORIES:
        yield "story", f"Write a short story of about 120 words about {hero} and {thing}."
    for signature, purpose in FUNCTIONS:
        yield "code", f"Write a Python function `{signature}` that {purpose}. Add a docstring."
    for name, many, first, price, more, second, other_price in SHOPPING:
        yield (
            "arithmetic",
            f"{name} buys {many} {first} at {price} euros each and {more} {second} at "
            f"{other_price} euros each. How much does {name} pay? Show each step.",
        )
    for sentence in SENTENCES:
        yield "rewriting", f'Rewrite this message so that it is polite and clear: "{sentence}"'
    for what, occasion in LISTS:
        yield "list", f"Give me {what} for {occasion}, as a numbered list with one line each."
    for language, sentence in TRANSLATIONS:
        yield "translation", f"Translate into {language}: {sentence}"
    for group, day, time, place, contact in NOTICES:
        yield (
            "extraction",
            "Take the date, the time, the place and the contact out of this notice and write "
            f"them as JSON.\n\nDear friends of {group}, we meet again on {day} at {time}. "
            f"Come to {place}. If you cannot make it, please call {contact}.",
        )


def make_table() -> pl.DataFrame:
    """The demo prompts, topics taking turns so that short and long texts are mixed."""
    rows = list(make_prompts())
    topics = list(dict.fromkeys(topic for topic, _ in rows))
    each = len(rows) // len(topics)
    mixed = [rows[topic * each + place] for place in range(each) for topic in range(len(topics))]
    return pl.DataFrame(
        {
            "id": [
                f"{topic}-{number // len(topics) + 1}" for number, (topic, _) in enumerate(mixed)
            ],
            "topic": [topic for topic, _ in mixed],
            "prompt": [prompt for _, prompt in mixed],
        }
    )


if __name__ == "__main__":
    default = Path(__file__).with_name("prompts.parquet")
    make_table().write_parquet(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
