"""What a job tells its trainer: the target's tables, the pace of decoding, the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_model

from adaflash_batch.engine.tables import embedding_table, head_weight
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError
from adaflash_batch.learning import _Pace, learning_plan
from adaflash_batch.request import Completion, RowKey, Sampling
from adaflash_batch.spec import JobSpec


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_tables_are_those_of_the_model(architecture: str) -> None:
    model = tiny_model(architecture)
    ids = torch.arange(VOCABULARY)
    with torch.no_grad():
        # Scaled as the model does it, and before the model's modules are replaced.
        embedding = model.get_input_embeddings()(ids).clone()
        head = model.get_output_embeddings().weight.detach().clone()
    target = Target.of(model, architecture)
    assert torch.equal(embedding_table(target), embedding)
    # Summed with zeros: nothing is rounded.
    assert torch.equal(head_weight(target), head)
    some = torch.tensor([5, 3, 96])
    assert torch.equal(head_weight(target, some), head[some])
    assert head_weight(target).is_contiguous()


def test_a_head_with_a_bias_is_refused() -> None:
    model = tiny_model("llama")
    head = model.get_output_embeddings()
    biased = torch.nn.Linear(head.in_features, head.out_features)
    biased.weight = head.weight
    torch.nn.init.zeros_(biased.bias)
    model.set_output_embeddings(biased)
    target = Target.of(model, "tiny llama")
    assert torch.equal(head_weight(target), head.weight), "a bias of zeros is none"
    biased.bias.data[7] = 0.5
    for token_ids in (None, torch.tensor([2, 7])):
        with pytest.raises(ConfigError, match="tiny llama: its lm_head has a bias"):
            head_weight(target, token_ids)


@dataclass
class Passed:
    """Of a target: what went through it."""

    num_forward_tokens: int = 0


@dataclass
class Outlooks:
    """Of a decoder: what its steps with drafts emit, and what they take of plain ones."""

    tau: float = 1.0
    price: float | None = None

    def outlook(self) -> tuple[float, float | None]:
        return self.tau, self.price


@dataclass
class Counters:
    """Of a decoder: what its steps came to."""

    num_generated: int = 0
    num_prefilled: int = 0
    target: Passed = field(default_factory=Passed)
    speculator: Outlooks = field(default_factory=lambda: Outlooks())


def finished(tokens: int) -> Completion:
    return Completion(RowKey(0, 0, 0), [7] * tokens, "length", prompt_tokens=3)


def pace_of(counters: Any, longest: int = 100) -> _Pace:
    return _Pace(counters, longest)


def test_what_is_left_follows_the_texts_that_ended() -> None:
    counters = Counters()
    pace = pace_of(counters)
    assert pace.outlook(10).tokens == 1000, "no text has ended: all may be the longest"
    counters.num_generated = 30
    pace.note([], 1.0)
    assert pace.outlook(10).tokens == 1000 - 30, "of those that run some is done"
    # Two texts end with 10 and 20 tokens; 12 of the generated ones belong to texts that run.
    counters.num_generated = 42
    pace.note([finished(10), finished(20)], 1.0)
    assert pace.outlook(8).tokens == 8 * 15 - 12
    assert pace.outlook(0).tokens == 0


def test_the_pace_leaves_prefill_out() -> None:
    counters = Counters()
    pace = pace_of(counters)
    assert pace.outlook(5).seconds_per_token == 0.0
    for _ in range(50):
        # A quarter of the tokens of each step is of prompts, and so is of its seconds.
        counters.num_generated += 100
        counters.num_prefilled += 50
        counters.target.num_forward_tokens += 200
        pace.note([], 4.0)
    assert pace.outlook(5).seconds_per_token == pytest.approx(0.03)
    assert pace.outlook(5).share == pytest.approx(0.75)
    counters.num_prefilled += 500
    counters.target.num_forward_tokens += 500
    pace.note([], 60.0)
    assert pace.outlook(5).seconds_per_token == pytest.approx(0.03), "a step of prompts alone"
    for _ in range(100):
        counters.num_generated += 100
        counters.target.num_forward_tokens += 200
        pace.note([], 1.0)
    assert pace.outlook(5).seconds_per_token == pytest.approx(0.01, rel=0.02), "it looks back"


def test_the_outlook_has_what_speculation_found() -> None:
    alone = pace_of(Counters()).outlook(1)
    assert (alone.tau, alone.step_price) == (1.0, None)
    ahead = pace_of(Counters(speculator=Outlooks(2.5, 1.5))).outlook(1)
    assert (ahead.tau, ahead.step_price) == (2.5, 1.5)


def test_a_plan_is_what_the_job_says() -> None:
    overrides = [
        "adapt.when=always",
        "adapt.share=0.25",
        "adapt.objective=ce",
        "adapt.ce_weight=0.5",
        "adapt.clip=0.5",
        "adapt.gamma=2.5",
        "adapt.optimiser=adamw",
        "adapt.rate=0.01",
        "adapt.updates=3",
        "adapt.fresh=9",
        "adapt.batch=5",
        "adapt.anchors=7",
        "adapt.replay_share=0.1",
        "adapt.averaging=0.9",
        "adapt.pull=0.2",
        "adapt.memory=3MiB",
    ]
    flags = {"input.paths": ["x.parquet"], "output.directory": "out", "speculation.drafter": "d"}
    spec = JobSpec.from_sources(None, overrides, flags)
    plan = learning_plan(spec, Sampling(max_new_tokens=77, seed=5))
    assert (plan.job, plan.longest, plan.memory_bytes) == ("out", 77, 3 * 2**20)
    assert (plan.rules.share, plan.rules.aim) == (0.25, "most")
    assert (plan.objective.kind, plan.objective.ce_weight, plan.objective.clip) == ("ce", 0.5, 0.5)
    assert (plan.gamma, plan.anchors, plan.optimiser, plan.replay_share) == (2.5, 7, "adamw", 0.1)
    found = plan.round
    assert (found.updates, found.batch, found.rate, found.least_new) == (3, 5, 0.01, 9)
    assert (found.averaging, found.pull, found.seed) == (0.9, 0.2, 5)
    usual = learning_plan(JobSpec.from_sources(flags=flags), Sampling())
    assert usual.rules.aim == "fastest"
    assert (usual.round.least_new, usual.round.updates) == (64, 16)
