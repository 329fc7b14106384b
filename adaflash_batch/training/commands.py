"""`adaflash-batch drafter ...`: parse, call, print. torch comes in late."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer

from adaflash_batch.errors import ConfigError
from adaflash_batch.models import DEFAULT_MODEL
from adaflash_batch.spec_sections import parse_bytes
from adaflash_batch.training import version_commands
from adaflash_batch.training.plan import TrainingPlan

EXIT_INTERRUPTED = 75

app = typer.Typer(
    help="Train, look at and measure drafters.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)

_HELP = {
    "model": "The target: a folder or a hub id.",
    "prompts": "Parquet file, directory or glob of prompts.",
    "out": "Folder of the finished drafter; the work lies beside it, in OUT.training.",
    "trajectories": "Folder of decoded texts, to share between trainings.",
    "begin_from": "Folder of a drafter to train on; what it is and is not given here stays.",
    "decode_only": "Decode the texts and stop; OUT is not made.",
    "prompt_column": "Column of prompts as text.",
    "messages_column": "Column of prompts as conversations.",
    "tokens": "Tokens to decode.",
    "rounds": "Decoding and training take turns so often.",
    "steps": "Updates over all rounds, instead of --epochs.",
    "epochs": "Passes over the decoded texts in each round.",
    "batch": "Texts an update.",
    "anchors": "Blocks of each text an update.",
    "block_size": "Rows of a block, the anchor's included.",
    "layers": "Layers of the drafter.",
    "target_layers": "Layers of the target that the drafter reads, like 1,8,15.",
    "features": "How many layers it reads, where they are not named.",
    "member": "dflash, dspark (Markov head) or dflash2 (convolution and selector).",
    "rank": "Of the Markov head or the selector.",
    "confidence_head": "Train DSpark's confidence head too; it changes no draft.",
    "input_projection": "Hand the last state to every row of a block; other engines know none.",
    "length_head": "hazard or adaflash: a head that says how far drafts are worth verifying.",
    "length_head_width": "Of its hidden layers; 0 is the usual: none for hazard, 256 for adaflash.",
    "parameters": "What is trained: all, new (parts that a plain DFlash lacks) or heads alone.",
    "optimiser": "adamw, or muon for the projections and adamw for the rest.",
    "learning_rate": "Peak of the learning rate.",
    "warm_up": "Share of the training in which it rises.",
    "weight_decay": "Of the matrices.",
    "objective": "ce, forward_kl or opd.",
    "gamma": "Decay of the weights of later positions.",
    "draft_vocabulary": "Train on that many of the most frequent tokens; 0 is all.",
    "init_from_target": "Begin with layers of the target.",
    "mask_token": "Id of the token that stands for the unknown.",
    "sampled_share": "Share of the prompts whose texts are sampled.",
    "max_new_tokens": "Of each text.",
    "held_out": "Share of the prompts kept for evaluation, where no column `split` says it.",
    "max_held_out": "Prompts kept for evaluation at the most.",
    "seed": "Decides everything random.",
    "concurrency": "Texts decoded at once.",
    "kv_bytes": "KV memory, like 4GiB.",
    "disk_bytes": "Most that decoded texts take on disk; a training's own oldest ones are dropped.",
    "dtype": "Of the target: auto, float32, bfloat16 or float16.",
    "compute": "float32 or bfloat16, of the drafter's forward and backward.",
    "threads": "CPU threads.",
    "save_every": "Seconds between checkpoints of the training.",
    "evaluate_every": "Updates between looks at the held-out prompts; 0 only at the end.",
}
_FLAGS = {
    **{"learning_rate": "--lr", "kv_bytes": "--kv-memory", "disk_bytes": "--disk"},
    "begin_from": "--from",
}
_AS_TEXT = {"kv_bytes": "SIZE", "disk_bytes": "SIZE", "target_layers": "ID,ID"}


def train(**given: Any) -> None:
    """Train a drafter for a model from nothing but prompts.

    The same command again goes on where it stopped. The last line on stdout is a summary in JSON.
    """
    values = {name: value for name, value in given.items() if value is not None}
    values["prompts"] = tuple(values.get("prompts") or ())
    for name in ("kv_bytes", "disk_bytes"):
        if name in values:
            values[name] = _bytes(_flag(name), values[name])
    if "target_layers" in values:
        values["target_layers"] = _layer_ids(values["target_layers"])
    plan = _plan(values)
    command = shlex.join(["adaflash-batch", *sys.argv[1:]])
    _finish(lambda: _train(plan, command))


def _plan(values: dict[str, Any]) -> TrainingPlan:
    if "begin_from" not in values:
        return TrainingPlan(**values)
    from adaflash_batch.training.beginning import plan_from

    return plan_from(values)


def _train(plan: TrainingPlan, command: str) -> dict[str, object]:
    from adaflash_batch.training.train import train_drafter

    return train_drafter(plan, command=command, notify=_say)


@app.command(name="eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a drafter.")],
    prompts: Annotated[
        list[str], typer.Option(help="Parquet file, directory or glob. May be repeated.")
    ],
    model: Annotated[str, typer.Option(help=_HELP["model"])] = DEFAULT_MODEL,
    prompt_column: Annotated[Optional[str], typer.Option(help=_HELP["prompt_column"])] = None,  # noqa: UP045
    messages_column: Annotated[Optional[str], typer.Option(help=_HELP["messages_column"])] = None,  # noqa: UP045
    max_new_tokens: Annotated[int, typer.Option(help=_HELP["max_new_tokens"])] = 128,
    most_prompts: Annotated[int, typer.Option(help="Prompts of each domain at the most.")] = 40,
    concurrency: Annotated[int, typer.Option(help=_HELP["concurrency"])] = 16,
    dtype: Annotated[str, typer.Option(help=_HELP["dtype"])] = "auto",
    threads: Annotated[Optional[int], typer.Option(help=_HELP["threads"])] = None,  # noqa: UP045
) -> None:
    """Measure a drafter: teacher-forced, and in greedy decoding at full width, by domain.

    The last line on stdout is the figures in JSON.
    """
    if min(max_new_tokens, most_prompts, concurrency) < 1:
        raise ConfigError("--max-new-tokens, --most-prompts and --concurrency must be 1 or more")

    def work() -> dict[str, object]:
        from adaflash_batch.training.evaluation import EvaluationPlan, evaluate_drafter

        plan = EvaluationPlan(
            folder=folder,
            model=model,
            prompts=tuple(prompts),
            prompt_column=prompt_column,
            messages_column=messages_column,
            max_new_tokens=max_new_tokens,
            most_prompts=most_prompts,
            concurrency=concurrency,
            dtype=dtype,
            threads=threads,
        )
        return evaluate_drafter(plan, notify=_say)

    _finish(work)


def _finish(work: Callable[[], dict[str, object]]) -> None:
    try:
        print(json.dumps(work()), flush=True)
    except KeyboardInterrupt:
        _say("error: interrupted\nhint: run the same command again to go on")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _bytes(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}") from None


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--target-layers is {text!r}", "numbers, like 1,8,15") from None


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _train_parameters() -> Iterator[inspect.Parameter]:
    """A flag for every field of TrainingPlan, which alone knows the defaults."""
    hints = get_type_hints(TrainingPlan)
    for field in fields(TrainingPlan):
        kind, flag = _kind(field, hints[field.name]), _flag(field.name)
        if kind is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        option = typer.Option(
            flag, help=_HELP[field.name] + _default(field), metavar=_AS_TEXT.get(field.name)
        )
        is_required = field.name in ("prompts", "out")
        wanted = kind if is_required else Optional[kind]  # noqa: UP045 (kind is a variable)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_required else _usual(field.name),
            annotation=Annotated[wanted, option],
        )


def _usual(name: str) -> object:
    return DEFAULT_MODEL if name == "model" else None


def _kind(field: Field[Any], hint: Any) -> Any:
    if field.name in _AS_TEXT:
        return str
    if field.name == "prompts":
        return list[str]
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is types.UnionType:
        return next(part for part in get_args(hint) if part is not types.NoneType)
    return hint


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is MISSING or value in (None, (), False) or field.name == "disk_bytes":
        return " Default: 8GiB." if field.name == "disk_bytes" else ""
    return f" Default: {value}."


train.__signature__ = inspect.Signature(list(_train_parameters()))  # type: ignore[attr-defined]
app.command(help=" ".join((train.__doc__ or "").split()))(train)
app.command(name="list")(version_commands.list_versions)
app.command()(version_commands.show)
app.command()(version_commands.rollback)
app.command()(version_commands.export)
