"""JobSpec: what a person types, as job file and flags. Frozen; unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Sampling
from adaflash_batch.spec_sections import (
    AdaptSection,
    EngineSection,
    InputSection,
    ModelSection,
    OutputSection,
    PromptSection,
    RunSection,
    SamplingSection,
    SpeculationSection,
    as_tuple,
)
from adaflash_batch.spec_sources import GivenValues, check_column_fields, default_output

# Everything else changes texts, or which rows lie in which file: a new key is on the safe side.
_CHANGES_NO_TEXT = frozenset(
    {
        "output.directory",
        "engine.device",
        "engine.concurrency",
        "engine.token_budget",
        "engine.kv_memory",
        "engine.threads",
        "engine.share_prefixes",
        "speculation.drafter",
        "speculation.drafter_store",
        "speculation.width",
        "speculation.when",
        "speculation.widths",
        "speculation.lookup",
    }
)
# Whole sections of which the same is true.
_CHANGING_NO_TEXT = frozenset({"adapt", "run"})


class JobSpec(BaseModel):
    """A whole job. Build it with `from_sources`; below `job.py` only plain values travel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: InputSection
    prompt: PromptSection = PromptSection()
    output: OutputSection
    model: ModelSection = ModelSection()
    sampling: SamplingSection = SamplingSection()
    engine: EngineSection = EngineSection()
    speculation: SpeculationSection = SpeculationSection()
    adapt: AdaptSection = AdaptSection()
    run: RunSection = RunSection()

    @classmethod
    def from_sources(
        cls,
        config: Path | None = None,
        overrides: Sequence[str] = (),
        flags: Mapping[str, object] | None = None,
    ) -> JobSpec:
        """Read the job file, lay `--set` over it, then the flags.

        Args:
            config: TOML file with one table a section; input paths in it are relative to the
                current directory, as on the command line.
            overrides: `section.key=value`, the value in TOML or else plain text.
            flags: `section.key` -> value; None and empty lists count as not given.

        Raises:
            ConfigError: naming the key, where it was given, and what would be right.
        """
        given = GivenValues(spec_keys())
        if config is not None:
            given.add_file(config)
        for override in overrides:
            given.add_override(override)
        for key, value in (flags or {}).items():
            given.add_flag(key, value)
        return _build(given)

    @property
    def shares_states(self) -> bool:
        """Whether pages that requests share need memory for what a drafter learns from."""
        return self.engine.share_prefixes and self.adapt.when != "off"

    def text_fields(self) -> dict[str, object]:
        """Everything that changes a text or the layout of files: `section.key` -> JSON value.

        Speed settings are not among it: they may differ between a run and its continuation.
        """
        return {
            f"{section}.{name}": value
            for section, fields in self.to_json().items()
            if section not in _CHANGING_NO_TEXT
            for name, value in fields.items()
            if f"{section}.{name}" not in _CHANGES_NO_TEXT
        }

    def to_json(self) -> dict[str, dict[str, object]]:
        """The resolved job as JSON values, by section; `json.dumps` takes it."""
        return self.model_dump(mode="json")


def spec_keys() -> dict[str, dict[str, str]]:
    """Names of all keys by section, each with its description."""
    return {
        section: {name: field.description or "" for name, field in section_fields(section).items()}
        for section in JobSpec.model_fields
    }


def section_fields(section: str) -> dict[str, FieldInfo]:
    """The keys of a section with their types, defaults and descriptions."""
    model = JobSpec.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model.model_fields


def _build(given: GivenValues) -> JobSpec:
    _fill_output(given)
    try:
        spec = JobSpec.model_validate({"input": {}, **given.values})
    except ValidationError as error:
        raise given.explain(error.errors(include_url=False)[0]) from None
    if not spec.input.paths:
        raise ConfigError("no input given", "adaflash-batch run prompts.parquet")
    if spec.input.prompt_column and spec.input.messages_column:
        places = [given.place("input", f"{kind}_column") for kind in ("prompt", "messages")]
        raise ConfigError(f"{places[0]} and {places[1]} exclude each other", "give one of them")
    check_column_fields(spec.input.columns, given.place("input", "columns"))
    _check_sampling(spec.sampling, given)
    _check_drafts(spec, given)
    _check_shares(spec, given)
    return spec


def _check_shares(spec: JobSpec, given: GivenValues) -> None:
    """Refuse shares of a job that say too little, or two things at once."""
    run = spec.run
    place = {name: given.place("run", name) for name in type(run).model_fields}
    names_one = run.shard_index is not None or run.shards_from is not None
    if run.shard_index is not None and run.shards_from is not None:
        both = f"{place['shard_index']} and {place['shards_from']}"
        raise ConfigError(f"{both} exclude each other", "give one of them")
    if run.num_shards is None and names_one:
        given_one = place["shard_index" if run.shards_from is None else "shards_from"]
        raise ConfigError(f"{given_one} needs a number of shards", "add --num-shards N")
    if run.num_shards is not None and not names_one:
        raise ConfigError(
            f"{place['num_shards']} needs to know which of them this run is",
            "add --shard-index I, or --shards-from slurm",
        )
    if run.num_shards is not None and (run.shard_index or 0) >= run.num_shards:
        raise ConfigError(
            f"{place['shard_index']} is {run.shard_index}, with {run.num_shards} shards it is "
            f"0 to {run.num_shards - 1}"
        )
    if run.fresh and run.num_shards is not None:
        raise ConfigError(
            f"{place['fresh']} does not go with {place['num_shards']}",
            "name another output directory with --out",
        )


def _check_drafts(spec: JobSpec, given: GivenValues) -> None:
    """Refuse what would have no effect, for lack of drafts or of a drafter."""
    speculation = spec.speculation
    has_drafter = bool({"drafter", "drafter_store"} & speculation.model_fields_set)
    has_drafts = has_drafter or speculation.lookup
    wanting = {
        ("speculation", "width"): speculation.width is not None and not has_drafts,
        ("speculation", "when"): speculation.when == "always" and not has_drafts,
        ("speculation", "widths"): speculation.widths == "adaflash" and not has_drafter,
        ("adapt", "when"): spec.adapt.when in ("even", "always") and not has_drafter,
    }
    for (section, name), is_vain in wanting.items():
        if is_vain:
            place = given.place(section, name)
            raise ConfigError(f"{place} needs a drafter", "add --drafter DIR")


def _fill_output(given: GivenValues) -> None:
    output = given.values.setdefault("output", {})
    paths = as_tuple(given.values.get("input", {}).get("paths"))
    # What is wrong with the paths is said when they are validated.
    first = paths[0] if isinstance(paths, tuple) and paths else ""
    output.setdefault("directory", default_output(str(first)))


def _check_sampling(sampling: SamplingSection, given: GivenValues) -> None:
    # One field at a time, so that the message can say where it was given.
    roomy = Sampling(max_new_tokens=2**62)
    for name in sampling.model_fields_set:
        try:
            SamplingSection.model_construct(**{name: getattr(sampling, name)}).over(roomy)
        except ConfigError as error:
            place = given.place("sampling", name)
            raise ConfigError(f"{place}: {error.message}", error.hint) from None
    if sampling.max_new_tokens is not None:
        sampling.over(Sampling())
