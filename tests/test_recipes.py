"""Each recipe for a scheduler passes the scheduler's own check, or a strict reading of it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from datetime import datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from cronsim import CronSim
from scheduled import RECIPES, ROOT
from typer.core import TyperGroup

from adaflash_batch import cli

SCRIPTS = sorted([*RECIPES.glob("*/*.sh"), *RECIPES.glob("*/*.sbatch")])
MANIFESTS = sorted(RECIPES.glob("kubernetes/*.yaml"))
UNITS = sorted(RECIPES.glob("systemd/*"))
# podFailurePolicy has been stable since 1.31, backoffLimitPerIndex since 1.33.
VERSIONS = ("1.33", kubernetes_validate.latest_version())
DIRECTIVES = {
    "Unit": "Description Wants After StartLimitIntervalSec StartLimitBurst",
    "Service": "Type User WorkingDirectory Environment ExecStart SuccessExitStatus Restart "
    "RestartPreventExitStatus RestartSec KillMode KillSignal TimeoutStopSec TimeoutStartSec",
    "Timer": "OnCalendar OnBootSec",
    "Install": "WantedBy",
}


def manifests(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def jobs() -> Iterator[dict[str, Any]]:
    """The spec of every Kubernetes job."""
    for document in (document for path in MANIFESTS for document in manifests(path)):
        if document["kind"] == "CronJob":
            yield document["spec"]["jobTemplate"]["spec"]
        if document["kind"] == "Job":
            yield document["spec"]


def container(job: dict[str, Any]) -> dict[str, Any]:
    found: list[dict[str, Any]] = job["template"]["spec"]["containers"]
    assert len(found) == 1
    return found[0]


def unit(name: str) -> ConfigParser:
    """A unit file; a key that stands twice is an error."""
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((RECIPES / "systemd" / name).read_text("utf-8"))
    return parser


def crontab() -> list[str]:
    """Its lines that are neither comments nor settings."""
    text = (RECIPES / "cron" / "crontab").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if not re.match(r"[A-Z]+=", line)]


def slurm_options() -> dict[str, str]:
    """The #SBATCH lines; Slurm reads them up to the first command."""
    lines = (RECIPES / "slurm" / "array.sbatch").read_text("utf-8").splitlines()
    first_command = next(at for at, line in enumerate(lines) if line and line[0] != "#")
    found = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert all(not line.startswith("#SBATCH") for line in lines[first_command:])
    return {name: value for name, _, value in (option.partition("=") for option in found)}


def after(flag: str, words: list[str]) -> str:
    """What follows a flag."""
    return words[words.index(flag) + 1]


def commands() -> Iterator[list[str]]:
    """The words of every command that a recipe runs."""
    for line in crontab():
        yield shlex.split(line)[5:]
    yield shlex.split(unit("adaflash-nightly.service")["Service"]["ExecStart"])
    yield from (container(job)["args"] for job in jobs())
    yield re.findall(r"--[a-z-]+", (RECIPES / "airflow" / "adaflash_nightly.py").read_text("utf-8"))
    for path in SCRIPTS:
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("adaflash-batch run"):
                yield shlex.split(line.removesuffix(" &"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert path.stat().st_mode & 0o111 == 0o111


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid_and_have_no_unknown_key(path: Path, version: str) -> None:
    for document in manifests(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_kubernetes_runs_again_what_can_succeed_and_nothing_else() -> None:
    for job in jobs():
        rules = job["podFailurePolicy"]["rules"]
        first, *by_code = rules
        # The first that matches counts: a pod that was drained exits 75, too.
        assert (first["action"], first["onPodConditions"]) == (
            "Ignore",
            [{"type": "DisruptionTarget", "status": "True"}],
        )
        action = {code: r["action"] for r in by_code for code in r["onExitCodes"]["values"]}
        assert sorted(action) == [1, 2, 4, 5, 75]
        assert {code for code, name in action.items() if name == "Count"} == {1, 75}
        assert "Ignore" not in action.values()
        names = {rule["onExitCodes"]["containerName"] for rule in by_code}
        assert names == {container(job)["name"]}
        pod = job["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        assert pod["terminationGracePeriodSeconds"] > int(after("--grace", container(job)["args"]))


def test_an_indexed_job_has_as_many_slices_as_completions() -> None:
    (job,) = (job for job in jobs() if job.get("completionMode") == "Indexed")
    arguments = container(job)["args"]
    assert after("--num-shards", arguments) == str(job["completions"])
    assert after("--shards-from", arguments) == "kubernetes"


def test_pods_find_what_the_config_map_is_made_of() -> None:
    text = (RECIPES / "kubernetes" / "nightly-cronjob.yaml").read_text("utf-8")
    files = re.findall(r"--from-file=(\S+)", text)
    assert all((ROOT / path).is_file() for path in files)
    mounted = {f"/jobs/{Path(path).name}" for path in files}
    for job in jobs():
        words = [*container(job)["command"], *container(job)["args"]]
        assert {word for word in words if word.startswith("/jobs/")} <= mounted


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_have_known_directives_only(path: Path) -> None:
    for section, keys in unit(path.name).items():
        assert set(keys) <= set(DIRECTIVES.get(section, "").split())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        # It looks for the program, too.
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", path.read_text("utf-8"))
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    names = [str(tmp_path / path.name) for path in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *names], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "adaflash" in line]
    assert (done.returncode, said) == (0, [])


def test_systemd_tries_again_what_can_succeed_and_waits_for_the_runner() -> None:
    service = unit("adaflash-nightly.service")["Service"]
    assert service["Type"] == "oneshot"
    assert service["Restart"] == "on-failure"
    assert service["SuccessExitStatus"] == "3"
    assert service["RestartPreventExitStatus"].split() == ["2", "4", "5"]
    assert service["KillMode"] == "mixed"
    words = shlex.split(service["ExecStart"])
    assert int(service["TimeoutStopSec"]) > int(after("--grace", words))
    # In a unit file a percent sign begins a specifier.
    assert "%" not in service["ExecStart"]


def test_cron_takes_the_crontab() -> None:
    (line,) = crontab()
    fields = line.split(maxsplit=5)
    CronSim(" ".join(fields[:5]), datetime(2026, 1, 1))
    # cron makes newlines of percent signs.
    assert "%" not in line
    paths = [word for word in shlex.split(fields[5]) if word.startswith("jobs/")]
    assert paths
    assert all((ROOT / path).is_file() for path in paths)


def test_slurm_signals_the_script_early_enough() -> None:
    options = slurm_options()
    batch_only, at, seconds = re.split("[:@]", options["signal"])
    assert (batch_only, at) == ("B", "USR1")
    (words,) = (words for words in commands() if "slurm" in words)
    # Slurm may be up to a minute early, never late.
    assert int(seconds) > int(after("--grace", words))
    assert re.fullmatch(r"0-\d+", options["array"])
    assert {"requeue", "open-mode"} <= set(options)


def test_recipes_use_flags_that_the_runner_has() -> None:
    flags = {word for words in commands() for word in words if re.match(r"--\w", word)}
    group = typer.main.get_command(cli.app)
    assert isinstance(group, TyperGroup)
    known = {flag for parameter in group.commands["run"].params for flag in parameter.opts}
    assert flags - known - {"--each-folder"} == set()
