"""Tiny models made on the spot, drafters that follow a script, and the loop that runs them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import Draft, DraftBatch, Drafter
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import DrafterWeights
from adaflash_batch.kernels.paged_attention import PackedStep
from adaflash_batch.request import Completion, Request, RowKey, Sampling

VOCABULARY = 97
BLOCK = 5

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = {"sliding_window": 6, "head_dim": 16}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", _LLAMA | {"head_dim": 16}),
    "mistral": ("MistralConfig", _LLAMA | _SLIDING),
    "gemma3": ("Gemma3TextConfig", _LLAMA | _SLIDING | {"num_hidden_layers": 7}),
    "gemma2": ("Gemma2Config", _LLAMA | _SLIDING | {"attn_logit_softcapping": 2.0}),
    "gpt2": (
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4},
            **{"n_positions": 256, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
}


def tiny_model(architecture: str, seed: int = 0) -> Any:
    """A random model whose choices have wide gaps, so that rounding cannot flip them."""
    config_name, fields = ARCHITECTURES[architecture]
    config = getattr(transformers, config_name)(**fields, initializer_range=0.4)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def tiny_llama(seed: int, **fields: Any) -> Any:
    """The same with other settings."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(_LLAMA | fields), initializer_range=0.4)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@dataclass(slots=True)
class ScriptedDrafter:
    """Drafts what `propose(key, position)` says; K - 1 tokens from position + 1 on."""

    propose: Callable[[RowKey, int], Sequence[int]]
    block_size: int = BLOCK
    version: int = 3
    tapped_layers: tuple[int, ...] = (0, 1)
    num_calls: int = 0
    absorbed: dict[int, int] = field(default_factory=dict)

    def draft(self, batch: DraftBatch) -> list[Draft]:
        """See engine.drafting.Drafter."""
        self.num_calls += 1
        pairs = zip(batch.keys, batch.positions.tolist(), strict=True)
        return [Draft(list(self.propose(key, position)), None) for key, position in pairs]

    def absorb(self, step: PackedStep, positions: torch.Tensor, features: torch.Tensor) -> None:
        """See engine.drafting.Drafter."""
        assert features.shape == (positions.shape[0], 2 * 32)
        assert positions.shape[0] == int(step.length.sum())

    def adopt(self, weights: DrafterWeights) -> None:
        """See engine.drafting.Drafter."""
        self.version = weights.version


def replaying(
    requests: Sequence[Request], texts: Mapping[RowKey, Sequence[int]], block: int = BLOCK
) -> ScriptedDrafter:
    """The perfect drafter: it knows every continuation (zeros behind the end)."""
    whole = {r.key: [*r.token_ids, *texts[r.key], *([0] * block)] for r in requests}
    return ScriptedDrafter(lambda key, at: whole[key][at + 1 : at + block], block)


def always_wrong(
    requests: Sequence[Request], texts: Mapping[RowKey, Sequence[int]]
) -> ScriptedDrafter:
    """Never the token that follows."""
    perfect = replaying(requests, texts).propose
    return ScriptedDrafter(lambda key, at: [(token + 1) % VOCABULARY for token in perfect(key, at)])


def guessing(
    requests: Sequence[Request], texts: Mapping[RowKey, Sequence[int]], right: float = 0.7
) -> ScriptedDrafter:
    """Right at each position with some probability: rows of a batch accept different lengths."""
    perfect = replaying(requests, texts).propose
    dice = random.Random(0)

    def propose(key: RowKey, at: int) -> list[int]:
        known = perfect(key, at)
        return [t if dice.random() < right else dice.randrange(VOCABULARY) for t in known]

    return ScriptedDrafter(propose)


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of very different lengths."""
    dice = random.Random(seed)
    return [
        [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(1, longest))]
        for _ in range(count)
    ]


def as_requests(
    prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
) -> list[Request]:
    """Requests of one shard."""
    settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    return [
        Request(RowKey(0, row, 0), list(prompt), settings[row], identity=1000 + row)
        for row, prompt in enumerate(prompts)
    ]


def decode(
    target: Target,
    requests: Sequence[Request],
    *,
    drafter: Drafter | None = None,
    ends: frozenset[int] = frozenset(),
    kv_tokens: int = 16384,
    **options: Any,
) -> dict[RowKey, Completion]:
    """Run requests to their end."""
    decoder = Decoder(
        target,
        drafter=None if drafter is None else lambda num_pages: drafter,
        kv_tokens=kv_tokens,
        end_token_ids=ends,
        **options,
    )
    for request in requests:
        decoder.add(request)
    finished: list[Completion] = []
    while decoder.has_work:
        finished += decoder.step()
    assert sorted(c.key for c in finished) == sorted(r.key for r in requests)
    return {completion.key: completion for completion in finished}


def texts(completions: Mapping[RowKey, Completion]) -> dict[RowKey, list[int]]:
    """Only the tokens."""
    return {key: completion.token_ids for key, completion in completions.items()}
