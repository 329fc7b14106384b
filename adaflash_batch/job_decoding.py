"""The rows of a job: requests to completions to committed parts, until it is to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash_batch import model_files, models
from adaflash_batch.drafter.store import versions_of
from adaflash_batch.errors import AdaflashError
from adaflash_batch.job_facts import job_sampling, load_codec
from adaflash_batch.job_requests import RequestStream
from adaflash_batch.report.live import Progress, Reporter
from adaflash_batch.request import Completion, Request, RowError, RowKey
from adaflash_batch.sampling_defaults import check_token_ids
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.journal_folder import JournalFolder
from adaflash_batch.shards.open_chunks import OpenChunks
from adaflash_batch.shards.output import Output
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.reader import Chunk
from adaflash_batch.shards.run_folder import RunReport
from adaflash_batch.shards.schema import OutputRow
from adaflash_batch.spec import JobSpec
from adaflash_batch.stopping import StopSignal
from adaflash_batch.summary import LearningFigures, RunFigures
from adaflash_batch.text import TextCodec

if TYPE_CHECKING:
    from adaflash_batch.engine.assembly import Assembly, DecoderPlan
    from adaflash_batch.engine.decoder import Decoder
    from adaflash_batch.learning import JobLearning

# Kept of the grace period for journals, parts and the drafter to get to the disk.
_LAST_S = 0.5


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done, and where it goes.

    Attributes:
        spec: the job.
        infos, content: its input files, and the column of prompts.
        model: folder of the model.
        output, journals: take what is finished.
        own_store: folder for versions of the drafter, where the job has no other; None if the
            output is not local.
        version: of the drafter, to go on with; None takes the current one.
        stop: says when to stop.
        report, reporter: hear how it goes.
    """

    spec: JobSpec
    infos: list[ShardInfo]
    content: ContentColumn
    model: Path
    output: Output
    journals: JournalFolder
    own_store: Path | None
    version: int | None
    stop: StopSignal
    report: RunReport
    reporter: Reporter


