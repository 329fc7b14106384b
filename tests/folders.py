"""Model and drafter folders made on the spot, and the call that runs a job on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tiny import tiny_llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from adaflash_batch.drafter import checkpoint
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.job import run_job
from adaflash_batch.report.live import Progress
from adaflash_batch.spec import JobSpec
from adaflash_batch.summary import Summary

CONTEXT = 256
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
END = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Three special tokens, then a token for every byte: an ASCII text has as many as letters."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: place for place, piece in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>"
    )
    wrapped.chat_template = template
    return wrapped


VOCABULARY = len(byte_tokenizer())


def token_of(letter: str) -> int:
    """The id of an ASCII letter."""
    return int(byte_tokenizer().convert_tokens_to_ids(letter))


def tiny_model_folder(
    path: Path, *, seed: int = 0, template: str | None = TEMPLATE, **config: Any
) -> Path:
    """A random Llama with a byte tokenizer; the same seed writes the same weights."""
    usual = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    model = tiny_llama(seed, **(usual | config))
    model.save_pretrained(path)
    byte_tokenizer(template).save_pretrained(path)
    return path


def echo_model_folder(path: Path, template: str | None = None) -> Path:
    """A model that repeats the last token of its prompt for ever: its layers add nothing."""
    model = tiny_llama(0, vocab_size=VOCABULARY, tie_word_embeddings=True)
    _silence(model)
    weight = model.get_input_embeddings().weight
    # Of one length, so that each is most like itself.
    weight.data = torch.nn.functional.normalize(weight.data, dim=-1)
    model.save_pretrained(path)
    byte_tokenizer(template).save_pretrained(path)
    return path


def tiny_drafter_folder(path: Path, *, is_silent: bool = False, **changes: Any) -> Path:
    """A random drafter for the tiny models; a silent one always drafts its mask token."""
    config = dataclasses.replace(_DRAFTER, **changes)
    net = initialise(config, torch.Generator().manual_seed(1))
    if is_silent:
        _silence(net)
    checkpoint.save(net, path)
    return path


_DRAFTER = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=VOCABULARY,
    block_size=5,
    mask_token_id=1,
    target_layer_ids=(0, 1),
    num_target_layers=3,
)


def _silence(model: torch.nn.Module | DFlash) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()


@dataclass(slots=True)
class Listener:
    """A Reporter that keeps what it hears, and stops the job dead after some steps if told to."""

    dies_after: int | None = None
    lines: list[str] = field(default_factory=list)
    updates: list[Progress] = field(default_factory=list)

    def start(self, lines: Sequence[str]) -> None:
        self.lines += lines

    def note(self, text: str) -> None:
        self.lines.append(text)

    def update(self, progress: Progress) -> None:
        self.updates.append(progress)
        if len(self.updates) == self.dies_after:
            raise KeyboardInterrupt

    def finish(self, progress: Progress, lines: Sequence[str] = ()) -> None:
        self.updates.append(progress)
        self.lines += lines

    def close(self) -> None:
        pass


def write_rows(path: Path, rows: Mapping[str, Any] | Sequence[str | None]) -> Path:
    """A Parquet file of these columns, or of these prompts."""
    columns = rows if isinstance(rows, Mapping) else {"prompt": pa.array(rows, pa.string())}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path)
    return path


def run(
    paths: Path | Sequence[Path],
    model: Path,
    out: Path,
    keys: Mapping[str, object] | None = None,
    *,
    listener: Listener | None = None,
) -> Summary:
    """Run a job; see `spec_of`."""
    return run_job(spec_of(paths, model, out, keys), reporter=listener or Listener())


def spec_of(
    paths: Path | Sequence[Path], model: Path, out: Path, keys: Mapping[str, object] | None = None
) -> JobSpec:
    """A job in float32; `keys` are its further settings by `section.key`.

    A drafter drafts in every step, whole blocks are verified and nothing is looked up, so that no
    counter depends on how long steps take.
    """
    files = [paths] if isinstance(paths, Path) else paths
    given: dict[str, object] = {
        "input.paths": [str(path) for path in files],
        "model.name": str(model),
        "model.dtype": "float32",
        "output.directory": str(out),
        "prompt.chat_template": False,
        "sampling.max_new_tokens": 8,
        "engine.kv_memory": "4MiB",
        "engine.threads": 1,
        "speculation.lookup": False,
    }
    if any(key.startswith("speculation.drafter") for key in keys or {}):
        given |= {"speculation.when": "always", "speculation.widths": "fixed"}
    return JobSpec.from_sources(flags={**given, **(keys or {})})


def parts(out: Path) -> list[Path]:
    """The part files, in order."""
    return sorted(out.glob("part-*.parquet"))


def read_rows(out: Path, *, without: Sequence[str] = ("timing",)) -> list[dict[str, Any]]:
    """All output rows in order, but for some columns."""
    rows = [row for part in parts(out) for row in pq.read_table(part).to_pylist()]
    return [{name: value for name, value in row.items() if name not in without} for row in rows]


def kinds(out: Path) -> list[str | None]:
    """The kind of each row's error, None where it has none."""
    return [row["error"] and row["error"]["kind"] for row in read_rows(out)]


def completions(out: Path) -> list[str | None]:
    """The texts alone."""
    return [row["completion"] for row in read_rows(out)]
