"""One inference engine in a process of its own, for benchmarks/decode.py.

Usage: python engines.py ours|transformers|vllm --model DIR --threads N --longest TOKENS

Reads a JSON command a line from stdin and answers a JSON line on stdout:
    {"prompts": [[ids], ...], "max_new_tokens": n}  ->  {"tokens": .., "seconds": .., ...}
    {"floor": rows}                                 ->  {"seconds": ..}   (ours only)
Greedy, bf16, end-of-sequence tokens ignored, all prompts at once. Each engine needs only its own
packages, so vLLM may run in another virtual environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from adaflash_batch.engine.decoder import Decoder
    from adaflash_batch.request import Completion

Prompts = list[list[int]]
_RESTARTED = "BENCHMARK_ENGINE_RESTARTED"


class Engine(Protocol):
    """A loaded engine."""

    def generate(self, prompts: Prompts, max_new_tokens: int) -> dict[str, float]:
        """Decode all prompts at once; at least `tokens`."""


class Ours:
    """The bare decoder, without a drafter."""

    def __init__(self, model: Path, longest: int) -> None:
        import torch

        from adaflash_batch.engine.target import Target

        self._target = Target.load(model, str(model), dtype=torch.bfloat16)
        self._longest = longest

    def generate(self, prompts: Prompts, max_new_tokens: int) -> dict[str, float]:
        """See Engine; also the median time of steps without prefill."""
        from adaflash_batch.engine.decoder import Decoder

        kv_tokens = len(prompts) * (self._longest + max_new_tokens + 64)
        decoder = Decoder(self._target, max_running=len(prompts), kv_tokens=kv_tokens)
        completions, step = decode_all(decoder, prompts, max_new_tokens)
        return {"tokens": sum(len(each.token_ids) for each in completions), "step": step}

    def floor(self, rows: int) -> float:
        """Seconds of a step's matrix products alone, the packed weights of this model in turn."""
        import torch

        layers = self._target.packed_linears()
        inputs = [torch.randn(rows, layer.in_features, dtype=torch.bfloat16) for layer in layers]
        times = []
        with torch.inference_mode():
            for _ in range(9):
                began = time.perf_counter()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                times.append(time.perf_counter() - began)
        return statistics.median(times)


def decode_all(
    decoder: Decoder, prompts: Prompts, max_new_tokens: int
) -> tuple[list[Completion], float]:
    """Decode at once, each to its longest; also the median seconds of steps without prefill."""
    from adaflash_batch.request import Request, RowKey, Sampling

    sampling = Sampling(max_new_tokens=max_new_tokens, ignore_eos=True)
    for row, ids in enumerate(prompts):
        decoder.add(Request(RowKey(0, row, 0), ids, sampling, identity=row))
    completions, steps = [], []
    while decoder.has_work:
        before, began = decoder.num_prefilled, time.perf_counter()
        completions += decoder.step()
        if decoder.num_prefilled == before and decoder.num_running == len(prompts):
            steps.append(time.perf_counter() - began)
    return completions, statistics.median(steps)


class Transformers:
    """`generate` on one static, left-padded batch."""

    def __init__(self, model: Path, longest: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(model), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: Prompts, max_new_tokens: int) -> dict[str, float]:
        """See Engine."""
        import torch

        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False
            )
        return {"tokens": (output.shape[1] - longest) * len(prompts)}


class Vllm:
    """vLLM's offline engine for CPUs, eager, without prefix caching."""

    def __init__(self, model: Path, longest: int) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            str(model),
            dtype="bfloat16",
            max_model_len=longest + 160,
            max_num_seqs=128,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, max_new_tokens: int) -> dict[str, float]:
        """See Engine."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        results = self._llm.generate(inputs, sampling, use_tqdm=False)
        return {"tokens": sum(len(result.outputs[0].token_ids) for result in results)}


def restart_for_vllm(threads: int) -> None:
    """vLLM and its OpenMP read these when the process starts."""
    if os.environ.get(_RESTARTED):
        return
    environment = os.environ | {
        _RESTARTED: "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def answer(engine: Any, command: dict[str, Any]) -> dict[str, float]:
    """What a command asks for."""
    if "floor" in command:
        return {"seconds": engine.floor(command["floor"])}
    began = time.perf_counter()
    result: dict[str, float] = engine.generate(command["prompts"], command["max_new_tokens"])
    return result | {"seconds": time.perf_counter() - began}


def main() -> None:
    """Load, then answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("ours", "transformers", "vllm"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True, help="tokens of the longest prompt")
    options = parser.parse_args()
    if options.engine == "vllm":
        restart_for_vllm(options.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    import torch

    torch.set_num_threads(options.threads)
    kind = {"ours": Ours, "transformers": Transformers, "vllm": Vllm}[options.engine]
    engine = kind(options.model, options.longest)
    print("{}", file=answers, flush=True)  # ready
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
