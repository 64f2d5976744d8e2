"""The CPU cores that this process may use: the cores of its affinity mask, limited by the CPU quota of its container.

Libraries start one thread for each core of the machine. These threads exceed a CPU quota at once, and the kernel then
stops all threads of the container until the next period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hicache.host.cgroups import CGROUP, PROC, groups, number


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the number of cores of the affinity mask, or the CPU limit of a control group rounded up, whichever is
    less; at least 1."""
    quotas = [quota for group, version in groups("cpu", proc, cgroup) for quota in _quota(group, version)]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _quota(group: Path, version: int) -> Iterator[int]:
    """Yield the CPU limit of one group, in cores, rounded up; yield nothing if the group has no limit."""
    if version == 1:
        quota, period = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
    else:
        try:
            first, second = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            return
        quota, period = None if first == "max" else int(first), int(second)
    if quota is not None and period is not None and quota > 0 and period > 0:
        yield -(-quota // period)
