"""The memory that this process can still allocate: the machine's free memory, limited by cgroups, minus a reserve.

Paths are parameters, so that tests can describe a machine by a tree of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hicache.console import rounded
from hicache.errors import OutOfMemory
from hicache.host.cgroups import CGROUP, PROC, groups, number

RESERVE_BYTES = 1 << 30
_FREE_RESERVE = 8  # divisor: a tier of size "free" leaves an eighth of the free memory


@dataclass(frozen=True)
class _Controller:
    """Names of the memory files of one generation of cgroups.

    `reclaimable`: fields of `memory.stat`, summed over the subtree, with cached file pages. Cached file pages count as
    usage, but the kernel drops them before it refuses an allocation.
    """

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, str]


# memory.high counts as a limit: a group above it is throttled, and stays throttled because pinned pages cannot be
# reclaimed.
_V2 = _Controller(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Controller(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_OF_VERSION = {2: _V2, 1: _V1}


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the bytes that can be allocated now without swapping: the minimum of the free memory of the machine and of
    this process's cgroups.

    Raises OSError if `proc` does not report the free memory.
    """
    limits = [_meminfo(proc / "meminfo", "MemAvailable")]
    for group, version in groups("memory", proc, cgroup):
        limits.extend(_left(group, _OF_VERSION[version]))
    return max(0, min(limits))


def require(asked_bytes: int, setting: str, available: int | None = None) -> None:
    """Raise `OutOfMemory` that names `setting` unless `asked_bytes` and the reserve fit in `available` bytes (None: the
    memory that is available now)."""
    try:
        free = available_bytes() if available is None else available
    except OSError:  # in a container without /proc, the later allocation fails if there is too little memory
        return
    if asked_bytes + RESERVE_BYTES > free:
        raise OutOfMemory(
            f"{setting}={rounded(asked_bytes)} does not fit: {rounded(free)} are free, {rounded(RESERVE_BYTES)} stay "
            f"in reserve; lower {setting} to at most {max(0, free - RESERVE_BYTES) >> 20}MiB"
        )


def free_bytes(setting: str, available: int, minimum: int = 1) -> int:
    """Return the size in bytes of a tier with size "free": `available` minus an eighth, or minus `RESERVE_BYTES` if an
    eighth is less. The rest is left to the system and to later allocations. Raises `OutOfMemory` that names `setting`
    if fewer than `minimum` bytes remain."""
    found = available - max(RESERVE_BYTES, available // _FREE_RESERVE)
    if found < minimum:
        raise OutOfMemory(
            f"{setting}=free finds too little: {rounded(available)} are free, {rounded(RESERVE_BYTES)} stay in "
            f"reserve, and {rounded(minimum)} are needed; free memory, or set {setting} to a size"
        )
    return found


def _left(group: Path, files: _Controller) -> Iterator[int]:
    """Yield the bytes left below each limit of one group, with cached file pages counted as free; yield nothing if the
    group has no limit."""
    used = number(group / files.usage)
    if used is None:
        return
    cached = sum(_fields(group / "memory.stat").get(name, 0) for name in files.reclaimable)
    for name in files.limits:
        limit = number(group / name)
        if limit is not None:
            yield limit - max(0, used - cached)


def _meminfo(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise OSError(f"{path} has no {field}")


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of `name number`. Returns an empty dict if the file does not exist."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
