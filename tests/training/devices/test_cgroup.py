"""Control groups of both versions, as files in a folder of the test's own."""

from pathlib import Path

import psutil
import pytest
import torch

from amp_track.training.devices import cgroup
from amp_track.training.devices.cpu import CpuDevice

GIBIBYTE = 2**30
UNLIMITED = str(2**63 - 4096)


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where control groups are mounted, empty, on a kernel that has killed 70 processes."""
    monkeypatch.setattr(cgroup, "_MOUNTED", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cgroup, "_VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 70\n")
    return tmp_path / "cgroup"


def write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"memory.{name}").write_text(text + "\n")


def belong_to(mounted: Path, line: str) -> None:
    (mounted.parent / "membership").write_text(f"{line}\n")


def test_version_2_where_the_tightest_group_decides(mounted: Path) -> None:
    belong_to(mounted, "0::/batch/job")
    write(mounted / "batch", max=str(4 * GIBIBYTE), current=str(3 * GIBIBYTE), stat="inactive_file 0")
    write(
        mounted / "batch/job",
        max=str(8 * GIBIBYTE), current=str(2 * GIBIBYTE), stat=f"anon 5\ninactive_file {GIBIBYTE}\nfile 1",
        **{"events.local": "oom 9\noom_kill 2\noom_group_kill 0", "events": "oom_kill 30"},
    )  # fmt: skip
    assert cgroup.limit_and_free_bytes() == (4 * GIBIBYTE, GIBIBYTE)
    assert cgroup.oom_kills() == 2


def test_a_group_without_a_limit_has_none(mounted: Path) -> None:
    belong_to(mounted, "0::/session")
    write(mounted / "session", max="max", current="5000", events="oom_kill 4")
    assert cgroup.limit_and_free_bytes() is None
    assert cgroup.oom_kills() == 4


def test_version_1_within_a_container_that_sees_only_its_own_group(mounted: Path) -> None:
    belong_to(mounted, "5:cpu:/\n4:cpuset,memory:/docker/0123\n0::/")
    write(
        mounted / "memory",
        limit_in_bytes=str(2 * GIBIBYTE), usage_in_bytes=str(GIBIBYTE), stat="total_inactive_file 0",
        oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 5",
    )  # fmt: skip
    assert cgroup.limit_and_free_bytes() == (2 * GIBIBYTE, GIBIBYTE)
    assert cgroup.oom_kills() == 5


def test_version_1_says_no_limit_by_a_huge_one(mounted: Path) -> None:
    belong_to(mounted, "4:memory:/")
    write(mounted / "memory", limit_in_bytes=UNLIMITED, usage_in_bytes="5000")
    assert cgroup.limit_and_free_bytes() is None


def test_without_groups_the_machine_counts(mounted: Path) -> None:
    assert cgroup.limit_and_free_bytes() is None
    assert cgroup.oom_kills() == 70
    belong_to(mounted, "0::/")  # the root of version 2 counts nothing itself
    assert cgroup.oom_kills() == 70


def test_a_cpu_has_no_more_than_its_group(mounted: Path) -> None:
    device = CpuDevice(torch.device("cpu"))
    assert device.capacity_bytes() == psutil.virtual_memory().total
    belong_to(mounted, "0::/job")
    write(mounted / "job", max=str(GIBIBYTE), current=str(GIBIBYTE // 4), stat="inactive_file 0")
    assert device.capacity_bytes() == GIBIBYTE
    assert device.free_bytes() == GIBIBYTE * 3 // 4
