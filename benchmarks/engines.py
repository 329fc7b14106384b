"""One inference engine in a process of its own, for benchmarks/decode.py and peers.py.

Usage: python engines.py NAME --model DIR --threads N --context TOKENS [--most REQUESTS]
           [--drafter DIR] [--draft DIR] [--openvino-model DIR] [--server PATH --gguf FILE]

Reads a JSON command a line from stdin and answers a JSON line on stdout:
    {"prompts": [[ids], ...], "texts": [...], "max_new_tokens": n}  ->  {"tokens", "seconds", ...}
    {"floor": rows}                                                 ->  {"seconds"}   (ours only)
Greedy, end-of-sequence tokens ignored, all prompts at once, but for ours with "running": so many at
once. What goes wrong is answered as {"error"}. Each engine needs only its own packages, so it may
run in another virtual environment; all but the 4-bit ones (openvino, llama) compute in bf16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaflash_batch.engine.assembly import Assembly
    from adaflash_batch.engine.decoder import Decoder
    from adaflash_batch.engine.target import Target
    from adaflash_batch.learning import JobLearning
    from adaflash_batch.request import Completion

Prompts = list[list[int]]
_RESTARTED = "BENCHMARK_ENGINE_RESTARTED"
NAMES = (
    *("ours", "ours-speculating"),
    *("transformers", "transformers-lookup", "transformers-continuous"),
    *("vllm", "vllm-lookup", "vllm-draft", "vllm-compiled"),
    *("openvino", "openvino-lookup"),
    *("llama", "llama-lookup", "llama-draft"),
)


class Engine(Protocol):
    """A loaded engine."""

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Decode all prompts at once; at least `tokens`."""


