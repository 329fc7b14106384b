"""What is found out of a transformers model before it decodes.

# T packed tokens, V vocabulary
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from adaflash_batch.engine.attention_call import AttentionCall, CannotAttend, LayerShape
from adaflash_batch.errors import ConfigError, first_line

PROBE_TOKENS = 12
"""Tokens that a model's own logits and ours are compared on."""


def probe_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """A few tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (PROBE_TOKENS,), generator=generator).to(device)


@torch.inference_mode()
def native_logits(model: Any) -> torch.Tensor:
    """Logits [T, V] of the probe tokens, computed as transformers would."""
    model.set_attn_implementation("eager")
    ids = probe_ids(model.config.get_text_config().vocab_size, model.device)
    logits: torch.Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
    return logits


@torch.inference_mode()
def probe_shapes(model: Any, num_layers: int) -> list[LayerShape]:
    """What each layer keeps of a token. Raises CannotAttend where one does not attend our way."""
    call = AttentionCall()
    ids = probe_ids(model.config.get_text_config().vocab_size, model.device)[:2]
    positions = torch.arange(2, device=model.device)
    model(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        adaflash_call=call,
    )
    missing = sorted(set(range(num_layers)) - set(call.shapes))
    if missing:
        raise CannotAttend(
            f"layers {missing} of {num_layers} do not attend through transformers' interface"
        )
    return [call.shapes[layer] for layer in range(num_layers)]


def decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    """The model's layers. Raises CannotAttend where they are not found."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CannotAttend("its decoder layers were not found")


def refuse_encoder(model: Any) -> None:
    """Raises CannotAttend for an encoder-decoder model."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise CannotAttend("it is an encoder-decoder model")


def load_model(
    folder: Path, name: str, dtype: torch.dtype | None, trust_remote_code: bool
) -> nn.Module:
    """The model in a folder, on the CPU. Raises ConfigError where it does not load."""
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype if dtype is not None else "auto",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, OSError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be loaded: {first_line(error)}") from error
    return model
