"""How long a job will take, from what steps of earlier ones took on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.machine import processor
from adaflash_batch.review.kv_need import KvNeed
from adaflash_batch.review.lengths import Work
from adaflash_batch.review.model_facts import ModelFacts
from adaflash_batch.spec import JobSpec


@dataclass(frozen=True, slots=True)
class TimeNeed:
    """Seconds of decoding without drafts; loading is not in it.

    Attributes:
        at_most_s: where every completion takes all its max_new_tokens.
        likely_s: where completions are as long as those that are done; None where none is.
        mean_tokens: of those.
        reason: why nothing is known; None where something is.
    """

    at_most_s: float | None = None
    likely_s: float | None = None
    mean_tokens: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, object]:
        """Seconds, and what they assume."""
        return {
            "at_most_s": _rounded(self.at_most_s),
            "likely_s": _rounded(self.likely_s),
            "mean_completion_tokens": _rounded(self.mean_tokens),
            "assumes": "decoding alone, without drafts, on this machine as busy as it was",
            "unknown_because": self.reason,
        }


def time_need(
    spec: JobSpec,
    work: Work,
    kv: KvNeed,
    *,
    cost: StepCost | None,
    mean_completion_tokens: float | None,
) -> TimeNeed:
    """Estimate what is left of a job.

    Args:
        spec: the job.
        work: rows that are not done.
        kv: its KV memory.
        cost: of steps here, None if no job of this model has run.
        mean_completion_tokens: of rows that are done.
    """
    if work.requests == 0:
        return TimeNeed(0.0, 0.0)
    if cost is None:
        return TimeNeed(reason="no job of this model has run here")

    def seconds(num_tokens: float) -> float:
        return _seconds(spec, work, kv, cost, num_tokens)

    likely = None
    if mean_completion_tokens is not None:
        likely = seconds(min(mean_completion_tokens * work.requests, work.completion_tokens))
    return TimeNeed(seconds(work.completion_tokens), likely, mean_completion_tokens)


def _seconds(
    spec: JobSpec, work: Work, kv: KvNeed, cost: StepCost, completion_tokens: float
) -> float:
    """A step decodes a token of each running request and takes in its share of all prompts."""
    completion_tokens = max(completion_tokens, 1.0)
    prompt, completion = work.prompt_tokens / work.requests, completion_tokens / work.requests
    running = min(kv.requests_at(round(prompt + completion)), work.requests)
    all_tokens = work.prompt_tokens + completion_tokens
    budget = max(spec.engine.token_budget, 2)
    num_steps = max(completion_tokens / running, all_tokens / budget, 1.0)
    decoded, prefilled = completion_tokens / num_steps, work.prompt_tokens / num_steps
    keys = decoded * (prompt + completion / 2) + prefilled * prompt / 2
    step = cost.target(np.array(decoded + prefilled), np.array(decoded), np.array(keys))
    return num_steps * float(step + cost.rest(np.array(decoded)))


def find_costs(folder: Path, model: ModelFacts, threads: int | None) -> StepCost | None:
    """The newest record of this model's steps on this machine, whatever drafted beside them.

    Args:
        folder: where jobs keep them.
        model: its name, shapes and precision must be those of the record.
        threads: of the job; None is what PyTorch takes.
    """
    for path, about in sorted(_records(folder), key=lambda each: -each[0].stat().st_mtime):
        if _is_about(about, model, threads or _usual_threads()):
            cost = StepCost(json.dumps(about, sort_keys=True))
            if cost.load(path) is None and cost.is_known:
                return cost
    return None


def _records(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in folder.glob("*.json"):
        try:
            about = json.loads(json.loads(path.read_bytes())["about"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or of another version: as good as none
        if isinstance(about, dict):
            yield path, about


def _is_about(about: dict[str, Any], model: ModelFacts, threads: int) -> bool:
    wanted = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "dtype": f"torch.{model.dtype}",
        "target": [model.name, model.num_layers, model.hidden_size, model.vocab_size],
    }
    return wanted.items() <= about.items()


def _usual_threads() -> int:
    import torch

    return torch.get_num_threads()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
