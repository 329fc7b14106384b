"""A trainer between the steps, in a thread and in a process: the same learning, the same texts."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from drafters import DSPARK
from folders import (
    Listener,
    completions,
    echo_model_folder,
    read_rows,
    run,
    tiny_drafter_folder,
    write_rows,
)
from nets import TINY
from test_online_learning import ALWAYS, following, parts_of
from tiny import as_requests, decode, random_prompts, texts
from torch import Tensor
from trajectories import TABLE, repeating

from adaflash_batch.adapt.balance import Outlook
from adaflash_batch.adapt.evaluate import evaluate
from adaflash_batch.adapt.losses import Head
from adaflash_batch.adapt.placement import Place, Placement, place_for
from adaflash_batch.adapt.process import ProcessLearning
from adaflash_batch.adapt.recipe import LearningPlan, TrainerRecipe
from adaflash_batch.adapt.trainer import RoundPlan
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.drafter.versions import VersionStore
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import AdaflashError
from adaflash_batch.exchange import DrafterWeights, TrajectoryMailbox, WeightsMailbox
from adaflash_batch.learning import place_trainer
from adaflash_batch.report.live import Progress
from adaflash_batch.request import Completion, Request, Sampling

PLACES: tuple[Place, ...] = ("inline", "thread", "process")
FAR = Outlook(1e6, 1.0)
PLAN = LearningPlan(
    job="a test",
    longest=24,
    rules=ALWAYS,
    round=RoundPlan(updates=30, batch=6, rate=1e-2, least_new=12, least_held_back=2),
    anchors=12,
    optimiser="adamw",
    memory_bytes=2**26,
    threads=1,
)


def recipe_in(
    folder: Path,
    config: DrafterConfig = TINY,
    parts: tuple[Tensor, Tensor] = (TABLE, TABLE),
    plan: LearningPlan = PLAN,
) -> TrainerRecipe:
    checkpoint.save(initialise(config, torch.Generator().manual_seed(0)), folder / "drafter")
    table, head = parts
    return TrainerRecipe(
        folder=folder / "drafter",
        version=None,
        facts=TargetFacts(len(table), table.shape[1], config.num_target_layers, "tiny"),
        dtype=torch.float32,
        compute=torch.float32,
        embedding=table,
        head=Head(head),
        plan=plan,
        device=torch.device("cpu"),
    )


@dataclasses.dataclass
class Bench:
    """A trainer at work, and all that it is connected to."""

    recipe: TrainerRecipe
    store: VersionStore
    inbox: TrajectoryMailbox
    outbox: WeightsMailbox
    lines: list[str]
    placement: Placement

    def until(self, done: Callable[[], object]) -> None:
        """Go on from step to step until something has happened."""
        for _ in range(9000):
            if done():
                return
            self.placement.between_steps(FAR)
            time.sleep(0.02)
        pytest.fail(f"it never happened; {self.lines}")

    def next_version(self) -> DrafterWeights:
        found: list[DrafterWeights] = []

        def is_there() -> bool:
            weights = self.outbox.take()
            found.extend([] if weights is None else [weights])
            return bool(found)

        self.until(is_there)
        return found[0]

    @property
    def pid(self) -> int:
        assert isinstance(self.placement, ProcessLearning)
        return self.placement.pid


@contextmanager
def at_work(place: Place, recipe: TrainerRecipe, store: Path) -> Iterator[Bench]:
    """Ends it, and looks whether a thread or a process is left."""
    before = set(threading.enumerate())
    inbox, outbox = TrajectoryMailbox(recipe.plan.waiting_bytes // 2), WeightsMailbox()
    lines, versions = list[str](), VersionStore(store)
    placement = place_trainer(place, recipe, versions, inbox, outbox, lines.append)
    try:
        yield Bench(recipe, versions, inbox, outbox, lines, placement)
    finally:
        placement.close()
    placement.close()
    assert set(threading.enumerate()) == before
    if isinstance(placement, ProcessLearning):
        assert not is_alive(placement.pid)


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended may wait for somebody to ask how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@torch.no_grad()
def tau(net: DFlash, weights: Mapping[str, Tensor] | None = None) -> float:
    """On texts that no trainer has seen."""
    for name, parameter in net.named_parameters():
        parameter.copy_(parameter if weights is None else weights[name])
    scores = [
        evaluate(net, repeating(row), TABLE, lambda x: x @ TABLE.T) for row in range(900, 909)
    ]
    return sum(each.emitted_per_anchor or 0.0 for each in scores) / len(scores)


def test_the_same_texts_make_the_same_better_version_wherever_it_is_trained(
    tmp_path: Path,
) -> None:
    published: dict[Place, Mapping[str, Tensor]] = {}
    for place in PLACES:
        with at_work(place, recipe_in(tmp_path / place), tmp_path / place / "store") as bench:
            for row in range(60):
                bench.inbox.put(repeating(row))
            weights = bench.next_version()
            bench.until(lambda: bench.placement.counters.published)
        assert bench.placement.counters.updates >= 30
        assert bench.placement.seconds > 0.0
        learnt = bench.store.read(weights.version).learnt
        assert (learnt.rows, learnt.tokens, learnt.updates) == (60, 60 * 20, 30)
        assert (learnt.tau_after or 0.0) > (learnt.tau_before or 0.0)
        assert sum("published as version" in line for line in bench.lines) >= 1
        published[place] = weights.tensors
    net = checkpoint.load(bench.recipe.folder, bench.recipe.facts, dtype=torch.float32)
    assert tau(net, published["inline"]) > 1.2 * tau(
        checkpoint.load(bench.recipe.folder, bench.recipe.facts, dtype=torch.float32)
    )
    for place in PLACES:
        assert published[place].keys() == published["inline"].keys()
        for name, tensor in published[place].items():
            assert torch.equal(tensor, published["inline"][name]), (place, name)


@pytest.mark.parametrize("place", PLACES)
def test_learning_goes_on_from_the_version_that_drafts(tmp_path: Path, place: Place) -> None:
    recipe, store = recipe_in(tmp_path), tmp_path / "store"
    with at_work("inline", recipe, store) as bench:
        for row in range(60):
            bench.inbox.put(repeating(row))
        first = bench.next_version().version
    later = dataclasses.replace(recipe, folder=bench.store.path(first), version=first)
    with at_work(place, later, store) as bench:
        for row in range(60, 120):
            bench.inbox.put(repeating(row))
        bench.until(lambda: bench.placement.counters.rounds)
        assert bench.placement.counters.updates == 30, "its own"
        bench.until(lambda: any("round 2: 30 updates" in line for line in bench.lines))


@pytest.mark.parametrize("place", PLACES)
def test_a_version_that_cannot_be_kept_ends_learning(tmp_path: Path, place: Place) -> None:
    (tmp_path / "store" / "lock").mkdir(parents=True)
    with at_work(place, recipe_in(tmp_path), tmp_path / "store") as bench:
        for row in range(60):
            bench.inbox.put(repeating(row))
        with pytest.raises((AdaflashError, OSError), match="lock"):
            bench.until(lambda: False)
    assert bench.outbox.take() is None


def test_a_trainer_that_hangs_makes_nobody_wait(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, memory_bytes=2**20)
    with at_work("process", recipe_in(tmp_path, plan=plan), tmp_path / "store") as bench:
        os.kill(bench.pid, signal.SIGSTOP)
        for row in range(400):
            bench.inbox.put(repeating(row))
            bench.placement.between_steps(FAR)
        assert bench.placement.num_dropped > 200
        assert bench.outbox.take() is None


def decode_beside(
    target: Target, requests: list[Request], bench: Bench, after_step: Callable[[int], None]
) -> list[Completion]:
    """As a job would: add, step, learn, until nothing is left."""
    recipe = bench.recipe
    serving = checkpoint.load(recipe.folder, recipe.facts, dtype=torch.float32)
    serving.requires_grad_(False).fuse()
    decoder = following(target, serving, requests, bench.inbox, bench.outbox)
    done: list[Completion] = []
    while decoder.has_work:
        finished = decoder.step()
        done += finished
        for completion in finished:
            bench.placement.observe(completion.counts)
        bench.placement.between_steps(FAR)
        after_step(len(done))
    return done


@pytest.mark.parametrize("place", ["thread", "process"])
def test_texts_are_those_of_plain_decoding(llama: Target, tmp_path: Path, place: Place) -> None:
    requests = as_requests(random_prompts(6, longest=12) * 16, Sampling(max_new_tokens=24))
    recipe = recipe_in(tmp_path, DSPARK, parts_of(llama))
    with at_work(place, recipe, tmp_path / "store") as bench:

        def wait(num_done: int) -> None:
            # So late that there is enough to learn from, so early that much is drafted with it.
            if num_done >= 48:
                bench.until(lambda: bench.store.current() is not None)

        done = decode_beside(llama, requests, bench, wait)
    plain = texts(decode(llama, requests))
    assert {completion.key: completion.token_ids for completion in done} == plain
    assert (done[-1].counts.drafter_last or 0) > 0


def test_a_trainer_that_is_killed_is_said_once_and_the_texts_go_on(
    llama: Target, tmp_path: Path
) -> None:
    requests = as_requests(random_prompts(24, longest=12), Sampling(max_new_tokens=16))
    recipe = recipe_in(tmp_path, DSPARK, parts_of(llama))
    with at_work("process", recipe, tmp_path / "store") as bench:

        def kill(num_done: int) -> None:
            if num_done >= 8 and not bench.lines:
                os.kill(bench.pid, signal.SIGKILL)
                bench.until(lambda: bench.lines)

        done = decode_beside(llama, requests, bench, kill)
    assert len(bench.lines) == 1
    assert "signal 9" in bench.lines[0]
    plain = texts(decode(llama, requests))
    assert {completion.key: completion.token_ids for completion in done} == plain


ORPHAN = """
import os, sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_placement import at_work, recipe_in
folder = Path({folder!r})
with at_work("process", recipe_in(folder), folder / "store") as bench:
    print(bench.pid, flush=True)
    time.sleep(600)
