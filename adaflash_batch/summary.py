"""What a job says of itself when it ends: the last line on stdout, and summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from adaflash_batch.shards.output import Output
from adaflash_batch.stats import SpeculationCounts

Status = Literal["complete", "nothing_to_do", "interrupted", "error_limit"]

EXIT_ROW_ERRORS = 3
EXIT_ERROR_LIMIT = 4
EXIT_INTERRUPTED = 75
_EXIT_CODES = {"interrupted": EXIT_INTERRUPTED, "error_limit": EXIT_ERROR_LIMIT}


@dataclass(frozen=True, slots=True)
class Summary:
    """How a job ended.

    Attributes:
        exit_code: 0, 3 when rows carry errors, 4 when too many do, 75 when it was interrupted.
        fields: what the last line on stdout and summary.json say.
    """

    exit_code: int
    fields: dict[str, object]

    def as_dict(self) -> dict[str, object]:
        """The fields, flat."""
        return dict(self.fields)


@dataclass(slots=True)
class LearningFigures:
    """What learning came to in this run.

    Attributes:
        seconds: that it took, of `decode_s` or beside it.
        updates, published: see TrainerCounters.
    """

    seconds: float = 0.0
    updates: int = 0
    published: int = 0


@dataclass(slots=True)
class RunFigures:
    """What this process did of a job.

    Attributes:
        decode_s: seconds from the first request to the last row, learning included.
        prompt_tokens: of the requests that it took in.
        output_tokens: that it generated.
        num_rows: input rows that it finished, with or without an error.
        num_errors: rows that it ended with an error.
        journaled_rows: input rows that an earlier run finished and journals still held.
        num_preemptions: of requests.
        shared_prompt_tokens: of `prompt_tokens`, those that were not computed since another
            request's were the same.
        calibration: of predicted survival, by source of drafts.
        plain_steps: steps that drafted nothing since it did not pay.
        drafter_version: that drafted last, None without a drafter.
    """

    decode_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_rows: int = 0
    num_errors: int = 0
    journaled_rows: int = 0
    num_preemptions: int = 0
    shared_prompt_tokens: int = 0
    plain_steps: int = 0
    calibration: Mapping[str, object] = field(default_factory=dict)
    drafter_version: int | None = None
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    learning: LearningFigures = field(default_factory=LearningFigures)


def summarise(
    directory: str, status: Status, run: RunFigures, output: Output, wall_s: float
) -> Summary:
    """The summary of a run that came to its end.

    Args:
        directory: of the output, as the user named it.
        status: how it ended.
        run: what this process did.
        output: what is committed, by earlier runs too.
        wall_s: seconds of this run.
    """
    totals, counts = output.totals, run.counts
    speed = run.output_tokens / run.decode_s if run.decode_s > 0 else None
    finished = output.resumed_rows + run.journaled_rows + run.num_rows
    code = _EXIT_CODES.get(status, EXIT_ROW_ERRORS if totals.num_errors else 0)
    fields: dict[str, object] = {
        "status": status,
        "exit_code": code,
        "rows": totals.num_rows,
        "missing_rows": output.num_rows_left,
        # Finished, while their chunks are not whole: kept in journals, or errors that show again.
        "open_rows": finished - totals.num_rows,
        "resumed_rows": output.resumed_rows + run.journaled_rows,
        "output_rows": totals.num_output_rows,
        "errors": max(totals.num_errors, run.num_errors),
        "completion_tokens": totals.completion_tokens,
        "truncated_tokens": totals.truncated_tokens,
        "output_tokens": run.output_tokens,
        "prompt_tokens": run.prompt_tokens,
        "shared_prompt_tokens": run.shared_prompt_tokens,
        "shared_prompt_share": _share(run.shared_prompt_tokens, run.prompt_tokens),
        "elapsed_s": round(run.decode_s, 3),
        "setup_s": round(wall_s - run.decode_s, 3),
        "tokens_per_s": None if speed is None else round(speed, 2),
        # Plain decoding emits one token a step, which says nothing.
        "emitted_per_step": _rounded(counts.emitted_per_step) if counts.drafted else None,
        "emitted_per_drafting_step": _rounded(counts.emitted_per_drafting_step),
        "acceptance_rate": _rounded(counts.acceptance_rate),
        "emitted_per_block_step": _rounded(counts.emitted_per_block_step),
        "emitted_per_lookup_step": _rounded(counts.emitted_per_lookup_step),
        "lookup_steps": counts.lookup_steps,
        "plain_steps": run.plain_steps,
        "drafter_version": run.drafter_version,
        **_learning(run.learning),
        "calibration": dict(run.calibration),
        "preemptions": run.num_preemptions,
        "parts_written": output.num_parts,
        "output": directory,
    }
    return Summary(code, fields)


def _learning(learning: LearningFigures) -> Mapping[str, object]:
    return {
        "learning_s": round(learning.seconds, 3),
        "updates": learning.updates,
        "versions_published": learning.published,
    }


def _share(part: int, whole: int) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
