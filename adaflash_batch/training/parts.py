"""What training and measuring a drafter need of its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from adaflash_batch import model_files
from adaflash_batch.adapt.new_drafter import (
    build_config,
    copy_target_layers,
    length_fields,
    mask_token,
    member_fields,
    shape_like,
)
from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.config import DrafterConfig, build_target_layer_ids
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.engine.assembly import DecoderPlan, build_decoder
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.tables import embedding_table, head_weight
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError
from adaflash_batch.text import TextCodec
from adaflash_batch.training.beginning import begun_net
from adaflash_batch.training.plan import TrainingPlan
from adaflash_batch.training.prompts import PromptFiles


def load_target(
    plan: DecoderPlan, files: PromptFiles, notify: Callable[[str], None]
) -> tuple[Decoder, TextCodec]:
    """A decoder and the codec of its target, ready for these prompts. Raises AdaflashError."""
    notify(f"loading {plan.name}")
    decoder = build_decoder(plan, notify=notify)
    codec = TextCodec.load(plan.folder, context=decoder.context)
    codec.check_content(files.content.kind)
    defaults = model_files.generation_defaults(plan.folder)
    decoder.end_token_ids = codec.end_token_ids(defaults, decoder.vocab_size)
    return decoder, codec


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """The frozen parts that a drafter shares.

    Attributes:
        embedding: [vocabulary, H], scaled as the model does.
        head: the lm_head's weight, [vocabulary, H].
        config: transformers' config of the text model.
        end_ids: tokens that end a text.
        special_ids: the tokenizer's special tokens.
    """

    embedding: Tensor
    head: Tensor
    config: Any
    end_ids: frozenset[int]
    special_ids: tuple[int, ...]

    @staticmethod
    def of(target: Target, codec: TextCodec, end_ids: frozenset[int]) -> TargetParts:
        """Take them from a loaded target. Raises ConfigError if its lm_head has a bias."""
        return TargetParts(
            embedding=embedding_table(target),
            head=head_weight(target),
            config=target.text_config,
            end_ids=end_ids,
            special_ids=codec.special_token_ids,
        )


def tapped_layers(plan: TrainingPlan, num_layers: int) -> tuple[int, ...]:
    """The target layers that a plan names or spreads."""
    return plan.target_layers or build_target_layer_ids(num_layers, plan.features)


def drafter_config(plan: TrainingPlan, parts: TargetParts) -> DrafterConfig:
    """The shape of the drafter that a plan asks for."""
    shape = shape_like(parts.config)
    mask = plan.mask_token
    if mask is None:
        mask = mask_token(parts.special_ids, parts.end_ids, shape["vocab_size"])
    return build_config(
        **shape,
        **member_fields(
            plan.member,
            plan.rank,
            shape["hidden_size"],
            shape["vocab_size"],
            has_confidence=plan.confidence_head,
        ),
        **length_fields(plan.length_head, plan.length_head_width),
        num_hidden_layers=plan.layers,
        has_input_projection=plan.input_projection,
        block_size=plan.block_size,
        mask_token_id=mask,
        target_layer_ids=tapped_layers(plan, shape["num_target_layers"]),
    )


def new_net(
    plan: TrainingPlan, parts: TargetParts, model: Path, notify: Callable[[str], None]
) -> DFlash:
    """The drafter before its first update. Raises ConfigError for one that does not fit."""
    if plan.begin_from is not None:
        shape = shape_like(parts.config)
        sizes = shape["vocab_size"], shape["hidden_size"], shape["num_target_layers"]
        digest = model_files.tokenizer_digest(model)
        return begun_net(plan, plan.begin_from, TargetFacts(*sizes, plan.model, digest))
    config = drafter_config(plan, parts)
    net = initialise(config, torch.Generator().manual_seed(plan.seed))
    if plan.init_from_target:
        copied = copy_target_layers(net, config.num_target_layers, _reader(model))
        notify(f"{len(copied)} weights of the drafter begin as the target's")
    return net


def _reader(model: Path) -> Callable[[str], Tensor | None]:
    def read(ending: str) -> Tensor | None:
        for path in model_files.weight_files(model):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if f".{name}".endswith(f".{ending}"):
                        tensor: Tensor = file.get_tensor(name)
                        return tensor.float()
        return None

    return read


def count_layers(model: Path, name: str) -> int:
    """Layers of the target in a folder, before it is loaded. Raises ConfigError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(model), local_files_only=True)
        return int(config.get_text_config().num_hidden_layers)
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be loaded: {error}") from error
