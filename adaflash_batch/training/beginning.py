"""Trainings that begin from a finished drafter, not from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adaflash_batch.adapt.new_drafter import length_fields, member_fields
from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.config import DrafterConfig, Member
from adaflash_batch.drafter.growing import grow_dflash2, grow_length_head
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.errors import ConfigError
from adaflash_batch.training.plan import TrainingPlan

_MEMBERS: dict[Member, str] = {"DFlash": "dflash", "DSpark": "dspark", "DFlash 2": "dflash2"}


def plan_from(values: Mapping[str, Any]) -> TrainingPlan:
    """A plan of these fields. Where it begins from a drafter, those not given are the drafter's.

    Raises ConfigError for values out of range, and for those that contradict the drafter.
    """
    folder = values.get("begin_from")
    if folder is None:
        return TrainingPlan(**values)
    shape = _shape(folder, values.get("member"))
    _compare(folder, shape, values)
    return TrainingPlan(**{**shape, **values})


def origin_of(plan: TrainingPlan) -> dict[str, object] | None:
    """What to say of the drafter that a plan begins from; `identity` decides the first weights.

    Raises ConfigError where the plan contradicts it.
    """
    folder = plan.begin_from
    if folder is None:
        return None
    shape = _shape(folder, plan.member)
    _compare(folder, shape, {name: getattr(plan, name) for name in shape})
    view = checkpoint.inspect(folder)
    told = view.own.get("summary")
    told = told if isinstance(told, dict) else {}
    return {
        "folder": str(folder),
        "identity": checkpoint.identity(folder),
        "member": view.config.member,
        "length_head": view.config.length_head,
        "updates": told.get("updates"),
        "training_hours": told.get("training_hours"),
    }


def begun_net(plan: TrainingPlan, folder: Path, target: TargetFacts) -> DFlash:
    """The drafter in a folder as float32; parts that are new are there, and as yet silent.

    Raises ConfigError as `checkpoint.load` does.
    """
    net = checkpoint.load(folder, target, dtype=torch.float32)
    config, generator = net.config, torch.Generator().manual_seed(plan.seed)
    if _grows(config, plan.member):
        parts = member_fields(
            plan.member, plan.rank, config.hidden_size, plan.draft_vocabulary or config.vocab_size
        )
        net = grow_dflash2(net, generator, **parts)
    if plan.length_head and not config.length_head:
        kind, width = length_fields(plan.length_head, plan.length_head_width).values()
        net = grow_length_head(net, generator, kind=kind, width=width)
    return net


def _shape(folder: Path, member: str | None) -> dict[str, Any]:
    """The fields of TrainingPlan that a drafter decides, if it is to become this member."""
    config = checkpoint.inspect(folder).config
    shape: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "target_layers": config.target_layer_ids,
        "features": len(config.target_layer_ids),
        "mask_token": config.mask_token_id,
        "input_projection": config.has_input_projection,
    }
    if config.length_head:
        shape["length_head"] = config.length_head
        shape["length_head_width"] = config.length_head_width
    tokens = load_vocabulary(folder, config)
    if tokens is not None:
        shape["draft_vocabulary"] = len(tokens)
    if _grows(config, member):
        return shape
    shape["member"] = _MEMBERS[config.member]
    if config.member == "DSpark":
        shape["confidence_head"] = config.enable_confidence_head
    rank = config.markov_rank or config.selector_rank
    return shape | ({"rank": rank} if rank else {})


def _grows(config: DrafterConfig, member: str | None) -> bool:
    return config.member == "DFlash" and member == "dflash2"


def _compare(folder: Path, shape: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    wrong = [
        f"--{name.replace('_', '-')} is {_said(values[name])}, the drafter's is {_said(own)}"
        for name, own in shape.items()
        if name in values and values[name] != own
    ]
    if wrong:
        raise ConfigError(
            f"drafter {folder}: it cannot become another one: {'; '.join(wrong)}",
            "leave these options out: they are taken from the drafter that --from names",
        )


def _said(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
