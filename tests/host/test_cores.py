"""The cores that a container with a CPU limit may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.host.cores import usable_cores

MINE = {0, 1, 2, 3, 4, 5, 6, 7}
LIMITS = {
    "none": ("0::/a", {"a/cpu.max": "max 100000"}, 8),
    "half a core": ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
    "two and a half": ("0::/a/b", {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}, 3),
    "mount point": ("0::/of/the/machine", {"cpu.max": "400000 100000"}, 4),
    "more than there are": ("0::/", {"cpu.max": "6400000 100000"}, 8),
    "version 1": ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
    "version 1, none": ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    "no control groups": ("", {}, 8),
}


@pytest.mark.parametrize(("membership", "files", "expected"), LIMITS.values(), ids=LIMITS)
def test_the_tightest_limit_counts(
    tmp_path: Path, membership: str, files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is rounded up to complete cores, in both versions of control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: MINE)
    tree = {"proc/self/cgroup": membership, **{f"cgroup/{name}": text for name, text in files.items()}}
    for name, text in tree.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == expected
