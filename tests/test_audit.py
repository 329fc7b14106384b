"""verify --audit: rows decoded again without speculation; matches, near-ties and differences."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import torch
from folders import byte_tokenizer, run, tiny_drafter_folder, tiny_model_folder, write_rows
from reviewed_jobs import MORE, PROMPTS, Job, changed, command, copied, input_columns, rewrite

from adaflash_batch.engine.sampling import ChoiceBlock
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Prompt, Request, RowKey, Sampling
from adaflash_batch.review import retrace
from adaflash_batch.review.audit import audit
from adaflash_batch.review.plain_decoding import Choice, PlainDecoder
from adaflash_batch.review.retrace import Retracer, StoredRow
from adaflash_batch.text import TextCodec

SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "drawn": {
        "sampling.temperature": 0.9,
        "sampling.top_p": 0.9,
        "sampling.seed": 5,
        "sampling.n": 2,
        "input.id_column": "id",
    },
    "reshaped": {
        "sampling.repetition_penalty": 1.3,
        "sampling.presence_penalty": 0.4,
        "sampling.min_new_tokens": 4,
        "sampling.stop": ["e", "qu"],
        "engine.token_budget": 8,
    },
    "templated": {"prompt.chat_template": True, "prompt.on_long_prompt": "truncate-left"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def make(folder: Path, model: Path, keys: dict[str, object]) -> Job:
    columns = input_columns([*PROMPTS])
    columns["limit"] = columns["limit"].slice(0)
    first = write_rows(folder / "a.parquet", columns)
    second = write_rows(folder / "b.parquet", {**input_columns([*MORE]), "id": range(20, 24)})
    drafter = tiny_drafter_folder(folder / "drafter")
    usual = {
        "output.chunk_rows": 3,
        "sampling.max_new_tokens": 20,
        "input.columns": {"max_new_tokens": "limit"},
        "speculation.drafter": str(drafter),
        "speculation.lookup": True,
    }
    run([first, second], model, folder / "out", usual | keys)
    return Job(folder)


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Job:
    return make(tmp_path_factory.mktemp("greedy"), model, {})


@pytest.fixture
def job(tmp_path: Path, greedy: Job) -> Job:
    return copied(greedy, tmp_path)


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS)
def test_speculative_rows_are_the_same_decoded_plainly(
    tmp_path: Path, model: Path, keys: dict[str, object]
) -> None:
    job = make(tmp_path, model, keys)
    found = audit(job.opened(), 100, 0)
    assert found.num_rows == sum(
        row["error"] is None
        for part in job.out.glob("part-*")
        for row in pq.read_table(part).to_pylist()
    )
    assert found.num_rows >= 9
    assert (found.matches, found.near_ties, found.differences) == (found.num_rows, [], [])


def another(text: str) -> str:
    return text[:2] + ("x" if text[2] != "x" else "y") + text[3:]


def test_a_changed_text_is_found_and_named(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    part = job.part(0, 1)
    stored = pq.read_table(part)["completion"].to_pylist()[0]
    rewrite(part, changed("completion", 0, another(stored)))
    code, _, _ = command(capfd, "verify", job.out)
    assert code == 0  # no sum shows it
    code, out, _ = command(capfd, "verify", job.out, "--audit", 100, "--json")
    assert code == 1
    said = json.loads(out)["audit"]
    assert (said["matches"], said["near_ties"]) == (said["num_rows"] - 1, [])
    (row,) = said["differences"]
    assert (row["file"], row["row"], row["input"], row["input_row"]) == (
        part.name,
        0,
        "a.parquet",
        3,
    )
    assert row["reason"].startswith("from character 2 on the text is ")
    assert row["gap"] is None or row["gap"] > 1e-4
    code, out, _ = command(capfd, "verify", job.out, "--audit", 100)
    assert code == 1
    assert f"difference: {part.name}, row 0: from character 2 on" in out
    assert "1 differ" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        (
            "usage",
            lambda row: {"completion_tokens": row["usage"]["completion_tokens"] - 1},
            "tokens",
        ),
        ("completion", lambda row: row["completion"][:-1], "from character"),
        ("completion", lambda row: row["completion"] + "!", "from character"),
        ("finish_reason", lambda row: "stop", "finish_reason is stop, decoded again length"),
        ("prompt", lambda row: "another prompt", "from character"),
    ],
)
def test_other_changes_are_found(
    job: Job, column: str, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    part = job.part(1, 1)
    row = pq.read_table(part).to_pylist()[0]
    rewrite(part, changed(column, 0, change(row)))
    found = audit(job.opened(), 100, 0)
    assert [each.file for each in found.differences] == [part.name]
    assert said in found.differences[0].reason
    assert found.matches == found.num_rows - 1


def test_the_seed_chooses_the_rows(job: Job) -> None:
    for chunk in range(3):
        part = job.part(0, chunk)
        rows = pq.read_table(part).to_pylist()
        for place, row in enumerate(rows):
            if row["error"] is None:
                rewrite(part, changed("completion", place, another(row["completion"])))

    def chosen(seed: int) -> list[tuple[str, int]]:
        found = audit(job.opened(), 3, seed)
        assert found.num_rows == 3
        assert found.matches == 3 - len(found.differences)
        return [(each.file, each.row) for each in found.differences]

    assert chosen(1) == chosen(1)
    assert len({tuple(chosen(seed)) for seed in range(4)}) > 1


def test_nothing_to_decode_loads_no_model(job: Job) -> None:
    for part in job.out.glob("part-*"):
        part.unlink()
    shutil.rmtree(job.folder / "drafter")
    found = audit(job.opened(), 5, 0, model="no such model")
    assert (found.num_rows, found.matches) == (0, 0)


def test_another_model_is_refused(job: Job, tmp_path: Path, model: Path) -> None:
    other = tiny_model_folder(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="is not the model that the job ran with: weights differ"):
        audit(job.opened(), 5, 0, model=str(other))
    shutil.copytree(model, tmp_path / "moved")
    found = audit(job.opened(), 5, 0, model=str(tmp_path / "moved"))
    assert found.matches == 5


class Letters:
    """Stands in for a TextCodec: every token has a text of its own, or one of a few."""

    def __init__(self, texts: Callable[[int], str] = lambda token: chr(256 + token)) -> None:
        self._text = texts

    def decode(self, token_ids: list[int], *, stop: tuple[str, ...], end_ids: object) -> str:
        text = "".join(map(self._text, token_ids))
        return text[: min((text.find(s) for s in stop if s in text), default=len(text))]

    def watch(self, sampling: Sampling) -> Any:
        seen: list[int] = []

        def feed(token: int) -> bool:
            seen.append(token)
            text = "".join(map(self._text, seen))
            return any(string in text for string in sampling.stop)

        return SimpleNamespace(feed=feed)


class Bench:
    """A tiny model, and rows as they would be stored."""

    def __init__(self, folder: Path, letters: Letters) -> None:
        target = Target.load(folder, "tiny", dtype=None)
        self.codec = cast(TextCodec, letters)
        self.decoder = PlainDecoder(target, end_token_ids=frozenset(), token_budget=64)

    def request(self, sampling: Sampling) -> Request:
        watch = self.codec.watch(sampling)
        ids = byte_tokenizer().encode("a prompt")
        return Request(RowKey(0, 0, 0), ids, sampling, identity=9, stop_watch=watch)

    def retracer(self, sampling: Sampling) -> Retracer:
        return Retracer(self.decoder, self.codec, lambda: self.request(sampling))

    def stored(self, sampling: Sampling, place: int, rank: int) -> tuple[StoredRow, float]:
        """A text that takes another token at one place, and how far that was from being chosen."""
        gaps: list[float] = []

        def pick(tokens: list[int], choice: Choice) -> int:
            if len(tokens) != place:
                return choice.token
            token, gap = list(choice.others())[rank]
            gaps.append(gap)
            return token

        request = self.request(sampling)
        tokens, reason = self.decoder.decode(request, pick)
        assert reason is not None
        text = self.codec.decode(tokens, stop=sampling.stop, end_ids=frozenset())
        prompt = Prompt(0, 0, 9, "a prompt", sampling)
        return StoredRow("part", 0, prompt, 0, text, reason, len(tokens)), gaps[0]


@pytest.fixture(scope="module")
def bench(model: Path) -> Bench:
    return Bench(model, Letters())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=12),
        Sampling(max_new_tokens=12, temperature=0.7, seed=3),
        Sampling(max_new_tokens=12, temperature=0.7, top_k=5, seed=3),
        Sampling(max_new_tokens=12, repetition_penalty=1.2, frequency_penalty=0.5),
    ],
    ids=["greedy", "drawn", "filtered", "reshaped"],
)
@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_near_tie_is_told_from_a_difference(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, place: int
) -> None:
    row, gap = bench.stored(sampling, place, rank=0)
    assert gap > 1e-4
    retracer = bench.retracer(sampling)
    assert not retracer.freely().agrees(row)
    assert retracer.along(row) == (gap, False)
    monkeypatch.setattr(Choice, "tolerance", lambda choice: gap * 1.001)
    assert retracer.along(row) == (gap, True)
    monkeypatch.setattr(Choice, "tolerance", lambda choice: gap * 0.5)
    assert retracer.along(row) == (gap, False)


def test_a_text_that_can_be_cut_in_several_ways_is_retraced(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(model, Letters(lambda token: ("a", "b", "ab", "ba")[token % 4]))
    sampling = Sampling(max_new_tokens=8)
    monkeypatch.setattr(retrace, "_MOST_ATTEMPTS", 1000)
    num_changed = 0
    for place in range(8):
        row, gap = bench.stored(sampling, place, rank=0)
        retracer = bench.retracer(sampling)
        monkeypatch.setattr(Choice, "tolerance", lambda choice, gap=gap: gap * 1.001)
        found, is_tie = retracer.along(row)
        assert is_tie
        assert found is not None
        assert found <= gap
        num_changed += not retracer.freely().agrees(row)
    assert num_changed > 2


def test_a_near_tie_excuses_no_other_difference(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_new_tokens=12)
    row, gap = bench.stored(sampling, 4, rank=0)
    monkeypatch.setattr(Choice, "tolerance", lambda choice: gap * 1.001)
    assert bench.retracer(sampling).along(row)[1]
    ends = [replace(row, text=row.text[:-1] + "\x01"), replace(row, num_tokens=11)]
    for each in (*ends, replace(row, finish_reason="stop")):
        assert not bench.retracer(sampling).along(each)[1]


def test_the_right_text_is_retraced_without_a_gap(bench: Bench) -> None:
    sampling = Sampling(max_new_tokens=12)
    attempt = bench.retracer(sampling).freely()
    row, _ = bench.stored(sampling, 4, rank=0)
    row = replace(row, text=attempt.text, num_tokens=attempt.num_tokens)
    assert attempt.agrees(row)
    assert bench.retracer(sampling).along(row) == (0.0, True)


def test_stop_strings_are_followed_to_their_end(bench: Bench) -> None:
    free = bench.retracer(Sampling(max_new_tokens=12)).freely().text
    sampling = Sampling(max_new_tokens=12, stop=(free[3:6],))
    attempt = bench.retracer(sampling).freely()
    assert (attempt.text, attempt.finish_reason) == (free[: free.find(free[3:6])], "stop")
    row, _ = bench.stored(Sampling(max_new_tokens=12), 4, rank=0)
    row = replace(row, text=attempt.text, num_tokens=attempt.num_tokens, finish_reason="stop")
    assert bench.retracer(sampling).along(row) == (0.0, True)


def test_tolerance_follows_the_type_and_the_temperature() -> None:
    def tolerance(logits: torch.Tensor, sampling: Sampling) -> float:
        block = ChoiceBlock(sampling, None, (), (0, 0), 0)
        return Choice(logits, block).tolerance()

    logits = torch.tensor([[16.0, 3.0]])
    assert tolerance(logits, Sampling()) == 1e-4
    assert tolerance(logits, Sampling(temperature=0.5)) == pytest.approx(1e-4)
    assert tolerance(logits.bfloat16(), Sampling()) == pytest.approx(0.5)
    assert tolerance(logits.bfloat16(), Sampling(temperature=2.0)) == pytest.approx(0.125)
