"""What is free: the machine's memory, or what the control groups around the process leave."""

from pathlib import Path

import pytest
import torch

from adaflash_batch.engine import memory

MACHINE = 1000 * 1024


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 1000 KiB free without any limits."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    write(tmp_path / "proc" / "meminfo", "MemTotal:    9000 kB\nMemAvailable:    1000 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(group: Path, most: int | str, used: int, inactive_file: int | None = None) -> None:
    write(group / "memory.max", f"{most}\n")
    write(group / "memory.current", f"{used}\n")
    if inactive_file is not None:
        write(group / "memory.stat", f"anon 5\nfile 900000\ninactive_file {inactive_file}\n")


def test_without_control_groups_the_machine_decides(system: Path) -> None:
    assert memory.free_memory() == MACHINE


@pytest.mark.parametrize(
    ("most", "used", "free"),
    [(5000, 2000, 3000), ("max", 2000, MACHINE), (2**40, 0, MACHINE), (5000, 6000, 0)],
)
def test_a_limit_counts_where_it_is_less(
    system: Path, most: int | str, used: int, free: int
) -> None:
    limit(system / "cgroup", most, used)
    assert memory.free_memory() == free


def test_files_that_were_read_once_are_not_in_the_way(system: Path) -> None:
    limit(system / "cgroup", 5000, 4900, inactive_file=3000)
    assert memory.free_memory() == 3100


def test_the_tightest_group_around_the_process_counts(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "1:name=systemd:/x\n0::/slurm/job_7/step_0\n")
    limit(system / "cgroup" / "slurm" / "job_7", 7000, 1000)
    limit(system / "cgroup" / "slurm" / "job_7" / "step_0", "max", 500)
    limit(system / "cgroup" / "slurm" / "job_8", 1, 0)
    assert memory.free_memory() == 6000


def test_a_group_outside_of_what_a_container_sees_is_passed_over(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "0::/../../other\n")
    assert memory.free_memory() == MACHINE


def test_a_machine_that_does_not_say_has_all_its_pages(system: Path) -> None:
    (system / "proc" / "meminfo").unlink()
    assert memory.free_memory() > 2**20


def test_the_budget_is_a_share(system: Path) -> None:
    assert memory.kv_budget(torch.device("cpu")) == MACHINE * 4 // 10


def test_this_machine_has_something_free() -> None:
    assert memory.free_memory() > 2**20