"""


def test_a_trainer_goes_with_its_parent(tmp_path: Path) -> None:
    program = ORPHAN.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    for _ in range(9000):
        if not is_alive(pid):
            return
        time.sleep(0.02)
    pytest.fail("it is still there")


@dataclasses.dataclass
class Patient(Listener):
    """Holds a job up towards its end until there is a version."""

    pointer: Path = Path()

    def update(self, progress: Progress) -> None:
        for _ in range(9000):
            if progress.rows_done < 100 or self.pointer.exists():
                return
            time.sleep(0.02)
        pytest.fail(f"no version came; {self.lines}")


@pytest.fixture
def job(tmp_path: Path) -> dict[str, object]:
    """A model that repeats the last letter of a prompt, and a drafter that can learn to."""
    echo_model_folder(tmp_path / "model")
    tiny_drafter_folder(tmp_path / "drafter")
    write_rows(
        tmp_path / "in.parquet", [f"row {row} ends in {chr(97 + row % 5)}" for row in range(120)]
    )
    return {
        "speculation.drafter": str(tmp_path / "drafter"),
        "speculation.when": "always",
        "engine.concurrency": 4,
        "output.chunk_rows": 10,
        "adapt.when": "always",
        "adapt.share": 1.0,
        "adapt.rate": 1e-2,
        "adapt.pull": 0.0,
        "adapt.threads": 1,
    }


@pytest.mark.parametrize("place", PLACES)
def test_a_job_learns_where_it_is_told_to(
    tmp_path: Path, job: dict[str, object], place: Place
) -> None:
    out, before = tmp_path / "out", set(threading.enumerate())
    listener = Patient(pointer=out / "_adaflash" / "drafter" / "current")
    keys = job | {"adapt.place": place}
    summary = run(tmp_path / "in.parquet", tmp_path / "model", out, keys, listener=listener)
    assert set(threading.enumerate()) == before
    assert completions(out) == [chr(97 + row % 5) * 8 for row in range(120)]
    fields = summary.fields
    assert fields["versions_published"] == fields["drafter_version"] == 1, listener.lines
    assert fields["updates"] == 16
    last = read_rows(out)[-1]["spec"]
    assert (last["drafter_first"], last["drafter_last"]) == (1, 1)


def test_a_full_disk_ends_learning_and_not_the_job(tmp_path: Path, job: dict[str, object]) -> None:
    out, listener = tmp_path / "out", Listener()
    (out / "_adaflash" / "drafter" / "lock").mkdir(parents=True)
    keys = job | {"adapt.place": "inline"}
    summary = run(tmp_path / "in.parquet", tmp_path / "model", out, keys, listener=listener)
    assert completions(out) == [chr(97 + row % 5) * 8 for row in range(120)]
    assert sum("learning has ended" in line for line in listener.lines) == 1
    assert summary.fields["drafter_version"] == 0


def test_a_place_is_chosen_by_the_device() -> None:
    assert place_for("auto", "cpu") == "inline"
    assert place_for("auto", "cuda") == "thread"
    assert place_for("process", "cpu") == "process"
