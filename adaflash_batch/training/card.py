"""What is said of a drafter: results by domain, and the model card."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaflash_batch.adapt.evaluate import Acceptance
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.stats import SpeculationCounts
from adaflash_batch.training.plan import TrainingPlan

ALL = "all"


def results(domains: Mapping[str, Acceptance]) -> dict[str, dict[str, Any]]:
    """Figures of each domain, of teacher-forced drafting, and of all texts together."""
    if not domains:
        return {}
    return {
        name: figures(each.walked)
        | {"emitted_per_anchor": _rounded(each.emitted_per_anchor)}
        | _calibration(each)
        for name, each in ({**domains, ALL: Acceptance.of(domains.values())}).items()
    }


def _calibration(acceptance: Acceptance) -> dict[str, Any]:
    """How true what the drafter's own head says came, where it has one."""
    found = acceptance.calibration
    if found.ece is None:
        return {}
    return {"ece": _rounded(found.ece), "squared_error": _rounded(found.mean_squared_error)}


def figures(counts: SpeculationCounts) -> dict[str, Any]:
    """What the steps of decoding say of a drafter."""
    return {
        "steps": counts.steps,
        "emitted_per_step": _rounded(counts.emitted_per_step),
        "accepted_by_position": _survival(counts.accepted_hist, counts.steps),
    }


def _survival(histogram: list[int], steps: int) -> list[float]:
    """Share of the steps that accepted the first draft, the first two, ..."""
    return [round(sum(histogram[i:]) / steps, 4) for i in range(1, len(histogram))] if steps else []


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def table(domains: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown rows of `results`."""
    lines = [
        "| domain | steps | τ | accepted at position 1, 2, ... | τ over all anchors |",
        "|---|---|---|---|---|",
    ]
    for name, figures in domains.items():
        shares = " ".join(f"{100 * share:.0f}%" for share in figures["accepted_by_position"])
        tau, per_anchor = figures["emitted_per_step"], figures["emitted_per_anchor"]
        lines.append(f"| {name} | {figures['steps']} | {tau} | {shares} | {per_anchor} |")
    return lines


def card(
    plan: TrainingPlan, config: DrafterConfig, summary: Mapping[str, Any], command: str
) -> str:
    """README.md of a checkpoint."""
    name = Path(plan.model).name
    shape = (
        f"{config.member} with {count_layers(config)}, blocks of {config.block_size}, "
        f"{summary['parameters'] / 1e6:.1f} M parameters, target layers "
        f"{', '.join(map(str, config.target_layer_ids))}"
    )
    lines = [
        f"# Drafter for {name}",
        "",
        f"{shape}.",
        "It drafts for that model alone, and changes none of its texts.",
        "",
        f"    {command}",
        "",
        *_beginning(summary["began_from"], config),
        f"- Data: {summary['tokens']} tokens that the model wrote itself, "
        f"{100 * (1 - plan.sampled_share):.0f}% of the prompts greedily.",
        f"- Training: {summary['updates']} updates of {plan.batch} x {plan.anchors} blocks, "
        f"objective {plan.objective}, {plan.optimiser}, peak learning rate {plan.learning_rate}"
        f"{'' if plan.parameters == 'all' else f'; of {plan.parameters} parameters alone'}.",
        f"- Time: {summary['decoding_hours']} h decoding, {summary['training_hours']} h training "
        f"on {machine()}.",
        "",
        "## Held-out prompts",
        "",
        "Greedy texts, drafted for as real decoding does at full width; τ is the mean number of "
        "tokens a step, the one that the model adds itself included.",
        "",
        *(table(summary["held_out"]) if summary["held_out"] else ["None were held out."]),
    ]
    return "\n".join(lines) + "\n"


def _beginning(origin: Mapping[str, Any] | None, config: DrafterConfig) -> list[str]:
    if origin is None:
        return []
    updates, member = origin["updates"], origin["member"]
    before = "" if updates is None else f", itself trained for {updates} updates"
    grown = "" if member == config.member else f"; {config.member}'s parts are new"
    if config.length_head and not origin["length_head"]:
        grown += f"; the {config.length_head} length head is new"
    return [
        f"- Began from: the {member} drafter in {origin['folder']} (sha256 "
        f"{origin['identity'][:16]}){before}{grown}. What follows is of this training alone."
    ]


def count_layers(config: DrafterConfig) -> str:
    """`1 layer`, `2 layers`."""
    return f"{config.num_hidden_layers} layer{'' if config.num_hidden_layers == 1 else 's'}"


def machine() -> str:
    """Processor, cores that this process may use, system."""
    name = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        models = (line for line in path.read_text().splitlines() if line.startswith("model name"))
        name = next(models, f": {name}").partition(":")[2].strip()
    return f"{len(os.sched_getaffinity(0))} cores of {name}, {platform.system()}"
