"""run_job(): the only wiring. Input rows to requests, completions to committed parts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash_batch import model_files, models
from adaflash_batch.drafter.store import versions_of
from adaflash_batch.errors import ConfigError
from adaflash_batch.job_facts import read_inputs, text_facts
from adaflash_batch.report.live import Progress, Reporter
from adaflash_batch.request import Completion, Prompt, Request, RowError, RowKey
from adaflash_batch.sampling_defaults import check_token_ids, default_sampling
from adaflash_batch.shards.columns import ContentColumn
from adaflash_batch.shards.job_folder import FOLDER, JobFolder
from adaflash_batch.shards.locations import is_local
from adaflash_batch.shards.open_chunks import OpenChunks
from adaflash_batch.shards.output import Output
from adaflash_batch.shards.parquet import ShardInfo
from adaflash_batch.shards.reader import Chunk, read_chunks
from adaflash_batch.shards.recovery import committed
from adaflash_batch.shards.schema import OutputRow
from adaflash_batch.shards.writer import prepare_output
from adaflash_batch.spec import JobSpec
from adaflash_batch.summary import LearningFigures, RunFigures, Summary, summarise
from adaflash_batch.text import Encoded, TextCodec

if TYPE_CHECKING:
    from adaflash_batch.engine.assembly import Assembly
    from adaflash_batch.engine.decoder import Decoder
    from adaflash_batch.learning import JobLearning

# Prompts are tokenised in slices this long, so that the first step waits for one slice only.
_ENCODED_AT_ONCE = 64


def run_job(spec: JobSpec, *, reporter: Reporter) -> Summary:
    """Run a job to its end, or what is missing of it.

    Raises:
        AdaflashError: the job cannot begin or go on; what is committed stays.
    """
    began = time.monotonic()
    inputs = read_inputs(spec)
    infos = inputs.infos
    filesystem, path = prepare_output(spec.output.directory, [info.shard for info in infos])
    folder = JobFolder(filesystem, path)
    model = models.locate(spec.model.name, revision=spec.model.revision, notify=reporter.note)
    fingerprint = folder.claim(text_facts(spec, inputs, model), spec.to_json())
    done = committed(path, fingerprint, infos, spec.output.chunk_rows, filesystem)
    for note in done.notes:
        reporter.note(note)
    output = Output(
        filesystem,
        path,
        prefix=spec.output.prefix,
        infos=infos,
        fingerprint=fingerprint,
        done=done,
    )
    own_store = Path(path) / FOLDER / "drafter" if is_local(filesystem) else None
    run = _Run(
        spec, infos, inputs.content, model, output, reporter, own_store, done.drafter_version
    )
    if output.num_rows_left > 0:
        run.decode()
    else:
        reporter.note(f"nothing to do: all {output.num_rows} rows are in {spec.output.directory}")
    wall_s = time.monotonic() - began
    summary = summarise(spec.output.directory, run.figures, output, wall_s)
    # A run that found nothing to do keeps the figures of the one that did it.
    if output.num_parts > 0 or not folder.has_summary():
        folder.write_summary(summary.as_dict())
    return summary


class _Run:
    """What this process does of a job."""

    def __init__(
        self,
        spec: JobSpec,
        infos: list[ShardInfo],
        content: ContentColumn,
        model: Path,
        output: Output,
        reporter: Reporter,
        own_store: Path | None,
        committed_version: int | None,
    ) -> None:
        self._spec = spec
        self._infos = infos
        self._content = content
        self._model = model
        self._output = output
        self._reporter = reporter
        self._own_store = own_store
        self._committed_version = committed_version
        self._defaults = model_files.generation_defaults(model)
        self._sampling = spec.sampling.over(default_sampling(self._defaults))
        self._chunks = OpenChunks(spec.output.chunk_rows, self._commit)
        self._codec: TextCodec
        self._decoder: Decoder
        self._assembly: Assembly
        self._learning: JobLearning | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._rows_done = output.resumed_rows
        self._began = 0.0
        self.figures = RunFigures()

    def decode(self) -> None:
        """Decode every row that no committed part holds."""
        self._load()
        requests = self._requests()
        self._reporter.start(self._describe())
        self._began = time.monotonic()
        try:
            while self._refill(requests) or self._decoder.has_work:
                self._step()
                self.figures.decode_s = time.monotonic() - self._began
                self.figures.output_tokens = self._decoder.num_generated
                self._reporter.update(self._progress())
        finally:
            if self._learning is not None:
                self._learning.close()
        self._assembly.keep_costs(self._reporter.note)
        self._close()
        self._reporter.finish(self._progress(), [f"output in {self._spec.output.directory}"])

    def _step(self) -> None:
        began = time.monotonic()
        completions = self._decoder.step()
        taken = time.monotonic() - began
        for completion in completions:
            self._take(completion)
        if self._learning is not None:
            rows_left = self._output.num_rows - self._rows_done
            self._learning.after_step(completions, taken, rows_left * self._sampling.n)

    def _close(self) -> None:
        """Fill in the figures that are asked for at the end."""
        figures, decoder, learning = self.figures, self._decoder, self._learning
        figures.decode_s = time.monotonic() - self._began
        figures.num_preemptions = decoder.num_preemptions
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
        from adaflash_batch.engine.assembly import DecoderPlan, assemble
        from adaflash_batch.engine.policy import Policy

        spec, speculation, model = self._spec, self._spec.speculation, self._model
        self._reporter.note(f"loading {spec.model.name}")
        drafter, versions, engine = speculation.drafter, self._versions(), spec.engine
        plan = DecoderPlan(
            folder=model,
            name=spec.model.name,
            dtype=spec.model.dtype,
            trust_remote_code=spec.model.trust_remote_code,
            drafter=None if drafter is None else Path(drafter).expanduser(),
            versions=versions,
            version=self._committed_version,
            takes_in=speculation.drafter_store is not None,
            tokenizer_digest=model_files.tokenizer_digest(model),
            policy=Policy(speculation.widths, speculation.width, speculation.when == "pays"),
            looks_up=speculation.lookup,
            costs=models.cache_root() / "step-costs",
            concurrency=engine.concurrency,
            token_budget=engine.token_budget,
            kv_bytes=engine.kv_bytes,
            context=engine.context,
            threads=engine.threads,
        )
        assembly = assemble(plan, notify=self._reporter.note)
        decoder = assembly.decoder
        self._codec = TextCodec.load(
            model,
            use_chat_template=spec.prompt.chat_template,
            system_prompt=spec.prompt.system_prompt,
            context=decoder.context,
            on_long_prompt=spec.prompt.on_long_prompt,
            special_tokens_in_prompts=spec.prompt.special_tokens,
            trust_remote_code=spec.model.trust_remote_code,
        )
        self._codec.check_content(self._content.kind)
        ends = self._codec.end_token_ids(self._defaults)
        # A tokenizer may know of tokens that the model has no logits for.
        self._end_ids = frozenset(token for token in ends if token < decoder.vocab_size)
        decoder.end_token_ids = self._end_ids
        check_token_ids(self._sampling, decoder.vocab_size)
        self._decoder = decoder
        self._assembly = assembly
        self._begin_learning(assembly, versions)

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
        self._learning.keep(self._committed_version)

    def _versions(self) -> Path | None:
        """The folder of the versions of this model's drafter."""
        speculation, model = self._spec.speculation, self._model
        store = speculation.drafter_store
        if store is None:
            return None if speculation.drafter is None else self._own_store
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
        return f"drafter version {version} of {speculation.drafter_store or self._own_store}"

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

    def _requests(self) -> Iterator[Request]:
        """All requests that are missing, in order; rows that cannot be served are finished here."""
        for info in self._infos:
            shard = info.shard.index
            chunks = read_chunks(
                info.shard,
                self._content,
                self._spec.output.chunk_rows,
                columns=self._spec.input.columns,
                sampling=self._sampling,
                id_column=self._spec.input.id_column,
                skip=lambda chunk, shard=shard: self._output.is_done(shard, chunk),  # type: ignore[misc]
            )
            for chunk in chunks:
                self._chunks.begin(chunk)
                for begin in range(0, len(chunk.prompts), _ENCODED_AT_ONCE):
                    prompts = chunk.prompts[begin : begin + _ENCODED_AT_ONCE]
                    for prompt, encoded in zip(
                        prompts, self._codec.encode_many(prompts), strict=True
                    ):
                        yield from self._requests_of(prompt, encoded)

    def _requests_of(self, prompt: Prompt, encoded: Encoded | RowError) -> Iterator[Request]:
        if isinstance(encoded, Encoded) and (error := self._bad_token_id(prompt, encoded)):
            encoded = error
        if isinstance(encoded, RowError):
            self._chunks.refuse(prompt, encoded)
            self._rows_done += 1
            self.figures.num_errors += 1
            return
        for sample in range(prompt.sampling.n):
            yield Request(
                key=RowKey(prompt.shard, prompt.row, sample),
                token_ids=encoded.token_ids,
                sampling=prompt.sampling,
                identity=prompt.identity,
                stop_watch=self._codec.watch(prompt.sampling),
                truncated_tokens=encoded.truncated_tokens,
            )

    def _bad_token_id(self, prompt: Prompt, encoded: Encoded) -> RowError | None:
        vocab_size = self._decoder.vocab_size
        highest = max(encoded.token_ids)
        if highest >= vocab_size:
            message = f"the tokenizer makes it token {highest}, the model's vocabulary has "
            return RowError("unknown_token", f"{message}{vocab_size}")
        try:
            check_token_ids(prompt.sampling, vocab_size)
        except ConfigError as error:
            return RowError("bad_sampling", error.message)
        return None

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
        if self._chunks.put(completion.key, OutputRow(text, completion)):
            self._rows_done += 1

    def _progress(self) -> Progress:
        rows, resumed = self._output.num_rows, self._output.resumed_rows
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
