"""A decoder from a model folder, a drafter folder and a few numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash_batch.drafter.checkpoint import TargetFacts
from adaflash_batch.drafter.checkpoint import load as load_drafter
from adaflash_batch.drafter.length import ADAFLASH
from adaflash_batch.drafter.model import DFlash
from adaflash_batch.drafter.versions import VersionStore
from adaflash_batch.drafter.vocabulary import load_vocabulary
from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import BlockDrafter, Drafter
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.memory import kv_budget, kv_tokens, longest_context
from adaflash_batch.engine.policy import WHOLE_BLOCKS, Policy
from adaflash_batch.engine.profile import about
from adaflash_batch.engine.target import Target
from adaflash_batch.errors import ConfigError

_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Tokens of finished texts that drafts are looked up in; each takes 100 to 170 bytes.
_LOOKUP_TOKENS = 500_000


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """What a decoder is built from.

    Attributes:
        folder: of the model.
        name: what the user calls the model.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU that can be used, else the CPU), `cpu` or `cuda`.
        deterministic: on a GPU, whether no text depends on the batch, not even by rounding.
        drafter: folder of a DFlash checkpoint, None for plain decoding.
        versions: folder of a drafter's versions (drafter/versions.py), there or not. The current
            one drafts, or else `drafter`.
        version: the one of them that is to draft in place of the current one.
        takes_in: whether `drafter` becomes the first version at once where there is none.
        tokenizer_digest: of the target's tokenizer, compared with the drafter's.
        policy: which drafts are verified.
        looks_up: whether drafts are looked up in texts, too.
        costs: folder of what steps were found to take here; None measures and keeps nothing.
        concurrency: most requests at once.
        token_budget: most tokens a step.
        kv_bytes: KV memory; None takes a share of what is free.
        context: longest prompt and completion together; None takes the model's.
        threads: CPU threads; None leaves PyTorch's choice.
        share_prefixes: whether requests that begin alike compute that once.
        shares_states: whether pages that they share need memory for the states that the drafter
            reads, too: where these are kept of requests (`Decoder.capture`).
    """

    folder: Path
    name: str
    dtype: str = "auto"
    device: str = "auto"
    deterministic: bool = False
    trust_remote_code: bool = False
    drafter: Path | None = None
    versions: Path | None = None
    version: int | None = None
    takes_in: bool = True
    tokenizer_digest: str | None = None
    policy: Policy = WHOLE_BLOCKS
    looks_up: bool = False
    costs: Path | None = None
    concurrency: int = 64
    token_budget: int = 1024
    kv_bytes: int | None = None
    context: int | None = None
    threads: int | None = None
    share_prefixes: bool = True
    shares_states: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """The drafter that a decoder begins with.

    Attributes:
        folder: of its checkpoint.
        version: its number among the versions; None where it is none of them.
    """

    folder: Path
    version: int | None


@dataclass(frozen=True, slots=True)
class Assembly:
    """A decoder, and what is known of its making.

    Attributes:
        origin: of its drafter, None without one.
        facts: of its target, for other drafters.
        costs: the file that keeps what its steps take; None where none does.
    """

    decoder: Decoder
    origin: Origin | None
    facts: TargetFacts
    costs: Path | None = None

    def keep_costs(self, notify: Callable[[str], None]) -> None:
        """Save what steps were found to take, for the next decoder of this kind."""
        if self.costs is None:
            return
        try:
            self.decoder.cost.save(self.costs)
        except OSError as error:
            notify(f"what steps take here could not be kept in {self.costs}: {error.strerror}")


def build_decoder(plan: DecoderPlan, *, notify: Callable[[str], None]) -> Decoder:
    """The decoder of `assemble` alone."""
    return assemble(plan, notify=notify).decoder


def assemble(plan: DecoderPlan, *, notify: Callable[[str], None]) -> Assembly:
    """Load the target and the drafter and size KV memory.

    Raises:
        ConfigError: one of them cannot run, or they do not fit each other or the memory.
    """
    target = _load_target(plan, notify)
    facts = _facts(target, plan.tokenizer_digest)
    origin = _choose(plan, facts, notify)
    net = None if origin is None else load_net(origin.folder, target, plan.tokenizer_digest)
    _check_widths(plan, net)
    cost = StepCost(about(target, "" if net is None else str(net.config)))
    decoder = Decoder(
        target,
        drafter=None if origin is None or net is None else _drafter(origin, net, target),
        lookup=Lookup(max_tokens=_LOOKUP_TOKENS) if plan.looks_up else None,
        policy=plan.policy,
        cost=cost,
        max_running=plan.concurrency,
        token_budget=max(plan.token_budget, 2),
        kv_tokens=_kv_tokens(plan, target, net),
        context=_context(plan, target),
        share_prefixes=plan.share_prefixes,
    )
    decoder.tell_of_trouble(notify)
    return Assembly(decoder, origin, facts, _learn_costs(plan, decoder, notify))


def _load_target(plan: DecoderPlan, notify: Callable[[str], None]) -> Target:
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    with _no_progress_bars():
        target = Target.load(
            plan.folder,
            plan.name,
            dtype=_DTYPES[plan.dtype],
            trust_remote_code=plan.trust_remote_code,
            device=_device(plan.device),
            deterministic=plan.deterministic,
        )
    slow = target.attention_note()
    if slow is not None:
        notify(f"attention runs in its slow form: {slow}")
    return target


def _device(wanted: str) -> torch.device:
    """Raises ConfigError where there is no such device."""
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError(
            "a GPU is asked for, and PyTorch finds none that it can use",
            "--device cpu runs without one",
        )
    return torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")


def _check_widths(plan: DecoderPlan, net: DFlash | None) -> None:
    if plan.policy.widths == "adaflash" and (net is None or net.config.length_head != ADAFLASH):
        raise ConfigError(
            "widths by AdaFlash need a drafter with its scalar head",
            "train one: adaflash-batch drafter train --from DRAFTER --length-head adaflash "
            "--parameters heads, or leave --widths",
        )


def _learn_costs(plan: DecoderPlan, decoder: Decoder, notify: Callable[[str], None]) -> Path | None:
    """Let the decoder know what its steps take; the file that will keep it."""
    if plan.costs is None or decoder.speculator.most == 0:
        return None
    path = plan.costs / f"{hashlib.sha256(decoder.cost.about.encode()).hexdigest()[:16]}.json"
    if path.exists():
        damage = decoder.cost.load(path)
        if damage is not None:
            notify(f"{path} is not used: {damage}")
    if not decoder.cost.is_known:
        notify("measuring what steps take on this machine, once for this model")
    decoder.profile()
    return path


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws one while it loads, on the stream where our own progress goes."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _choose(plan: DecoderPlan, facts: TargetFacts, notify: Callable[[str], None]) -> Origin | None:
    """The drafter to load, None for plain decoding."""
    own = None if plan.drafter is None else Origin(plan.drafter, None)
    if plan.versions is None:
        return own
    store = VersionStore(plan.versions)
    number = _number(store, plan.version, notify)
    if number is None and own is not None:
        if not plan.takes_in:
            return own
        number = store.import_checkpoint(own.folder, facts)
        notify(f"drafter {own.folder} is now version {number} in {store.folder}")
    elif number is not None and own is not None and plan.takes_in:
        notify(
            f"version {number} in {store.folder} drafts, not {own.folder}: "
            "a drafter is only taken into a store that has none for the model"
        )
    if number is None:
        notify(f"{store.folder} has no drafter yet")
        return None
    return Origin(store.path(number), number)


def _number(store: VersionStore, wanted: int | None, notify: Callable[[str], None]) -> int | None:
    """The version that is wanted or else the current one; None where there is none."""
    current = store.current()
    if wanted is None or current is None:
        return current
    if wanted in store.numbers():
        return wanted
    notify(
        f"{store.folder} has no version {wanted} any more, version {current} drafts in its place"
    )
    return current


def _facts(target: Target, tokenizer_digest: str | None) -> TargetFacts:
    return TargetFacts(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=target.num_layers,
        name=target.name,
        tokenizer_digest=tokenizer_digest,
    )


def load_net(folder: Path, target: Target, tokenizer_digest: str | None = None) -> DFlash:
    """A drafter for inference, in the target's precision. Raises ConfigError if it does not fit."""
    net = load_drafter(folder, _facts(target, tokenizer_digest), dtype=target.dtype)
    net.to(target.device).eval().requires_grad_(False)
    net.fuse()  # last: what moves weights leaves the fused ones behind
    return net


def _drafter(origin: Origin, net: DFlash, target: Target) -> Callable[[int], Drafter]:
    tokens = load_vocabulary(origin.folder, net.config)
    return lambda num_pages: BlockDrafter(net, target, num_pages, origin.version or 0, tokens)


def _kv_tokens(plan: DecoderPlan, target: Target, net: DFlash | None) -> int:
    drafted = 0
    if net is not None:
        drafted = BlockDrafter.bytes_per_token(net, keeps_states=plan.shares_states)
    block = 0 if net is None else net.config.num_drafts + 1
    return kv_tokens(
        plan.kv_bytes if plan.kv_bytes is not None else kv_budget(target.device),
        target.bytes_per_token + drafted,
        concurrency=plan.concurrency,
        longest=_context(plan, target) + block,
        model=plan.name,
    )


def _context(plan: DecoderPlan, target: Target) -> int:
    return longest_context(plan.context, target.context, plan.name)
