"""What a container allows is read from its control groups, of both versions, and the least limit holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from card.machine.container import cpu_quota, memory_left, memory_limit, num_usable_cores
from card.machine.memory import free_memory, whole_memory

MIB = 1 << 20
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
MEMORY_V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
CPU_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
NONE_V1 = "9223372036854771712"


def system(root: Path, groups: str, mounts: list[str], files: Mapping[str, object]) -> Path:
    """Make a system: what a process is told of its groups, and the files of these."""
    of_process = root / "proc" / "self"
    of_process.mkdir(parents=True)
    (of_process / "cgroup").write_text(groups)
    (of_process / "mountinfo").write_text("\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts, ""]))
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def test_a_machine_without_groups_sets_no_limit(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is memory_limit(tmp_path) is cpu_quota(tmp_path) is None
    assert num_usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_the_least_limit_of_nested_groups_holds(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": 1024 * MIB,
        "pod/memory.current": 300 * MIB,
        "pod/app/memory.max": 2048 * MIB,
        "pod/app/memory.current": 200 * MIB,
        "pod/cpu.max": "150000 100000",
        "pod/app/cpu.max": "max 100000",
    }
    root = system(tmp_path, "0::/pod/app\n", [V2], files)
    assert memory_limit(root) == 1024 * MIB
    assert memory_left(root) == 724 * MIB
    assert cpu_quota(root) == 1.5


def test_a_limit_that_only_slows_down_is_one(tmp_path: Path) -> None:
    files = {"a/memory.max": "max", "a/memory.high": 512 * MIB, "a/memory.current": 12 * MIB}
    assert memory_left(system(tmp_path, "0::/a\n", [V2], files)) == 500 * MIB


def test_cached_files_are_free_and_mapped_ones_are_not(tmp_path: Path) -> None:
    stat = f"anon {100 * MIB}\nfile {600 * MIB}\nfile_mapped {200 * MIB}\n"
    stat += f"inactive_file {350 * MIB}\nactive_file {250 * MIB}"
    files = {"a/memory.max": 1024 * MIB, "a/memory.current": 700 * MIB, "a/memory.stat": stat}
    assert memory_left(system(tmp_path, "0::/a\n", [V2], files)) == (1024 - 700 + 400) * MIB


def test_version_1_says_none_by_a_number_beyond_all_memory(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": NONE_V1,
        "memory/a/memory.usage_in_bytes": 5 * MIB,
        "cpu,cpuacct/a/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/a/cpu.cfs_period_us": 100000,
    }
    root = system(tmp_path, "4:memory:/a\n2:cpu,cpuacct:/a\n", [MEMORY_V1, CPU_V1], files)
    assert memory_left(root) is cpu_quota(root) is None


def test_limits_of_version_1_are_found_up_to_the_outermost_group(tmp_path: Path) -> None:
    stat = f"cache 9\ntotal_inactive_file {40 * MIB}\ntotal_active_file {20 * MIB}\ntotal_mapped_file {10 * MIB}"
    files = {
        "memory/memory.limit_in_bytes": NONE_V1,
        "memory/a/memory.limit_in_bytes": 1024 * MIB,
        "memory/a/memory.usage_in_bytes": 100 * MIB,
        "memory/a/memory.stat": stat,
        "memory/a/b/memory.limit_in_bytes": NONE_V1,
        "cpu,cpuacct/a/cpu.cfs_quota_us": 250000,
        "cpu,cpuacct/a/cpu.cfs_period_us": 100000,
        "cpu,cpuacct/a/b/cpu.cfs_quota_us": 90000,
        "cpu,cpuacct/a/b/cpu.cfs_period_us": 50000,
    }
    root = system(tmp_path, "4:memory:/a/b\n2:cpuacct,cpu:/a/b\n", [MEMORY_V1, CPU_V1], files)
    assert memory_limit(root) == 1024 * MIB
    assert memory_left(root) == 974 * MIB
    assert cpu_quota(root) == 1.8


def test_a_limit_of_a_group_that_cannot_be_seen_is_in_the_statistics(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": NONE_V1,
        "memory/memory.usage_in_bytes": 24 * MIB,
        "memory/memory.stat": f"hierarchical_memory_limit {1024 * MIB}",
    }
    assert memory_left(system(tmp_path, "4:memory:/\n", [MEMORY_V1], files)) == 1000 * MIB


def test_both_versions_side_by_side_are_read(tmp_path: Path) -> None:
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    files = {"memory/a/memory.limit_in_bytes": 512 * MIB, "unified/a/cpu.max": "200000 100000"}
    root = system(tmp_path, "4:memory:/a\n0::/a\n", [MEMORY_V1, unified], files)
    assert memory_limit(root) == 512 * MIB
    assert cpu_quota(root) == 2.0


@pytest.mark.parametrize("path", ["/docker/4f2a", "/docker/4f2a/below", "/elsewhere", "/../../x", "/"])
def test_a_container_that_sees_only_its_own_group_finds_it(tmp_path: Path, path: str) -> None:
    mount = "35 31 0:32 /docker/4f2a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    files = {"memory/memory.limit_in_bytes": 64 * MIB, "memory/below/memory.limit_in_bytes": 65 * MIB}
    assert memory_limit(system(tmp_path, f"4:memory:{path}\n", [mount], files)) == 64 * MIB


def test_a_place_with_a_space_is_found(tmp_path: Path) -> None:
    mount = r"31 23 0:28 / /sys/fs/cgroup/my\040groups rw - cgroup2 cgroup2 rw"
    assert memory_limit(system(tmp_path, "0::/a b\n", [mount], {"my groups/a b/memory.max": 64 * MIB})) == 64 * MIB


@pytest.mark.parametrize(
    ("content", "cores"),
    [("50000 100000", 1), ("100000 100000", 1), ("150000 100000", 1), ("200000 100000", 2), ("99900000 100000", 3)],
)
def test_a_started_core_counts_for_none_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5})
    assert num_usable_cores(system(tmp_path, "0::/\n", [V2], {"cpu.max": content})) == cores


@pytest.mark.parametrize("content", ["", "max", "x y", "0 0", "100000 0", "-1 100000", "99\n1 2 3", "\x00\xff"])
def test_what_makes_no_sense_limits_nothing(tmp_path: Path, content: str) -> None:
    names = ("cpu.max", "memory.max", "memory.high", "memory.stat")
    root = system(tmp_path, f"0::/\n{content}\n", [V2, content], dict.fromkeys(names, content))
    assert cpu_quota(root) in (None, 99.0) and memory_limit(root) is None


def test_free_memory_is_the_least_of_machine_container_and_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a/memory.max": 1024 * MIB, "a/memory.current": 24 * MIB}
    root = system(tmp_path, "0::/a\n", [V2], files)
    status = root / "proc" / "self" / "status"
    status.write_text(f"Name:\tpython\nVmSize:\t {300 << 10} kB\nRssFile:\t {100 << 10} kB\n")
    facts = root / "proc" / "meminfo"
    facts.write_text(f"MemTotal: {9000 << 10} kB\nMemFree: {50 << 10} kB\nMemAvailable:  {8000 << 10} kB\n")
    assert free_memory(root) == 1000 * MIB
    assert whole_memory(root) == 1024 * MIB
    facts.write_text(f"MemFree: {50 << 10} kB\nMemAvailable:  {600 << 10} kB\n")
    assert free_memory(root) == 500 * MIB, "what this process has mapped is in use"
    monkeypatch.setattr("card.machine.memory.resource.getrlimit", lambda _: (700 * MIB, -1))
    assert free_memory(root) == 400 * MIB
    monkeypatch.setattr("card.machine.memory.resource.getrlimit", lambda _: (200 * MIB, -1))
    assert free_memory(root) == 0
