"""The other engines that engines.py can hold, each with no more than its own packages.

All decode greedily past end-of-sequence tokens; prefixes that prompts share are computed once by
those that know how, as in ours.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turns import die_with_parent

Prompts = list[list[int]]
_DRAFTS, _NGRAM = 4, 3  # tokens proposed by a lookup, and the longest run that is looked up
_PAGE = 256


class Transformers:
    """`generate` on one static, left-padded batch; with prompt lookup one request at a time."""

    def __init__(self, model: Path, *, looks_up: bool = False) -> None:
        self._model = load_transformers(model)
        self._extra: dict[str, Any] = {}
        if looks_up:
            self._extra = {"prompt_lookup_num_tokens": _DRAFTS, "max_matching_ngram_size": _NGRAM}

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """See engines.Engine."""
        import torch

        prompts: Prompts = command["prompts"]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=command["max_new_tokens"],
                do_sample=False,
                **self._extra,
            )
        return {"tokens": (output.shape[1] - longest) * len(prompts)}


class ContinuousTransformers:
    """`generate_batch`: continuous batching."""

    def __init__(self, model: Path) -> None:
        self._model = load_transformers(model)

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """See engines.Engine."""
        import torch
        from transformers import ContinuousBatchingConfig, GenerationConfig

        prompts, most = command["prompts"], command["max_new_tokens"]
        generation = GenerationConfig(
            max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # Left to itself it takes what memory is free and builds attention masks to match.
        pages = sum(math.ceil((len(ids) + most) / _PAGE) for ids in prompts)
        batching = ContinuousBatchingConfig(
            page_size=_PAGE, num_blocks=pages + 1, max_batch_tokens=1024, allow_block_sharing=False
        )
        with torch.inference_mode():
            results = self._model.generate_batch(
                prompts, generation_config=generation, continuous_batching_config=batching
            )
        return {"tokens": sum(len(each.generated_tokens) for each in results.values())}


def load_transformers(model: Path) -> Any:
    """The model in bf16, ignoring end-of-sequence tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(model), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded


class Vllm:
    """vLLM's offline engine for CPUs; `looks_up` drafts by its n-gram method."""

    def __init__(
        self,
        model: Path,
        *,
        context: int,
        most: int,
        looks_up: bool = False,
        draft: Path | None = None,
        compiles: bool = False,
    ) -> None:
        from vllm import LLM

        speculation: dict[str, Any] | None = None
        if looks_up:
            speculation = {"method": "ngram", "prompt_lookup_max": _NGRAM}
        elif draft is not None:
            speculation = {"method": "draft_model", "model": str(draft)}
        if speculation is not None:
            speculation["num_speculative_tokens"] = _DRAFTS
        self._llm: Any = LLM(
            str(model),
            dtype="bfloat16",
            max_model_len=context,
            max_num_seqs=most,
            enforce_eager=not compiles,
            enable_prefix_caching=True,
            disable_log_stats=True,
            speculative_config=speculation,
        )

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """See engines.Engine."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=command["max_new_tokens"], ignore_eos=True
        )
        inputs = [{"prompt_token_ids": ids} for ids in command["prompts"]]
        results = self._llm.generate(inputs, sampling, use_tqdm=False)
        return {"tokens": sum(len(result.outputs[0].token_ids) for result in results)}


class OpenVino:
    """OpenVINO GenAI over its continuous batching, from a folder in its own format."""

    def __init__(self, model: Path, *, threads: int, most: int, looks_up: bool = False) -> None:
        import openvino_genai as ov

        scheduler = ov.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_seqs = most
        scheduler.enable_prefix_caching = True
        self._config: dict[str, Any] = {"do_sample": False, "ignore_eos": True}
        self._config["apply_chat_template"] = False  # the texts have it
        extra: dict[str, Any] = {}
        if looks_up:
            extra["prompt_lookup"] = True
            self._config |= {"num_assistant_tokens": _DRAFTS, "max_ngram_size": _NGRAM}
        self._pipeline: Any = ov.LLMPipeline(
            str(model), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **extra
        )

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """See engines.Engine; tokenises by itself, since it takes many prompts only as texts."""
        import openvino_genai as ov

        config = ov.GenerationConfig(max_new_tokens=command["max_new_tokens"], **self._config)
        result = self._pipeline.generate(command["texts"], config)
        return {"tokens": int(result.perf_metrics.get_num_generated_tokens())}


class LlamaServer:
    """llama.cpp's HTTP server with a slot for every request; `extra` are options of its own."""

    def __init__(
        self, server: Path, gguf: Path, *, threads: int, context: int, most: int, extra: list[str]
    ) -> None:
        port = str(20000 + os.getpid() % 20000)
        command = [str(server), "-m", str(gguf), "--port", port, "--host", "127.0.0.1"]
        command += ["-t", str(threads), "-tb", str(threads), "-np", str(most)]
        command += ["-c", str(context * most), "--no-webui", *extra]
        self._server = subprocess.Popen(
            command, stdout=2, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        self._address, self._most = f"http://127.0.0.1:{port}", most
        self._wait()

    def _wait(self) -> None:
        for _ in range(1200):
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with exit code {self._server.returncode}")
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError("llama-server did not answer within two minutes")

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """See engines.Engine."""

        def complete(ids: list[int]) -> int:
            body = {"prompt": ids, "n_predict": command["max_new_tokens"], "temperature": 0}
            body |= {"ignore_eos": True, "cache_prompt": True}
            request = urllib.request.Request(
                f"{self._address}/completion",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=3600) as answer:
                return int(json.load(answer)["tokens_predicted"])

        with ThreadPoolExecutor(self._most) as pool:
            return {"tokens": sum(pool.map(complete, command["prompts"]))}
