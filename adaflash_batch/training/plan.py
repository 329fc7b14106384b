"""TrainingPlan: what a person asks of `drafter train`. Light to import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from adaflash_batch.errors import ConfigError

MEMBERS = ("dflash", "dspark", "dflash2")
OBJECTIVES = ("ce", "forward_kl", "opd")
OPTIMISERS = ("adamw", "muon")
LENGTH_HEADS = ("hazard", "adaflash")
PARAMETERS = ("all", "new", "heads")

# These change nothing about the weights.
_SPEED = (
    *("out", "trajectories", "decode_only", "threads", "save_every", "evaluate_every"),
    "kv_bytes",
)
# These decide the stored texts, with the prompts and the model; more --tokens only add to them.
# What decides how they are stored, the store itself remembers (claims.StoreSettings).
_STORED = (
    *("prompt_column", "messages_column", "sampled_share", "max_new_tokens"),
    *("held_out", "max_held_out", "seed", "dtype"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A training of a drafter. Raises ConfigError for values out of range.

    Attributes:
        model: folder or hub id of the target.
        prompts: Parquet files, directories or globs.
        out: folder of the finished checkpoint; the work lies beside it.
        trajectories: folder of decoded trajectories, shared between trainings, which drops none;
            None: with the work, where `disk_bytes` may drop the oldest.
        begin_from: folder of a drafter whose weights and draft vocabulary are the first ones. The
            fields of its shape must be its own (see beginning.plan_from), but that a DFlash drafter
            may become "dflash2". None begins from nothing.
        decode_only: fill that folder and stop, for trainings that follow.
        tokens: how many to decode, over all rounds.
        rounds: decoding and training take turns so often.
        steps: updates over all rounds; None takes `epochs`.
        epochs: passes over the stored trajectories in each round.
        batch: trajectories an update.
        anchors: blocks sampled from each of them.
        block_size: rows of a block, the anchor's included.
        layers: of the drafter.
        target_layers: tapped layers of the target; () spreads `features` of them.
        features: number of tapped layers where they are not named.
        member: one of MEMBERS.
        rank: of DSpark's Markov head or DFlash 2's selector.
        confidence_head: train DSpark's guess at whether a draft is accepted too.
        input_projection: give every row of a block the last state and the anchor; no published
            layout has it.
        length_head: one of LENGTH_HEADS, "" for none; a drafter that has none may grow one.
        length_head_width: of its hidden layers; 0 takes the usual one of its kind.
        parameters: one of PARAMETERS, what is trained; see adapt/parameters.py.
        optimiser: one of OPTIMISERS.
        objective: one of OBJECTIVES.
        gamma: decay of the position weights.
        draft_vocabulary: train on this many of the most frequent tokens; 0 on all.
        init_from_target: begin with layers of the target.
        mask_token: id of the token that stands for the unknown; None takes a special one.
        sampled_share: share of the prompts whose text is sampled; the rest is greedy.
        held_out: share of the prompts kept for evaluation, where no column `split` says it.
        max_held_out: prompts evaluated at the most.
        disk_bytes: most that stored trajectories take.
        dtype: of the target, as `run --dtype`.
        compute: `float32` or `bfloat16`, of forward and backward; master weights are float32.
        save_every: seconds between checkpoints of the training.
        evaluate_every: updates between looks at the held-out prompts; 0 looks only at the end.
    """

    model: str
    prompts: tuple[str, ...]
    out: Path
    trajectories: Path | None = None
    begin_from: Path | None = None
    decode_only: bool = False
    prompt_column: str | None = None
    messages_column: str | None = None
    tokens: int = 1_000_000
    rounds: int = 1
    steps: int | None = None
    epochs: float = 4.0
    batch: int = 8
    anchors: int = 64
    block_size: int = 8
    layers: int = 2
    target_layers: tuple[int, ...] = ()
    features: int = 5
    member: str = "dflash"
    rank: int = 64
    confidence_head: bool = False
    input_projection: bool = False
    length_head: str = ""
    length_head_width: int = 0
    parameters: str = "all"
    optimiser: str = "adamw"
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    weight_decay: float = 0.01
    objective: str = "ce"
    gamma: float = 4.0
    draft_vocabulary: int = 0
    init_from_target: bool = False
    mask_token: int | None = None
    sampled_share: float = 0.3
    max_new_tokens: int = 256
    held_out: float = 0.05
    max_held_out: int = 200
    seed: int = 0
    concurrency: int = 64
    kv_bytes: int | None = None
    disk_bytes: int = 8 * 2**30
    dtype: str = "auto"
    compute: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = None
    save_every: float = 60.0
    evaluate_every: int = 200

    def __post_init__(self) -> None:
        for option, is_right, wanted in self._rules():
            if not is_right:
                value = getattr(self, option.removeprefix("--").replace("-", "_"), None)
                raise ConfigError(f"{option} is {value!r}, it must be {wanted}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        for name in ("tokens", "rounds", "batch", "anchors", "layers", "features", "rank"):
            yield f"--{name}", getattr(self, name) >= 1, "1 or more"
        for name in ("max_new_tokens", "concurrency", "max_held_out"):
            yield f"--{name.replace('_', '-')}", getattr(self, name) >= 1, "1 or more"
        yield "--steps", self.steps is None or self.steps >= self.rounds, "at least --rounds"
        yield "--epochs", self.epochs > 0, "above 0"
        yield "--member", self.member in MEMBERS, f"one of {', '.join(MEMBERS)}"
        is_dspark = self.member == "dspark"
        yield "--confidence-head", is_dspark or not self.confidence_head, "off but for dspark"
        heads = ", ".join(LENGTH_HEADS)
        yield "--length-head", self.length_head in ("", *LENGTH_HEADS), f"one of {heads}"
        yield "--length-head-width", self.length_head_width >= 0, "0 (the usual) or more"
        has_head = bool(self.length_head) or not self.length_head_width
        yield "--length-head-width", has_head, "0 without --length-head"
        yield "--parameters", self.parameters in PARAMETERS, f"one of {', '.join(PARAMETERS)}"
        yield "--optimiser", self.optimiser in OPTIMISERS, f"one of {', '.join(OPTIMISERS)}"
        yield "--objective", self.objective in OBJECTIVES, f"one of {', '.join(OBJECTIVES)}"
        yield "--block-size", self.block_size >= 2, "2 or more"
        yield "--gamma", self.gamma > 0, "above 0"
        yield "--learning-rate", self.learning_rate > 0, "above 0"
        yield "--warm-up", 0 <= self.warm_up < 1, "at least 0 and below 1"
        yield "--sampled-share", 0 <= self.sampled_share <= 1, "between 0 and 1"
        yield "--held-out", 0 <= self.held_out < 1, "at least 0 and below 1"
        yield "--draft-vocabulary", self.draft_vocabulary >= 0, "0 (all tokens) or more"
        is_new = self.begin_from is None
        yield "--init-from-target", is_new or not self.init_from_target, "off with --from"
        yield "--compute", self.compute in ("float32", "bfloat16"), "float32 or bfloat16"

    @property
    def work(self) -> Path:
        """Where everything unfinished lies."""
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def store(self) -> Path:
        """Where trajectories lie."""
        return self.trajectories or self.work / "trajectories"

    @property
    def may_drop(self) -> bool:
        """Whether a full disk drops the oldest texts: not those that another run is to read."""
        return self.trajectories is None and not self.decode_only

    def facts(self) -> dict[str, object]:
        """What decides the weights, by option, for the resuming of a training.

        The bound of the disk does where it may drop texts, and nowhere else.
        """
        facts = {
            field.name: _plain(getattr(self, field.name))
            for field in fields(self)
            if field.name not in _SPEED
        }
        return facts | {"disk_bytes": self.disk_bytes if self.may_drop else None}

    def stored_facts(self) -> dict[str, object]:
        """What decides the texts, and must be equal where trainings share them.

        Prompts' columns, seed, `sampled_share` and `max_new_tokens` decide them one by one, `dtype`
        their rounding. `held_out` decides which are trained on, and `max_held_out` which ones the
        results are of: they are decoded once, before all others.
        """
        return {name: _plain(getattr(self, name)) for name in _STORED}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
