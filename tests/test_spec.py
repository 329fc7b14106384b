"""JobSpec: sources laid over each other, refusals, and what changes text."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import Sampling, sampling_fields
from adaflash_batch.spec import JobSpec, spec_keys
from adaflash_batch.spec_sections import SamplingSection, parse_bytes
from adaflash_batch.spec_sources import default_output, flag_name, parse_value

JOBS = Path(__file__).parent.parent / "jobs"
PATHS = {"input.paths": ["prompts.parquet"]}


def job_file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(config: Path | None = None, *overrides: str, **flags: object) -> ConfigError:
    named = {key.replace("__", "."): value for key, value in flags.items()}
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_sources(config, overrides, PATHS | named)
    return caught.value


def test_an_input_alone_is_a_whole_job() -> None:
    spec = JobSpec.from_sources(flags=PATHS)
    assert spec.input.paths == ("prompts.parquet",)
    assert spec.output.directory == "prompts-completions"
    assert spec.model.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert spec.sampling.over(Sampling(seed=3)) == Sampling(seed=3)


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path) -> None:
    config = job_file(tmp_path, "[engine]\nconcurrency = 1\nthreads = 1\ntoken_budget = 1\n")
    spec = JobSpec.from_sources(
        config,
        ["engine.concurrency=2", "engine.threads=2"],
        PATHS | {"engine.concurrency": 3},
    )
    engine = spec.engine
    assert (engine.concurrency, engine.threads, engine.token_budget) == (3, 2, 1)


def test_flags_not_given_change_nothing(tmp_path: Path) -> None:
    config = job_file(tmp_path, "[input]\npaths = 'a.parquet'\n[sampling]\nstop = ['END']\n")
    spec = JobSpec.from_sources(config, (), {"input.paths": [], "sampling.stop": None})
    assert spec.input.paths == ("a.parquet",)
    assert spec.sampling.stop == ("END",)


def test_tables_are_merged_entry_by_entry(tmp_path: Path) -> None:
    config = job_file(
        tmp_path, "[input.columns]\nseed = 's'\nn = 'n'\n[sampling.logit_bias]\n5=1\n"
    )
    spec = JobSpec.from_sources(
        config,
        ["sampling.logit_bias.7=-2.5"],
        PATHS | {"input.columns": {"seed": "other", "temperature": "temp"}},
    )
    assert spec.input.columns == {"seed": "other", "n": "n", "temperature": "temp"}
    assert spec.sampling.over(Sampling()).logit_bias == ((5, 1.0), (7, -2.5))


@pytest.mark.parametrize(
    ("text", "named", "hinted"),
    [
        ("[sampling]\ntemprature = 1", "sampling.temprature", "sampling.temperature"),
        ("[engine]\ntemperature = 1", "engine.temperature", "sampling.temperature"),
        ("[engine]\nspeed = 1", "engine.speed", "engine.concurrency"),
        ("[sampler]\ntop_k = 1", "sampler", "sampling"),
        ("model = 'x'", "model", "model.name"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(
    tmp_path: Path, text: str, named: str, hinted: str
) -> None:
    config = job_file(tmp_path, text)
    error = refusal(config)
    assert error.message == f"unknown key {named} in {config}"
    assert error.hint is not None
    assert hinted in error.hint


@pytest.mark.parametrize(
    ("section", "line", "wanted"),
    [
        ("sampling", "temperature = 'hot'", "number"),
        ("sampling", "temperature = nan", "0 or more"),
        ("sampling", "top_k = true", "integer"),
        ("sampling", "top_p = 0.0", "above 0"),
        ("sampling", "max_new_tokens = 0", "1 or more"),
        ("sampling", "stop = ['a', '']", "at least 1 character"),
        ("sampling", "logit_bias = {5 = inf}", "finite"),
        ("engine", "concurrency = 0", "greater than or equal to 1"),
        ("engine", "kv_memory = '4Gi'", "4GiB"),
        ("engine", "kv_memory = 4", "4GiB"),
        ("output", "chunk_rows = 0", "greater than or equal to 1"),
        ("prompt", "on_long_prompt = 'cut'", "truncate-left"),
        ("input", "columns = {logit_bias = 'x'}", "no sampling field"),
    ],
)
def test_wrong_values_are_refused_with_file_and_key(
    tmp_path: Path, section: str, line: str, wanted: str
) -> None:
    config = job_file(tmp_path, f"[{section}]\n{line}\n")
    error = refusal(config)
    key = line.partition(" ")[0]
    assert error.message.startswith(f"{section}.{key} in {config}")
    assert wanted in error.message


def test_a_wrong_flag_is_named_as_it_was_typed() -> None:
    assert refusal(sampling__temperature=-1.0).message.startswith("--temperature: ")
    assert refusal(output__directory="").message.startswith("--out is ''")
    assert refusal(None, "engine.threads=x").message.startswith("--set engine.threads is 'x'")


def test_settings_that_do_not_go_together_are_refused() -> None:
    both = refusal(input__prompt_column="a", input__messages_column="b")
    assert both.message == "--prompt-column and --messages-column exclude each other"
    assert "drafter" in refusal(speculation__width=3, speculation__lookup=False).message
    assert "drafter" in refusal(speculation__widths="adaflash").message
    assert (
        "above max_new_tokens"
        in refusal(None, "sampling.min_new_tokens=9", sampling__max_new_tokens=3).message
    )
    # Without the model's own limit nothing can be said about this one yet.
    spec = JobSpec.from_sources(None, ["sampling.min_new_tokens=600"], PATHS)
    assert spec.sampling.over(Sampling(max_new_tokens=700)).min_new_tokens == 600


def test_no_input_and_unreadable_job_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no input given"):
        JobSpec.from_sources()
    assert "is not TOML" in refusal(job_file(tmp_path, "[engine")).message
    assert "cannot read" in refusal(tmp_path / "missing.toml").message
    assert "cannot read" in refusal(tmp_path).message


@pytest.mark.parametrize("word", ["none", "off"])
def test_a_drafter_can_be_turned_off(tmp_path: Path, word: str) -> None:
    config = job_file(tmp_path, "[speculation]\ndrafter = 'D'\nwidth = 4\n")
    on = JobSpec.from_sources(config, (), PATHS)
    off = JobSpec.from_sources(config, (), PATHS | {"speculation.drafter": word})
    assert (on.speculation.drafter, off.speculation.drafter) == ("D", None)


def test_speed_settings_are_no_text_fields() -> None:
    plain = JobSpec.from_sources(flags=PATHS)
    fast = JobSpec.from_sources(
        None,
        [
            *("engine.concurrency=3", "engine.token_budget=64", "engine.kv_memory=1GiB"),
            *("engine.share_prefixes=false", "engine.device=cpu"),
        ],
        PATHS
        | {"engine.threads": 1, "speculation.drafter": "D", "speculation.width": 2}
        | {"output.directory": "elsewhere"},
    )
    assert fast.text_fields() == plain.text_fields()


@pytest.mark.parametrize(
    "override",
    [
        "sampling.temperature=0.5",
        "sampling.logit_bias.3=1.0",
        "model.dtype=float32",
        "prompt.system_prompt=Be brief",
        "input.columns.seed=s",
        "engine.context=128",
        "output.chunk_rows=5",
    ],
)
def test_what_changes_text_is_a_text_field(override: str) -> None:
    plain = JobSpec.from_sources(flags=PATHS).text_fields()
    other = JobSpec.from_sources(None, [override], PATHS).text_fields()
    key = ".".join(override.partition("=")[0].split(".")[:2])
    assert {name for name in plain if plain[name] != other[name]} == {key}


def test_the_resolved_job_survives_json() -> None:
    spec = JobSpec.from_sources(
        None, ["sampling.stop=['a', 'b']", "sampling.logit_bias.3=1", "input.columns.n=k"], PATHS
    )
    assert JobSpec.model_validate(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_spec_cannot_be_changed() -> None:
    spec = JobSpec.from_sources(flags=PATHS)
    with pytest.raises(ValidationError, match="frozen"):
        spec.engine.concurrency = 2


def test_every_key_is_described_and_has_a_flag() -> None:
    for section, keys in spec_keys().items():
        for name, description in keys.items():
            assert description.endswith("."), (section, name)
            assert (flag_name(section, name) is None) == (name == "logit_bias")


def test_the_sampling_section_holds_the_fields_of_sampling() -> None:
    names = [field.name for field in dataclasses.fields(Sampling)]
    assert list(SamplingSection.model_fields) == names
    assert {*sampling_fields(), "logit_bias"} == set(names)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("true", True),
        ("['a', 'b']", ["a", "b"]),
        ("'8'", "8"),
        ("plain words", "plain words"),
        ("2024-01-01", "2024-01-01"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_set_values_are_toml_or_else_text(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@given(st.text())
def test_set_never_fails_on_a_value(text: str) -> None:
    assert isinstance(parse_value(text), bool | int | float | str | list | dict)


@pytest.mark.parametrize(
    ("path", "directory"),
    [
        ("prompts.parquet", "prompts-completions"),
        ("some dir/früh.parquet", "früh-completions"),
        ("dir/", "dir-completions"),
        ("dir/*.parquet", "dir-completions"),
        ("*.parquet", "completions"),
        ("/", "completions"),
        ("s3://bucket/key/x.parquet?region=eu", "x-completions"),
    ],
)
def test_the_default_output_is_named_after_the_first_input(path: str, directory: str) -> None:
    assert default_output(path) == directory


def test_learning_has_its_section() -> None:
    flags: dict[str, object] = {
        "speculation.drafter": "d",
        "adapt.when": "always",
        "speculation.when": "always",
    }
    spec = JobSpec.from_sources(None, ["adapt.fresh=8", "adapt.memory=2MiB"], {**PATHS, **flags})
    assert (spec.adapt.when, spec.adapt.fresh, spec.adapt.memory_bytes) == ("always", 8, 2**21)
    assert spec.speculation.when == "always"
    usual = JobSpec.from_sources(flags=PATHS)
    assert (usual.adapt.when, usual.speculation.when, usual.adapt.fresh) == ("pays", "pays", 64)
    # Neither how drafts are made nor how the drafter learns changes a text.
    assert spec.text_fields() == usual.text_fields()
    store: dict[str, object] = {"speculation.drafter_store": "s", "adapt.when": "always"}
    assert JobSpec.from_sources(flags={**PATHS, **store}).adapt.when == "always"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("adapt.when=sometimes", "adapt.when"),
        ("adapt.share=1.5", "adapt.share"),
        ("adapt.fresh=0", "adapt.fresh"),
        ("adapt.updates=0", "adapt.updates"),
        ("adapt.clip=0", "adapt.clip"),
        ("adapt.averaging=1", "adapt.averaging"),
        ("adapt.pull=-1", "adapt.pull"),
        ("adapt.objective=kl", "adapt.objective"),
        ("adapt.optimiser=sgd", "adapt.optimiser"),
        ("adapt.memory=lots", "adapt.memory"),
        ("adapt.fersh=8", "adapt.fresh"),
        ("speculation.when=off", "speculation.when"),
    ],
)
def test_what_learning_cannot_be_told_is_refused(override: str, words: str) -> None:
    error = refusal(None, override)
    assert words in f"{error.message} {error.hint}"


@pytest.mark.parametrize(
    ("key", "option"), [("adapt__when", "--adapt"), ("speculation__when", "--speculate")]
)
def test_always_learning_or_drafting_needs_a_drafter(key: str, option: str) -> None:
    error = refusal(None, **{key: "always"}, speculation__lookup=False)
    assert f"{option} needs a drafter" in error.message
    assert "--drafter" in str(error.hint)


def test_sizes() -> None:
    assert parse_bytes("4GiB") == 4 * 2**30
    assert parse_bytes("1.5 kb") == 1500
    for wrong in ("4", "GiB", "0GiB", "-1GiB", "4 Gib/s"):
        with pytest.raises(ValueError, match="with its unit"):
            parse_bytes(wrong)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.toml")), ids=lambda path: path.name)
def test_every_job_file_of_the_repository_is_valid(path: Path) -> None:
    spec = JobSpec.from_sources(path)
    for name in spec.input.paths:  # a pattern stands for what comes every night
        assert "*" in name or (JOBS.parent / name).is_file()


def test_there_are_job_files() -> None:
    assert list(JOBS.glob("*.toml"))


def test_the_documentation_names_every_key_and_its_example_is_valid(tmp_path: Path) -> None:
    text = (JOBS.parent / "docs" / "job-file.md").read_text(encoding="utf-8")
    for section, keys in spec_keys().items():
        table = text.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
        for name, description in keys.items():
            assert f"| `{name}` |" in table
            assert description in table
    example = text.partition("```toml\n")[2].partition("```")[0]
    assert JobSpec.from_sources(job_file(tmp_path, example)).sampling.logit_bias == {50: -2.5}