class Ours:
    """The bare decoder, without drafts."""

    def __init__(self, model: Path, context: int) -> None:
        import torch

        from adaflash_batch.engine.target import Target

        self._target = Target.load(model, str(model), dtype=torch.bfloat16)
        self._context = context

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """See Engine; also the median time of steps without prefill."""
        from adaflash_batch.engine.decoder import Decoder

        prompts = command["prompts"]
        running = command.get("running", len(prompts))
        kv_tokens = running * (self._context + 64)
        decoder = Decoder(self._target, max_running=running, kv_tokens=kv_tokens)
        completions, step = decode_all(decoder, prompts, command["max_new_tokens"])
        return figures(completions, step)

    @property
    def target(self) -> Target:
        """The model."""
        return self._target

    def floor(self, rows: int, now: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of a step's matrix products alone, the packed weights of this model in turn."""
        import torch

        layers = self._target.packed_linears()
        inputs = [torch.randn(rows, layer.in_features, dtype=torch.bfloat16) for layer in layers]
        times = []
        with torch.inference_mode():
            for _ in range(9):
                began = now()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                times.append(now() - began)
        return statistics.median(times)


class OursSpeculating:
    """What a job decodes with: drafter, lookup and learning; what it found out it keeps."""

    def __init__(
        self, model: Path, drafter: Path, *, threads: int, context: int, most: int
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._assembly = assemble_like_a_job(
            model,
            drafter,
            Path(self._scratch.name),
            threads=threads,
            context=context,
            concurrency=most,
        )
        self._learning = learn_like_a_job(self._assembly, Path(self._scratch.name))

    @property
    def target(self) -> Target:
        """The model."""
        return self._assembly.decoder.target

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """See Engine; also what became of the drafts."""
        from adaflash_batch.stats import SpeculationCounts

        decoder, prompts = self._assembly.decoder, command["prompts"]
        before, learning_s = decoder.num_steps, self._learning.seconds
        left = len(prompts)

        def learn(completions: list[Completion], seconds: float) -> None:
            nonlocal left
            left -= len(completions)
            self._learning.after_step(completions, seconds, left)

        completions, step = decode_all(decoder, prompts, command["max_new_tokens"], learn)
        counts = SpeculationCounts()
        for each in completions:
            counts.add(each.counts)
        return figures(completions, step) | {
            "tau": counts.emitted_per_step,
            "acceptance_rate": counts.acceptance_rate,
            "steps": decoder.num_steps - before,
            "learning_s": self._learning.seconds - learning_s,
        }


def assemble_like_a_job(
    model: Path, drafter: Path, scratch: Path, *, threads: int, context: int, concurrency: int
) -> Assembly:
    """The decoder of `adaflash-batch run --drafter DRAFTER`; versions go to `scratch`."""
    from adaflash_batch import models
    from adaflash_batch.engine.assembly import DecoderPlan, assemble
    from adaflash_batch.engine.policy import Policy

    plan = DecoderPlan(
        folder=model,
        name=str(model),
        drafter=drafter,
        versions=scratch / "versions",
        takes_in=False,
        policy=Policy("survival", None, only_if_it_pays=True),
        looks_up=True,
        costs=models.cache_root() / "step-costs",
        concurrency=concurrency,
        kv_bytes=4 * 2**30,
        context=context,
        threads=threads,
        shares_states=True,
    )
    return assemble(plan, notify=lambda line: print(line, file=sys.stderr))


def learn_like_a_job(assembly: Assembly, scratch: Path) -> JobLearning:
    """What learns beside it, by the defaults of a job."""
    from adaflash_batch.drafter.versions import VersionStore
    from adaflash_batch.learning import JobLearning, learning_plan
    from adaflash_batch.request import Sampling
    from adaflash_batch.spec import JobSpec

    paths = {"input.paths": ["none"], "output.directory": str(scratch / "none")}
    plan = learning_plan(JobSpec.from_sources(flags=paths), Sampling())
    return JobLearning(assembly, VersionStore(scratch / "versions"), plan, notify=print)


def figures(completions: list[Completion], step: float | None) -> dict[str, Any]:
    """What every engine of ours answers; the digest tells whether texts are the same."""
    ordered = sorted(completions, key=lambda each: each.key)
    digest = hashlib.sha256(repr([each.token_ids for each in ordered]).encode()).hexdigest()
    tokens = sum(len(each.token_ids) for each in ordered)
    return {"tokens": tokens, "step": step, "digest": digest[:16]}


def decode_all(
    decoder: Decoder,
    prompts: Prompts,
    max_new_tokens: int,
    after_step: Callable[[list[Completion], float], None] | None = None,
) -> tuple[list[Completion], float | None]:
    """Decode at once, each to its longest; also the median seconds of steps without prefill."""
    from adaflash_batch.request import Request, RowKey, Sampling

    sampling = Sampling(max_new_tokens=max_new_tokens, ignore_eos=True)
    for row, ids in enumerate(prompts):
        decoder.add(Request(RowKey(0, row, 0), ids, sampling, identity=row))
    completions, steps = [], []
    while decoder.has_work:
        before, began = decoder.num_prefilled, time.perf_counter()
        finished = decoder.step()
        taken = time.perf_counter() - began
        completions += finished
        if decoder.num_prefilled == before and decoder.num_running == len(prompts):
            steps.append(taken)
        if after_step is not None:
            after_step(finished, taken)
    return completions, statistics.median(steps) if steps else None


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


def load(options: argparse.Namespace) -> Any:
    """The engine of this name."""
    name, model, threads = options.engine, options.model, options.threads
    context, most = options.context, options.most
    if name == "ours":
        _set_threads(threads)
        return Ours(model, context)
    if name == "ours-speculating":
        return OursSpeculating(model, options.drafter, threads=threads, context=context, most=most)
    return load_peer(options)


def load_peer(options: argparse.Namespace) -> Any:
    """One that is not ours."""
    import peer_engines as peers

    kind, _, form = options.engine.partition("-")
    threads, context, most = options.threads, options.context, options.most
    if kind == "transformers":
        _set_threads(threads)
        if form == "continuous":
            return peers.ContinuousTransformers(options.model)
        return peers.Transformers(options.model, looks_up=form == "lookup")
    if kind == "vllm":
        return peers.Vllm(
            options.model,
            context=context,
            most=most,
            looks_up=form == "lookup",
            draft=options.draft if form == "draft" else None,
            compiles=form == "compiled",
        )
    if kind == "openvino":
        return peers.OpenVino(
            options.openvino_model, threads=threads, most=most, looks_up=form == "lookup"
        )
    extra = {"lookup": ["--spec-type", "ngram-cache"], "draft": ["-md", str(options.draft)]}
    return peers.LlamaServer(
        options.server,
        options.gguf,
        threads=threads,
        context=context,
        most=most,
        extra=extra.get(form, []),
    )


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def answer(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    """What a command asks for."""
    try:
        if "floor" in command:
            return {"seconds": engine.floor(command["floor"])}
        began = time.perf_counter()
        result: dict[str, Any] = engine.generate(command)
        return result | {"seconds": time.perf_counter() - began}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Load, then answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=NAMES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="prompt and completion, longest")
    parser.add_argument("--most", type=int, default=128, help="requests at once")
    parser.add_argument("--drafter", type=Path, help="of ours")
    parser.add_argument("--draft", type=Path, help="small model of vllm-draft or llama-draft")
    parser.add_argument("--openvino-model", type=Path, help="the model in OpenVINO's format")
    parser.add_argument("--server", type=Path, help="llama-server")
    parser.add_argument("--gguf", type=Path, help="model of llama-server")
    options = parser.parse_args()
    if options.engine.startswith("vllm"):
        restart_for_vllm(options.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    engine = load(options)
    print("{}", file=answers, flush=True)  # ready
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