class RowDecoding:
    """What this process does of a job.

    Attributes:
        figures: what it did.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._spec, self._infos, self._content = work.spec, work.infos, work.content
        self._output, self._reporter, self._stop = work.output, work.reporter, work.stop
        self._sampling = job_sampling(work.spec, work.model)
        self._chunks = OpenChunks(work.spec.output.chunk_rows, self._commit, work.journals)
        self._codec: TextCodec
        self._decoder: Decoder
        self._assembly: Assembly
        self._learning: JobLearning | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._errors_before = work.output.totals.num_errors
        self._longest_step = 0.0
        self._began = 0.0
        self._is_winding_down = False
        self.figures = RunFigures()

    @property
    def is_over_limit(self) -> bool:
        """Whether more rows carry errors than may."""
        limit = self._spec.run.error_limit
        errors = self._errors_before + self.figures.num_errors
        return limit is not None and errors > limit.rows(self._output.num_rows)

    @property
    def open_errors(self) -> Iterator[tuple[Chunk, RowKey, RowError]]:
        """Rows with errors of chunks that are not committed."""
        return self._chunks.errors()

    def decode(self) -> None:
        """Decode every row that no committed part holds, or until it is to stop."""
        self._load()
        self._reporter.start(self._describe())
        self._began = time.monotonic()
        try:
            with self._stop.gently():
                self._decode_all()
        except BaseException:
            with suppress(AdaflashError):  # what went wrong first is what counts
                self._work.journals.close()
            raise
        finally:
            if self._learning is not None:
                self._learning.close()
        self._work.journals.close()
        self._assembly.keep_costs(self._reporter.note)
        self._close()
        self._reporter.finish(self._progress(), [self._last_line()])

    def _decode_all(self) -> None:
        requests = self._requests()
        while not self.is_over_limit and self._goes_on(requests):
            self._step()
            self.figures.decode_s = time.monotonic() - self._began
            self.figures.output_tokens = self._decoder.num_generated
            progress = self._progress()
            self._reporter.update(progress)
            self._tell(progress)

    def _goes_on(self, requests: Iterator[Request]) -> bool:
        """Take in what comes next; whether there is a step to do."""
        if self._stop.at is None:
            return self._refill(requests) or self._decoder.has_work
        if not self._is_winding_down:
            self._wind_down()
        # Two steps: one may take longer than any before it.
        left = self._stop.at + self._spec.run.grace - time.monotonic()
        return self._decoder.has_work and left > 2 * self._longest_step + _LAST_S

    def _wind_down(self) -> None:
        """Take nothing more in and learn no more."""
        self._is_winding_down = True
        self._decoder.drop_waiting()
        self._reporter.note(
            f"stopping after {self._stop.name}: {self._decoder.num_running} requests have "
            f"{self._spec.run.grace:g} s to finish, a second signal stops at once"
        )
        self._work.report.tell(now=True, state="stopping")
        if self._learning is not None:
            self._learning.close()

    def _tell(self, progress: Progress) -> None:
        self._work.report.tell(
            state="stopping" if self._is_winding_down else "decoding",
            rows_done=progress.rows_done,
            resumed_rows=progress.resumed_rows,
            errors=self._errors_before + progress.errors,
            output_tokens=progress.output_tokens,
            tokens_per_s=round(progress.tokens_per_s, 2),
            elapsed_s=round(progress.elapsed_s, 3),
            drafter_version=self._decoder.drafter_version,
        )

    def _step(self) -> None:
        began = time.monotonic()
        completions = self._decoder.step()
        taken = time.monotonic() - began
        self._longest_step = max(self._longest_step, taken)
        for completion in completions:
            self._take(completion)
        if self._learning is not None and not self._is_winding_down:
            rows_left = self._output.num_rows - self._rows_done
            self._learning.after_step(completions, taken, rows_left * self._sampling.n)

    def _close(self) -> None:
        """Fill in the figures that are asked for at the end."""
        figures, decoder, learning = self.figures, self._decoder, self._learning
        figures.decode_s = time.monotonic() - self._began
        figures.num_preemptions = decoder.num_preemptions
        figures.shared_prompt_tokens = decoder.num_shared
        figures.plain_steps = decoder.speculator.num_plain
        figures.calibration = decoder.speculator.figures()
        figures.drafter_version = decoder.drafter_version
        if learning is not None:
            counters = learning.counters
            figures.learning = LearningFigures(
                learning.seconds, counters.updates, counters.published
            )

    def _load(self) -> None:
        # Torch comes with the engine: a job with nothing to do never waits for it.
        from adaflash_batch.engine.assembly import assemble

        self._reporter.note(f"loading {self._spec.model.name}")
        versions = self._versions()
        self._assembly = assemble(self._plan(versions), notify=self._reporter.note)
        self._decoder = self._assembly.decoder
        self._load_codec()
        self._begin_learning(self._assembly, versions)

    def _plan(self, versions: Path | None) -> DecoderPlan:
        from adaflash_batch.engine.assembly import DecoderPlan
        from adaflash_batch.engine.policy import Policy

        spec, speculation, model = self._spec, self._spec.speculation, self._work.model
        drafter, engine = speculation.drafter, spec.engine
        return DecoderPlan(
            folder=model,
            name=spec.model.name,
            dtype=spec.model.dtype,
            trust_remote_code=spec.model.trust_remote_code,
            drafter=None if drafter is None else Path(drafter).expanduser(),
            versions=versions,
            version=self._work.version,
            takes_in=speculation.drafter_store is not None,
            tokenizer_digest=model_files.tokenizer_digest(model),
            policy=Policy(speculation.widths, speculation.width, speculation.when == "pays"),
            looks_up=speculation.lookup,
            costs=models.cache_root() / "step-costs",
            device=engine.device,
            deterministic=engine.deterministic,
            concurrency=engine.concurrency,
            token_budget=engine.token_budget,
            kv_bytes=engine.kv_bytes,
            context=engine.context,
            threads=engine.threads,
            share_prefixes=engine.share_prefixes,
            shares_states=spec.shares_states,
        )

    def _load_codec(self) -> None:
        spec, model, decoder = self._spec, self._work.model, self._decoder
        self._codec = load_codec(spec, model, decoder.context)
        self._codec.check_content(self._content.kind)
        defaults = model_files.generation_defaults(model)
        self._end_ids = self._codec.end_token_ids(defaults, decoder.vocab_size)
        decoder.end_token_ids = self._end_ids
        check_token_ids(self._sampling, decoder.vocab_size)

    def _begin_learning(self, assembly: Assembly, versions: Path | None) -> None:
        if assembly.origin is None or self._spec.adapt.when == "off":
            return
        if versions is None:
            self._reporter.note(
                "the drafter does not learn: its versions need a local folder, name one with "
                "--drafter-store"
            )
            return
        from adaflash_batch.drafter.versions import VersionStore
        from adaflash_batch.learning import JobLearning, learning_plan

        store, plan = VersionStore(versions), learning_plan(self._spec, self._sampling)
        self._learning = JobLearning(assembly, store, plan, self._reporter.note)
        self._learning.keep(self._work.version)

    def _versions(self) -> Path | None:
        """The folder of the versions of this model's drafter."""
        speculation, model = self._spec.speculation, self._work.model
        store = speculation.drafter_store
        if store is None:
            return None if speculation.drafter is None else self._work.own_store
        name = self._spec.model.name
        identity, digest = model_files.model_identity(model), model_files.tokenizer_digest(model)
        return versions_of(Path(store).expanduser(), name, identity, digest)

    def _commit(self, chunk: Chunk, rows: Mapping[RowKey, OutputRow]) -> None:
        version = self._decoder.drafter_version
        self._output.commit(chunk, rows, version)
        if self._learning is not None:
            self._learning.keep(version)

    def _drafter_line(self) -> str:
        speculation, version = self._spec.speculation, self._decoder.drafter_version
        if version is None:
            return "no drafter: plain decoding"
        origin = self._assembly.origin
        if origin is None or origin.version is None:
            return f"drafter {speculation.drafter}"
        return f"drafter version {version} of {speculation.drafter_store or self._work.own_store}"

    def _last_line(self) -> str:
        directory = self._spec.output.directory
        if self._output.num_rows_left == 0:
            return f"output in {directory}"
        done, rows = self._rows_done, self._output.num_rows
        return f"{done} of {rows} rows are finished in {directory}, the same command does the rest"

    def _requests(self) -> Iterator[Request]:
        stream = RequestStream(
            self._spec,
            self._infos,
            self._content,
            sampling=self._sampling,
            codec=self._codec,
            vocab_size=self._decoder.vocab_size,
            chunks=self._chunks,
            figures=self.figures,
            is_done=self._output.is_done,
        )
        return iter(stream)

    def _describe(self) -> list[str]:
        spec, output = self._spec, self._output
        resumed = f", {output.resumed_rows} of them done before" if output.resumed_rows else ""
        files = "1 file" if len(self._infos) == 1 else f"{len(self._infos)} files"
        return [
            f"{output.num_rows} rows in {files}{resumed}, "
            f"prompts from column {self._content.name!r}",
            f"model {spec.model.name} ({self._decoder.describe()})",
            self._drafter_line(),
            f"output goes to {spec.output.directory}",
        ]

    def _refill(self, requests: Iterator[Request]) -> bool:
        """Keep as many waiting as run at once; whether anything was added."""
        added = False
        # Counted beforehand: requests that the decoder refuses never wait, and would all come in.
        room = self._spec.engine.concurrency - self._decoder.num_waiting
        for request in islice(requests, max(room, 0)):
            self._decoder.add(request)
            self.figures.prompt_tokens += len(request.token_ids)
            added = True
        return added

    def _take(self, completion: Completion) -> None:
        self.figures.counts.add(completion.counts)
        sampling = self._chunks.prompt(completion.key).sampling
        text = None
        if completion.error is None:
            ends = frozenset() if sampling.ignore_eos else self._end_ids
            ends = ends.union(sampling.stop_token_ids)
            text = self._codec.decode(completion.token_ids, stop=sampling.stop, end_ids=ends)
        else:
            self.figures.num_errors += 1
        row, version = OutputRow(text, completion), self._decoder.drafter_version
        if self._chunks.put(completion.key, row, version):
            self.figures.num_rows += 1

    @property
    def _resumed_rows(self) -> int:
        return self._output.resumed_rows + self.figures.journaled_rows

    @property
    def _rows_done(self) -> int:
        return self._resumed_rows + self.figures.num_rows

    def _progress(self) -> Progress:
        rows, resumed = self._output.num_rows, self._resumed_rows
        return Progress(
            rows_done=self._rows_done,
            rows_total=rows,
            output_tokens=self.figures.output_tokens,
            prompt_tokens=self.figures.prompt_tokens,
            errors=self.figures.num_errors,
            running=self._decoder.num_running,
            waiting=self._decoder.num_waiting,
            counts=self.figures.counts,
            elapsed_s=self.figures.decode_s,
            resumed_rows=resumed,
            most_output_tokens=(rows - resumed) * self._sampling.n * self._sampling.max_new_tokens,
        )
