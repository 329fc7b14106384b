"""The command line: what goes to which stream, exit codes, and a flag for every key."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest

from adaflash_batch import cli
from adaflash_batch.errors import ConfigError, InputError, LockedError
from adaflash_batch.report.live import Reporter
from adaflash_batch.spec import JobSpec, section_fields
from adaflash_batch.spec_sources import flag_name


class FakeJob:
    """Stands in for job.py: keeps the spec, then does what it is told."""

    def __init__(self) -> None:
        self.spec: JobSpec | None = None
        self.exit_code = 0
        self.raises: BaseException | None = None

    def run_job(self, spec: JobSpec, *, reporter: Reporter) -> Any:
        self.spec = spec
        reporter.note("working")
        if self.raises is not None:
            raise self.raises
        return SimpleNamespace(exit_code=self.exit_code, as_dict=lambda: {"rows": 2})


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    fake = FakeJob()
    monkeypatch.setitem(sys.modules, "adaflash_batch.job", fake)
    return fake


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code or 0


def spec_of(job: FakeJob, *arguments: str) -> JobSpec:
    assert exit_code("run", "x.parquet", *arguments) == 0
    assert job.spec is not None
    return job.spec


def test_the_last_line_on_stdout_is_the_summary_and_the_rest_goes_to_stderr(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    job.exit_code = 3
    assert exit_code("run", "a.parquet") == 3
    out, err = capfd.readouterr()
    assert json.loads(out) == {"rows": 2}
    assert out.count("\n") == 1
    assert err == "working\n"


def test_errors_are_one_line_with_a_hint_below(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    job.raises = InputError("a.parquet is not a Parquet file", "look at it")
    assert exit_code("run", "a.parquet") == 5
    out, err = capfd.readouterr()
    message = "a.parquet is not a Parquet file"
    assert json.loads(out) == {"status": "failed", "exit_code": 5, "message": message}
    assert err == f"working\nerror: {message}\nhint: look at it\n"
    job.raises = ConfigError("no such model")
    assert exit_code("run", "a.parquet") == 2
    assert capfd.readouterr().err.endswith("error: no such model\n")


def test_a_held_output_exits_75_and_says_so(
    job: FakeJob, capfd: pytest.CaptureFixture[str]
) -> None:
    job.raises = LockedError("process 7 is at work")
    assert exit_code("run", "a.parquet") == 75
    out, err = capfd.readouterr()
    assert json.loads(out)["status"] == "locked"
    assert "error: process 7 is at work" in err


def test_an_interrupt_exits_75(job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    job.raises = KeyboardInterrupt("SIGTERM")
    assert exit_code("run", "a.parquet") == 75
    out, err = capfd.readouterr()
    assert json.loads(out) == {
        "status": "interrupted",
        "exit_code": 75,
        "message": "stopped by SIGTERM",
    }
    assert "error: interrupted\nhint: run the same command again" in err


def test_a_bug_keeps_its_traceback(job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    job.raises = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["run", "a.parquet"])
    last = json.loads(capfd.readouterr().out)
    assert (last["status"], last["exit_code"]) == ("failed", 1)
    assert "ours" in last["message"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "no input given"),
        (["run", "a.parquet", "--temprature", "1"], "--temprature"),
        (["run", "a.parquet", "--temperature", "hot"], "--temperature"),
        (["run", "a.parquet", "--temperature", "-1"], "--temperature: temperature is -1.0"),
        (["run", "a.parquet", "--column", "temperature"], "--column temperature is not FIELD="),
        (["run", "a.parquet", "--column", "temp=t"], "--column names temp"),
        (["run", "a.parquet", "--config", "missing.toml"], "cannot read job file missing.toml"),
        (["go"], "go"),
    ],
)
def test_usage_errors_exit_2_and_name_the_option(
    job: FakeJob, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert exit_code(*arguments) == 2
    out, err = capfd.readouterr()
    first = err.splitlines()[0]
    assert first.startswith("error: ")
    assert said in first
    # What the command line itself cannot be read by never reaches `run`.
    for line in out.splitlines():
        last = {"status": "failed", "exit_code": 2, "message": first.removeprefix("error: ")}
        assert json.loads(line) == last
    assert job.spec is None


def sample(annotation: object) -> tuple[list[str], object]:
    """Something to type for a flag of this type, and what the spec then holds."""
    if choices := [each for each in get_args(annotation) if get_origin(each) is Literal]:
        annotation = choices[0]  # or None
    if get_origin(annotation) is Literal:
        last = get_args(annotation)[-1]
        return [last], last
    text = str(annotation)
    samples: list[tuple[str, list[str], object]] = [
        ("bool", [], True),
        ("tuple[typing.Annotated[int", ["3"], (3,)),
        ("tuple", ["word"], ("word",)),
        ("dict", ["seed=word"], {"seed": "word"}),
        ("_as_size", ["2GiB"], "2GiB"),
        ("float", ["0.5"], 0.5),
        ("int,", ["7"], 7),
        ("int ", ["7"], 7),
        ("'int'", ["7"], 7),
    ]
    return next(((typed, held) for mark, typed, held in samples if mark in text), (["w"], "w"))


FLAGS = [
    (section, name, flag)
    for section in JobSpec.model_fields
    for name in section_fields(section)
    if (flag := flag_name(section, name)) is not None and flag.startswith("--")
]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["run", "--nope"], "run"),
        (["check", "--nope"], "check"),
        (["drafter", "list", "--nope"], "drafter list"),
    ],
)
def test_usage_errors_point_to_the_help_of_their_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert f"hint: see adaflash-batch {command} --help\n" in capsys.readouterr().err


@pytest.mark.parametrize(("section", "name", "flag"), FLAGS)
def test_every_flag_sets_its_key(job: FakeJob, section: str, name: str, flag: str) -> None:
    field = section_fields(section)[name]
    special = {"memory": "2GiB", "zero_stage": 2, "max_errors": "2.5%"}
    typed, held = sample(field.annotation)
    if name in special:
        typed, held = [str(special[name])], special[name]
    others = ["--drafter", "D"] if name in ("width", "when") else []
    if name == "num_shards":
        others = ["--shard-index", "0"]
    elif name.startswith("shard"):
        others = ["--num-shards", "8"]
    spec = spec_of(job, flag, *typed, *others)
    assert getattr(getattr(spec, section), name) == held


def test_flags_can_be_repeated_turned_off_and_mixed_with_a_file(
    job: FakeJob, tmp_path: Any
) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[engine]\nthreads = 1\nconcurrency = 1\n[prompt]\nchat_template = true\n")
    spec = spec_of(
        job,
        *("--config", str(config), "--set", "engine.threads=2", "--concurrency", "3"),
        *("--stop", "a", "--stop", "b", "--column", "n=k", "--column", "seed=s"),
        *("--no-chat-template", "--presence-penalty", "-1.5", "y.parquet"),
    )
    assert spec.input.paths == ("x.parquet", "y.parquet")
    assert (spec.engine.threads, spec.engine.concurrency) == (2, 3)
    assert spec.sampling.stop == ("a", "b")
    assert spec.sampling.presence_penalty == -1.5
    assert spec.input.columns == {"n": "k", "seed": "s"}
    assert spec.prompt.chat_template is False


def test_the_version_is_told_in_both_ways(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == exit_code("version") == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("adaflash-batch ")


def test_nothing_at_all_prints_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 2
    assert "Usage: " in capfd.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["check", "--help"], ["--version"], ["run"], ["check"]],
)
def test_help_and_usage_errors_load_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from adaflash_batch.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    heavy = {'torch', 'transformers', 'pyarrow', 'polars', 'numpy'}\n"
        "    print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded []"
