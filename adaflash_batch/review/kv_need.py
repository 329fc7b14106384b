"""How much KV memory requests take, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass

from adaflash_batch.engine.memory import SHARE, free_memory, kv_tokens, pages_of
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import RowError
from adaflash_batch.review.model_facts import DrafterFacts, ModelFacts
from adaflash_batch.spec import JobSpec


@dataclass(frozen=True, slots=True)
class KvNeed:
    """KV memory as a job would lay it out.

    Attributes:
        bytes_per_token: of model and drafter.
        available: bytes for it: --kv-memory, or the share of free memory that a job takes.
        is_given: whether --kv-memory says so.
        num_tokens: that a job would make room for.
        reserve: positions behind a request that drafts need.
        concurrency: most requests at once.
    """

    bytes_per_token: int
    available: int
    is_given: bool
    num_tokens: int
    reserve: int
    concurrency: int

    def refusal(self, limit: int) -> RowError | None:
        """The error of a request that takes `limit` tokens; None if it fits by itself."""
        num_pages = self.num_tokens // PAGE
        if pages_of(limit + self.reserve) <= num_pages:
            return None
        message = f"prompt and max_new_tokens are {limit} tokens, KV memory holds "
        return RowError("kv_memory_too_small", f"{message}{num_pages * PAGE}")

    def bytes_at(self, limit: int) -> int:
        """That full concurrency takes where every request has `limit` tokens."""
        pages = self.concurrency * pages_of(limit + self.reserve)
        return pages * PAGE * self.bytes_per_token

    def requests_at(self, limit: int) -> int:
        """How many requests of `limit` tokens run at once."""
        return min(self.concurrency, self.num_tokens // PAGE // pages_of(limit + self.reserve))


def kv_need(spec: JobSpec, model: ModelFacts, drafter: DrafterFacts) -> KvNeed:
    """What a job would find. Raises ConfigError where not even a page fits."""
    from adaflash_batch.engine.sizes import reserved_for

    engine = spec.engine
    per_token = model.kv_bytes_per_token + drafter.numbers_per_token * model.item_size
    # A job looks once its weights are in memory.
    free = max(free_memory() - model.weight_bytes, 0)
    available = engine.kv_bytes if engine.kv_bytes is not None else int(free * SHARE)
    return KvNeed(
        bytes_per_token=per_token,
        available=available,
        is_given=engine.kv_bytes is not None,
        num_tokens=kv_tokens(
            available,
            per_token,
            concurrency=engine.concurrency,
            longest=model.context + drafter.block,
            model=model.name,
        ),
        reserve=reserved_for(drafter.block, looks_up=spec.speculation.lookup),
        concurrency=engine.concurrency,
    )
