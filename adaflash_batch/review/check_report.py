"""What a check found, and what a script makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from adaflash_batch.review.damage import Damage
from adaflash_batch.review.disk_need import DiskNeed
from adaflash_batch.review.findings import Finding, Findings
from adaflash_batch.review.kv_need import KvNeed
from adaflash_batch.review.lengths import Work
from adaflash_batch.review.model_facts import ModelFacts
from adaflash_batch.review.previous import Previous
from adaflash_batch.review.time_need import TimeNeed
from adaflash_batch.shards.columns import ContentColumn

_SHARES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
# Worst first, in the order in which a run would end by them.
_STATUSES = (("refused", 2), ("unreadable", 5), ("error_limit", 4), ("row_errors", 3), ("ok", 0))


@dataclass(frozen=True, slots=True)
class IdReport:
    """Rows that the id column does not identify.

    Attributes:
        unread: why not all ids were read; None where they were.
    """

    column: str
    found: Findings
    unread: str | None = None

    def to_json(self) -> dict[str, object]:
        """Findings by kind."""
        return {"column": self.column, **self.found.to_json(), "unread_because": self.unread}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All of it.

    Attributes:
        error_limit: rows that may carry errors; None where there is no limit.
        num_unread: rows that damage or its neighbours kept from being looked at.
        num_repeated_prompts: rows whose prompt an earlier row has, too.
        special: rows whose own text spells a special token.
        truncated: rows whose prompt is cut to fit, by so many tokens together.
        work, left: what all rows ask for, and those that are not done.
        sample: the first prompt as it is tokenised.
    """

    num_files: int
    num_rows: int
    content: ContentColumn
    errors: Findings
    error_limit: int | None
    ids: IdReport | None
    damage: list[Damage]
    num_unread: int
    num_repeated_prompts: int
    special: Finding
    special_policy: str
    truncated: Finding
    truncated_tokens: int
    work: Work
    left: Work
    uses_template: bool
    sample: str | None
    model: ModelFacts
    kv: KvNeed
    time: TimeNeed
    disk: DiskNeed
    previous: Previous

    @property
    def refusals(self) -> list[str]:
        """Why a run would not begin, a line each."""
        lines = list(self.previous.refusals)
        if self.ids is not None:
            for kind, finding in self.ids.found.kinds.items():
                what = "are null" if kind == "null_id" else "occurred before"
                lines.append(
                    f"column {self.ids.column!r} identifies no rows: {finding.rows} ids {what}"
                )
        return lines

    @property
    def status(self) -> str:
        """`refused`, `unreadable`, `error_limit`, `row_errors` or `ok`."""
        limit = self.error_limit
        holds = {
            "refused": bool(self.refusals),
            "unreadable": bool(self.damage),
            "error_limit": limit is not None and self.errors.rows > limit,
            "row_errors": self.errors.rows > 0,
            "ok": True,
        }
        return next(status for status, _ in _STATUSES if holds[status])

    @property
    def exit_code(self) -> int:
        """That of the run which this is about, as far as can be told."""
        return dict(_STATUSES)[self.status]

    @property
    def warnings(self) -> list[str]:
        """What may slow a run down or end it."""
        found = []
        if not self.disk.fits:
            found.append("the output may not fit on its disk")
        longest = self.left.limits.at(1.0)
        if self.left.requests and self.kv.requests_at(longest) < self.kv.concurrency:
            found.append(
                f"KV memory holds {self.kv.requests_at(longest)} of the longest requests at once, "
                f"not {self.kv.concurrency}: some will wait"
            )
        return found

    def to_json(self) -> dict[str, object]:
        """Everything, as JSON values."""
        return {
            "status": self.status,
            "exit_code": self.exit_code,
            "refusals": self.refusals,
            "warnings": self.warnings,
            "files": self.num_files,
            "rows": self.num_rows,
            "content": {"column": self.content.name, "kind": self.content.kind},
            **self._rows(),
            **self._tokens(),
            **self._needs(),
        }

    def _rows(self) -> dict[str, object]:
        return {
            "errors": {
                "rows": self.errors.rows,
                "limit": self.error_limit,
                "kinds": self.errors.to_json(),
            },
            "ids": None if self.ids is None else self.ids.to_json(),
            "unreadable": [damage.to_json() for damage in self.damage],
            "rows_not_read": self.num_unread,
            "repeated_prompts": self.num_repeated_prompts,
            "special_token_text": {"policy": self.special_policy, **self.special.to_json()},
            "truncated": {"tokens": self.truncated_tokens, **self.truncated.to_json()},
        }

    def _tokens(self) -> dict[str, object]:
        bars = self.work.prompts.bars()
        return {
            "tokens": {
                "prompt": self.work.prompts.to_json(),
                "prompt_histogram": [
                    {"from": bar.first, "to": bar.last, "rows": bar.count} for bar in bars
                ],
                "requests": self.work.requests,
                "completion_at_most": self.work.completion_tokens,
            },
            "prompting": {"chat_template": self.uses_template, "first_prompt": self.sample},
        }

    def _needs(self) -> dict[str, object]:
        model = self.model
        return {
            "model": {
                "name": model.name,
                "context": model.context,
                "made_for": model.made_for,
                "vocab_size": model.vocab_size,
                "dtype": model.dtype,
            },
            "kv_memory": self._kv_memory(),
            "left": {
                "requests": self.left.requests,
                "prompt_tokens": self.left.prompt_tokens,
                "completion_tokens_at_most": self.left.completion_tokens,
            },
            "time": self.time.to_json(),
            "disk": self.disk.to_json(),
            "output": self.previous.to_json(),
        }

    def _kv_memory(self) -> dict[str, object]:
        kv = self.kv
        return {
            "bytes_per_token": kv.bytes_per_token,
            "available_bytes": kv.available,
            "given": kv.is_given,
            "tokens": kv.num_tokens,
            "concurrency": kv.concurrency,
            "at_lengths": {name: self.kv_at(share) for name, share in _SHARES},
        }

    def kv_at(self, share: float) -> dict[str, int]:
        """KV memory where all requests are as long as this share of them is at the most."""
        limit = self.work.limits.at(share)
        return {
            "tokens": limit,
            "bytes": self.kv.bytes_at(limit),
            "requests_at_once": self.kv.requests_at(limit),
        }
