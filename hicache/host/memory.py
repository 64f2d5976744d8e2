"""How much memory this process may still take: the machine's, bounded by its cgroups, less a reserve.

`host_budget` turns what the user asked for into bytes, once, before anything is built. Paths are parameters so that a
tree of files can stand for a machine. May import errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hicache.errors import ConfigError, OutOfMemory

RESERVE_BYTES = 1 << 30
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Controller:
    """What one generation of cgroups calls its memory files.

    `reclaimable` are the fields of `memory.stat`, over the whole subtree, of cached file pages: they count as usage,
    and the kernel drops them before it refuses anything.
    """

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, str]


# Beyond memory.high a group is not killed but throttled for good, for pinned pages cannot be taken back from it.
_V2 = _Controller(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Controller(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken now without swapping: the least of what the machine and each cgroup above us leave.

    `cgroup` is where the file systems of version 2, or the controllers of version 1, are mounted. OSError when `proc`
    does not say how much memory is free.
    """
    limits = [_meminfo(proc / "meminfo", "MemAvailable")]
    for group, files in _groups(proc / "self" / "cgroup", cgroup):
        limits.extend(_left(group, files))
    return max(0, min(limits))


def require(asked_bytes: int, knob: str, available: int | None = None) -> None:
    """Raise `OutOfMemory` naming `knob` unless `asked_bytes` and the reserve fit in `available` (None: read it)."""
    free = available_bytes() if available is None else available
    if asked_bytes + RESERVE_BYTES > free:
        raise OutOfMemory(
            f"{knob}={asked_bytes} does not fit: {free} bytes are free, {RESERVE_BYTES} stay in reserve; "
            f"lower {knob} to at most {max(0, free - RESERVE_BYTES)}"
        )


def host_budget(asked_bytes: int, ratio: float, device_bytes: int, available: int) -> int:
    """Bytes of the host tier: `asked_bytes` (host_bytes), or `ratio` (host_ratio) times the device tier; 0 for none.

    `available` is `available_bytes()`, read once for all pools together. ConfigError when both or nonsense are set,
    OutOfMemory when the tier and the reserve do not fit; both name the knob.
    """
    if asked_bytes < 0:
        raise ConfigError(f"host_bytes={asked_bytes} is below 0")
    if not (math.isfinite(ratio) and ratio >= 0):
        raise ConfigError(f"host_ratio={ratio} is no size; set it to 0 or above")
    if asked_bytes and ratio:
        raise ConfigError(f"host_bytes={asked_bytes} and host_ratio={ratio} both size the host tier; set one of them")
    if not ratio:
        if asked_bytes:
            require(asked_bytes, "host_bytes", available)
        return asked_bytes
    wanted = int(ratio * device_bytes)
    if not wanted:
        raise ConfigError(f"host_ratio={ratio} of {device_bytes} device bytes is nothing; raise host_ratio")
    if wanted + RESERVE_BYTES > available:
        most = max(0, available - RESERVE_BYTES) * 1000 // device_bytes / 1000  # rounded down, so that it does fit
        raise OutOfMemory(
            f"host_ratio={ratio} asks for {wanted} bytes, which do not fit: {available} bytes are free, "
            f"{RESERVE_BYTES} stay in reserve; lower host_ratio to at most {most}"
        )
    return wanted


def _groups(membership: Path, cgroup: Path) -> Iterator[tuple[Path, _Controller]]:
    """Each directory that may limit us, with the names of its files.

    A container often sees its own group at the mount point and reads a path of the machine in `membership`: so the
    mount point always counts, and a directory that is not there limits nothing.
    """
    yield cgroup, _V2
    yield cgroup / "memory", _V1
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # hierarchy:controllers:path, with no controllers in version 2
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield from ((group, _V2) for group in _chain(cgroup, path))
        elif "memory" in controllers.split(","):
            yield from ((group, _V1) for group in _chain(cgroup / "memory", path))


def _chain(root: Path, path: str) -> Iterator[Path]:
    """The group at `path` below `root` and its parents, `root` left out."""
    parts = [part for part in PurePosixPath(path).parts if part != "/"]
    if ".." in parts:  # outside of what this namespace shows
        return
    for depth in range(len(parts), 0, -1):
        yield root.joinpath(*parts[:depth])


def _left(group: Path, files: _Controller) -> Iterator[int]:
    """What each limit of one group leaves, cached file pages counted as free; nothing where none is set."""
    used = _number(group / files.usage)
    if used is None:
        return
    cached = sum(_fields(group / "memory.stat").get(name, 0) for name in files.reclaimable)
    for name in files.limits:
        limit = _number(group / name)
        if limit is not None:
            yield limit - max(0, used - cached)


def _meminfo(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise OSError(f"{path} has no {field}")


def _fields(path: Path) -> dict[str, int]:
    """Lines of `name number`; empty where there is no such file."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such controller, or the word "max"
        return None
