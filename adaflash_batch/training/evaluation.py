"""evaluate_drafter(): a drafter on given prompts, teacher-forced and in real decoding."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F

from adaflash_batch import model_files, models
from adaflash_batch.adapt.evaluate import Acceptance, evaluate
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.assembly import DecoderPlan, load_net
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.errors import ConfigError
from adaflash_batch.exchange import Trajectory
from adaflash_batch.request import Prompt, Request, RowError, RowKey, Sampling
from adaflash_batch.stats import SpeculationCounts
from adaflash_batch.text import TextCodec
from adaflash_batch.training.card import ALL, figures, results
from adaflash_batch.training.decoding import run
from adaflash_batch.training.parts import TargetParts, load_target
from adaflash_batch.training.prompts import PromptFiles, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is measured; see the options of `drafter eval`."""

    folder: Path
    model: str
    prompts: tuple[str, ...]
    prompt_column: str | None = None
    messages_column: str | None = None
    max_new_tokens: int = 128
    most_prompts: int = 40
    concurrency: int = 16
    dtype: str = "auto"
    threads: int | None = None


def evaluate_drafter(plan: EvaluationPlan, *, notify: Callable[[str], None]) -> dict[str, object]:
    """Decode the prompts greedily with the drafter at full width; count what it got right.

    Teacher-forced figures come from the states of the same decode.

    Returns:
        `decoded` and `teacher_forced`, each by domain and for all, and `refused` prompts.

    Raises:
        AdaflashError: the drafter, the model or the prompts cannot be used.
    """
    files = PromptFiles.open(plan.prompts, plan.prompt_column, plan.messages_column)
    model = models.locate(plan.model, notify=notify)
    decoder, codec = load_target(_decoder_plan(plan, model), files, notify)
    forced = _TeacherForced(plan, decoder, codec)
    requests, refused = _requests(plan, _choose(files, plan.most_prompts), codec)
    if not requests:
        raise ConfigError("none of the prompts can be decoded")
    decoded = _decode(plan, decoder, forced, requests, notify)
    return {
        "drafter": str(plan.folder),
        "model": plan.model,
        "refused": refused,
        "decoded": _figures(decoded),
        "teacher_forced": forced.figures(),
    }


class _TeacherForced:
    """Drafts, as decoding does, behind every token of the texts that come out of the decoder."""

    def __init__(self, plan: EvaluationPlan, decoder: Decoder, codec: TextCodec) -> None:
        target = decoder.target
        self._net = net = load_net(plan.folder, target).to(target.device)
        parts = TargetParts.of(target, codec, decoder.end_token_ids)
        self._embedding, self._head = parts.embedding, parts.head
        self.layers = net.config.target_layer_ids
        self._token_ids = load_vocabulary(plan.folder, net.config)
        if self._token_ids is not None:
            self._token_ids = self._token_ids.to(target.device)
            self._head = self._head[self._token_ids]
        self._domains: dict[str, Acceptance] = {}

    def take(self, trajectory: Trajectory, domain: str) -> None:
        """Count what is right behind each of its tokens."""
        result = evaluate(
            self._net,
            trajectory,
            self._embedding,
            lambda hidden: F.linear(hidden, self._head),
            token_ids=self._token_ids,
        )
        self._domains.setdefault(domain, Acceptance()).add(result)

    def figures(self) -> dict[str, dict[str, object]]:
        """By domain."""
        return results(dict(sorted(self._domains.items())))


def _decoder_plan(plan: EvaluationPlan, model: Path) -> DecoderPlan:
    return DecoderPlan(
        folder=model,
        name=plan.model,
        dtype=plan.dtype,
        drafter=plan.folder,
        tokenizer_digest=model_files.tokenizer_digest(model),
        concurrency=plan.concurrency,
        # Room for every block whole: a smaller width would be measured otherwise.
        token_budget=max(1024, 64 * plan.concurrency),
        threads=plan.threads,
        share_prefixes=False,  # their states would want memory of their own
    )


def _choose(files: PromptFiles, most: int) -> list[Row]:
    """The first rows of each domain."""
    taken: defaultdict[str, int] = defaultdict(int)
    rows = []
    for row in files.rows():
        if taken[row.domain] < most:
            taken[row.domain] += 1
            rows.append(row)
    return rows


def _requests(
    plan: EvaluationPlan, rows: list[Row], codec: TextCodec
) -> tuple[list[tuple[Request, str]], int]:
    """(requests with their domains, prompts refused)."""
    sampling = Sampling(max_new_tokens=plan.max_new_tokens)
    found: list[tuple[Request, str]] = []
    encoded = codec.encode_many([_with(row, sampling) for row in rows])
    for row, tokens in zip(rows, encoded, strict=True):
        if not isinstance(tokens, RowError):
            key = RowKey(row.prompt.shard, row.prompt.row, 0)
            request = Request(key, tokens.token_ids, sampling, row.prompt.identity)
            found.append((request, row.domain))
    return found, len(rows) - len(found)


def _with(row: Row, sampling: Sampling) -> Prompt:
    return dataclasses.replace(row.prompt, sampling=sampling)


def _decode(
    plan: EvaluationPlan,
    decoder: Decoder,
    forced: _TeacherForced,
    requests: list[tuple[Request, str]],
    notify: Callable[[str], None],
) -> dict[str, SpeculationCounts]:
    domains = {request.key: domain for request, domain in requests}
    decoded: defaultdict[str, SpeculationCounts] = defaultdict(SpeculationCounts)
    decoder.capture(forced.layers, lambda each: forced.take(each, domains[each.key]))
    pending = iter([request for request, _ in requests])
    done = 0
    for completions in run(decoder, pending, plan.concurrency):
        for completion in completions:
            decoded[domains[completion.key]].add(completion.counts)
            done += 1
            if done % max(1, len(requests) // 10) == 0:
                notify(f"decoded {done} of {len(requests)} prompts")
    return dict(sorted(decoded.items()))


def _figures(decoded: Mapping[str, SpeculationCounts]) -> dict[str, dict[str, object]]:
    together = SpeculationCounts()
    for counts in decoded.values():
        together.add(counts)
    return {name: figures(counts) for name, counts in ({**decoded, ALL: together}).items()}
