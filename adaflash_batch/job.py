"""run_job(): the only wiring. Who may run, what is missing, and what is said at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from adaflash_batch import models
from adaflash_batch.job_decoding import RowDecoding, Work
from adaflash_batch.job_facts import JobInputs, read_inputs, text_facts
from adaflash_batch.job_place import Claimed, Place, claim
from adaflash_batch.report.live import Reporter
from adaflash_batch.shards import fresh
from adaflash_batch.shards.job_folder import FOLDER, SUMMARY
from adaflash_batch.shards.portion import Portion, index_from, one_of, whole_job
from adaflash_batch.shards.rejects import REJECTS, remove_rejects, write_rejects
from adaflash_batch.shards.run_folder import RunFolder, RunReport
from adaflash_batch.shards.writer import prepare_output
from adaflash_batch.spec import JobSpec
from adaflash_batch.stopping import StopSignal
from adaflash_batch.summary import EXIT_INTERRUPTED, Status, Summary, summarise


def run_job(
    spec: JobSpec, *, reporter: Reporter, environment: Mapping[str, str] = os.environ
) -> Summary:
    """Run a job to its end, or what is missing of it, or until it is told to stop.

    Args:
        spec: the job.
        reporter: hears how it goes.
        environment: where an array's index is looked for.

    Raises:
        AdaflashError: the job cannot begin or go on; what is committed stays.
        KeyboardInterrupt: it was told to stop before it decoded, or told twice.
    """
    with StopSignal() as stop, ExitStack() as stack:
        began = time.monotonic()
        inputs = read_inputs(spec)
        portion = _portion(spec, inputs, environment)
        shards = [info.shard for info in inputs.infos]
        place = Place(*prepare_output(spec.output.directory, shards), spec.run.scratch)
        model = models.locate(spec.model.name, revision=spec.model.revision, notify=reporter.note)
        runs = RunFolder(place.runs, spec.output.directory)
        facts = text_facts(spec, inputs, model)
        with runs.door():
            report = stack.enter_context(runs.joined(portion, inputs.infos))
            others = [name for name in runs.living() if name != portion.name]
            claimed = claim(spec, inputs, portion, place, facts, others)
        work = _work(spec, inputs, model, claimed, stop, report, reporter)
        run = RowDecoding(work)
        status = _decode(run, work)
        summary = summarise(
            spec.output.directory, status, run.figures, work.output, time.monotonic() - began
        )
        with runs.door():
            _end(work, claimed, portion, run, summary)
        state = "complete" if status == "nothing_to_do" else status
        report.tell(now=True, state=state, exit_code=summary.exit_code)
        return summary


def _portion(spec: JobSpec, inputs: JobInputs, environment: Mapping[str, str]) -> Portion:
    run, chunk_rows = spec.run, spec.output.chunk_rows
    if run.num_shards is None:
        return whole_job(inputs.infos, chunk_rows)
    index = run.shard_index
    if run.shards_from is not None:
        index = index_from(run.shards_from, run.num_shards, environment)
    assert index is not None
    return one_of(inputs.infos, chunk_rows, index, run.num_shards)


def _work(
    spec: JobSpec,
    inputs: JobInputs,
    model: Path,
    claimed: Claimed,
    stop: StopSignal,
    report: RunReport,
    reporter: Reporter,
) -> Work:
    for note in (*claimed.done.notes, *claimed.journals.notes):
        reporter.note(note)
    return Work(
        spec=spec,
        infos=inputs.infos,
        content=inputs.content,
        model=model,
        output=claimed.output,
        journals=claimed.journals,
        own_store=claimed.own_store,
        version=claimed.version,
        stop=stop,
        report=report,
        reporter=reporter,
    )


def _decode(run: RowDecoding, work: Work) -> Status:
    """Decode what is missing, if anything is; how it ended."""
    output, directory = work.output, work.spec.output.directory
    had_work = output.num_rows_left > 0
    if not had_work:
        work.reporter.note(f"nothing to do: all {output.num_rows} rows are in {directory}")
    elif not run.is_over_limit:
        run.decode()
    if run.is_over_limit:
        work.reporter.note(
            f"stopped: more rows carry errors than --max-errors {work.spec.run.max_errors} allows, "
            f"see {directory}/{FOLDER}/{REJECTS}"
        )
        return "error_limit"
    if output.num_rows_left > 0:
        return "interrupted"
    return "complete" if had_work else "nothing_to_do"


def _end(
    work: Work, claimed: Claimed, portion: Portion, run: RowDecoding, summary: Summary
) -> None:
    """Leave what is for people beside the parts, and let a fresh output take its place."""
    folder, output, is_all = claimed.folder, work.output, portion.name == "all"
    # A run that found nothing to do keeps the figures of the one that did it.
    name = SUMMARY if is_all else f"summary-{portion.name}.json"
    if output.num_parts > 0 or not folder.has_summary(name):
        folder.write_summary(summary.as_dict(), name)
    if summary.exit_code == EXIT_INTERRUPTED:  # whoever stopped it does not wait for this
        return
    filesystem, prefix = claimed.filesystem, work.spec.output.prefix
    if is_all and not output.totals.num_errors and not run.figures.num_errors:
        # Every footer was read, or written, by this run: none need be read again.
        remove_rejects(filesystem, claimed.root)
    else:
        write_rejects(filesystem, claimed.root, work.content.name, prefix, run.open_errors)
    if claimed.is_fresh and output.num_rows_left == 0:
        fresh.mark_whole(filesystem, claimed.path)
        fresh.finish_move(filesystem, claimed.path)
