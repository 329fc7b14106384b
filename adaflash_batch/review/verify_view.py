"""What verify and its audit found, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from adaflash_batch.review.audit_report import Audit, Redone
from adaflash_batch.review.verify import Verification


def verification_lines(found: Verification) -> Iterator[str]:
    """Problems first, the verdict last."""
    for problem in found.problems:
        yield f"problem: {problem}"
    for gap in found.gaps:
        yield f"missing: {gap}"
    for note in found.notes:
        yield f"note: {note}"
    present = found.rows - found.rows_missing
    with_inputs = (
        "compared with the input files" if found.inputs_compared else "input files left out"
    )
    yield (
        f"{present} of {found.rows} rows in {found.parts} of {found.parts_expected} parts, "
        f"{found.output_rows} output rows, {found.errors} with errors; {with_inputs}"
    )
    if found.problems:
        count = len(found.problems)
        yield f"not sound: {count} problem" + ("" if count == 1 else "s")
    elif found.rows_missing:
        yield f"sound, but {found.rows_missing} rows are missing"
    else:
        yield "sound and complete"


def audit_lines(audit: Audit | None) -> Iterator[str]:
    """What is not the same first, the sums last; nothing where there was no audit."""
    if audit is None:
        return
    for row in audit.differences:
        yield f"difference: {_told(row)}"
    for row in audit.near_ties:
        yield f"near-tie: {_told(row)}"
    yield (
        f"audit: of {audit.num_rows} rows decoded again without speculation, {audit.matches} are "
        f"the same, {len(audit.near_ties)} differ by near-ties, {len(audit.differences)} differ"
    )


def _told(row: Redone) -> str:
    where = f"{row.file}, row {row.row}: {row.reason}"
    return where if row.gap is None else f"{where} (gap {row.gap:.2g})"
