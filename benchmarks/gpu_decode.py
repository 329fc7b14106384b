"""Decoding on a device at several concurrencies, for benchmarks/gpu.py; random weights will do.

A step's floor: the weights of the layers and the lm_head once, and the keys and values of all
requests, over the memory's rate (or the operations over the peak of bf16, where that is more).
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_notes import Notes, floor_s

from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.checkpoint import load as load_drafter
from adaflash_batch.drafter.config import DrafterConfig, build_target_layer_ids
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.device_passes import DevicePasses
from adaflash_batch.engine.drafting import BlockDrafter
from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.target import Target
from adaflash_batch.request import Request, RowKey, Sampling

_SHIPPED = Path(__file__).resolve().parent.parent / "data" / "drafters"
_CONCURRENCIES = (1, 32, 128)
_PROMPT, _WARM_STEPS = 128, 12

QWEN3_8B = {
    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288},
    **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False},
}
SMOLLM2_135M = {
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536},
    **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": True},
}
TINY = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


def run_large(notes: Notes, device_name: str, *, is_tiny: bool) -> None:
    """Random weights of Qwen3-8B's shape, without drafts and with blocks that are all verified."""
    device = torch.device(device_name)
    fields = TINY if is_tiny else QWEN3_8B
    target = _random_target("Qwen3Config", fields, device, is_tiny=is_tiny)
    notes.put("weights", _num_weights(target))
    drafter = _random_drafter(target)
    _decode_all(notes, target, drafter, is_tiny=is_tiny)


def run_demo(notes: Notes, device_name: str, model: str | None, *, is_tiny: bool) -> None:
    """The demo model with the shipped drafter; random weights of its shape where it is not here."""
    device = torch.device(device_name)
    if model is not None and not is_tiny:
        target = Target.load(Path(model), model, dtype=torch.bfloat16, device=device)
    else:
        fields = TINY if is_tiny else SMOLLM2_135M
        target = _random_target("LlamaConfig", fields, device, is_tiny=is_tiny)
    notes.put("weights", _num_weights(target))
    notes.put("weights are random", model is None)
    drafter = _random_drafter(target) if is_tiny else _shipped(target)
    _decode_all(notes, target, drafter, is_tiny=is_tiny)


def _random_target(
    config_name: str, fields: dict[str, Any], device: torch.device, *, is_tiny: bool
) -> Target:
    import transformers

    config = getattr(transformers, config_name)(**fields)
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if is_tiny else torch.bfloat16
        )
    # On a CPU what runs is the device's path all the same.
    kernels: Any = "auto" if device.type == "cuda" else "torch"
    return Target.of(model.to(device), f"random {config_name}", kernels)


def _num_weights(target: Target) -> int:
    return sum(each.numel() for each in target._model.parameters())


def _random_drafter(target: Target) -> DFlash:
    """Five layers of the target's width, blocks of 16; no draft of it is right."""
    config: Any = target.text_config
    heads = config.num_attention_heads
    drafter = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=min(5, target.num_layers),
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        vocab_size=target.vocab_size,
        block_size=16 if target.num_layers > 5 else 4,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=tuple(build_target_layer_ids(target.num_layers, 5))
        if target.num_layers > 5
        else (0, 1),
        num_target_layers=target.num_layers,
    )
    net = initialise(drafter, torch.Generator().manual_seed(0))
    return net.to(target.device, target.dtype).eval().requires_grad_(False).fuse()


def _shipped(target: Target) -> DFlash:
    """The drafter of data/drafters."""
    folder = next(path.parent for path in sorted(_SHIPPED.rglob("config.json")))
    facts = TargetFacts(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=target.num_layers,
        name=target.name,
        tokenizer_digest=None,
    )
    net = load_drafter(folder, facts, dtype=target.dtype).to(target.device)
    return net.eval().requires_grad_(False).fuse()


def _decode_all(notes: Notes, target: Target, drafter: DFlash, *, is_tiny: bool) -> None:
    concurrencies = (1, 2) if is_tiny else _CONCURRENCIES
    rest = 2 * len(concurrencies)
    for net in (None, drafter):
        for concurrency in concurrencies:
            # What is left is shared by what is still to be measured.
            seconds = max(notes.left / max(rest, 1) - 1.0, 1.0)
            kind = "plain" if net is None else "all drafts verified"
            work = partial(_decode, target, net, concurrency, seconds, is_tiny=is_tiny)
            notes.attempt(f"{kind}, {concurrency} at once", 2.0, work)
            rest -= 1


@torch.inference_mode()
def _decode(
    target: Target, net: DFlash | None, concurrency: int, seconds: float, *, is_tiny: bool
) -> dict[str, Any]:
    longest, prompt = (12, 8) if is_tiny else (1024, _PROMPT)
    decoder = Decoder(
        target,
        drafter=None if net is None else lambda num_pages: BlockDrafter(net, target, num_pages),
        policy=Policy(widths="fixed", most=None if is_tiny else 7),
        max_running=concurrency,
        kv_tokens=concurrency * (longest + prompt + 64),
        share_prefixes=False,
    )
    sampling = Sampling(max_new_tokens=longest, ignore_eos=True)
    generator = torch.Generator().manual_seed(1)
    for row in range(concurrency):
        ids = torch.randint(3, target.vocab_size - 1, (prompt,), generator=generator).tolist()
        decoder.add(Request(RowKey(0, row, 0), ids, sampling, row))
    return _measure(decoder, concurrency, seconds, warm=3 if is_tiny else _WARM_STEPS)


def _measure(decoder: Decoder, concurrency: int, seconds: float, warm: int) -> dict[str, Any]:
    """Steps between the first ones, which compile and capture, and the first that is not full."""
    end, periods, host = time.monotonic() + seconds, list[float](), list[float]()
    for _ in range(warm):
        decoder.step()
    tokens, then = decoder.num_generated, time.monotonic()
    while time.monotonic() < end and decoder.num_running == concurrency and len(periods) < 400:
        began_cpu = time.thread_time()
        decoder.step()
        now = time.monotonic()
        periods.append(now - then)
        host.append(time.thread_time() - began_cpu)
        then = now
    made = decoder.num_generated - tokens
    passes = decoder._passes
    assert isinstance(passes, DevicePasses)
    context = tokens / concurrency + _PROMPT
    return {
        "steps": len(periods),
        "step_s": statistics.median(periods) if periods else None,
        "host_s": statistics.median(host) if host else None,
        "tokens_per_s": made / sum(periods) if periods else None,
        "floor_s": _step_floor(decoder.target, concurrency, context),
        "graphs": len(passes.graphs),
        "replays": passes.graphs.num_replays,
        "not_captured": passes.graphs.failure,
    }


def _step_floor(target: Target, concurrency: int, context: float) -> float | None:
    embedding = target._model.get_input_embeddings().weight.numel()
    is_tied = bool(getattr(target.text_config, "tie_word_embeddings", False))
    numbers = _num_weights(target) - (0 if is_tied else embedding)
    num_bytes = numbers * target.dtype.itemsize
    return floor_s(
        num_bytes + concurrency * context * target.bytes_per_token, 2.0 * numbers * concurrency
    )
