"""How much memory this process may still take: the machine's, bounded by its cgroup, less a reserve.

May import errors.
"""

from __future__ import annotations

from pathlib import Path

from hicache.errors import OutOfMemory

RESERVE_BYTES = 1 << 30


def available_bytes() -> int:
    """Bytes that can be taken now without swapping: the smallest of what the machine and the cgroups above us leave."""
    limits = [_meminfo("MemAvailable")]
    # cgroup v2: usage of this group counts against its own limit; v1 keeps the same pair under other names.
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, used = _number(Path("/sys/fs/cgroup") / limit), _number(Path("/sys/fs/cgroup") / usage)
        if most is not None and used is not None:
            limits.append(most - used)
    return max(0, min(limits))


def require(asked_bytes: int, knob: str) -> None:
    """Raise `OutOfMemory` naming `knob` unless `asked_bytes` and the reserve fit."""
    free = available_bytes()
    if asked_bytes + RESERVE_BYTES > free:
        most = max(0, free - RESERVE_BYTES)
        raise OutOfMemory(
            f"{knob}={asked_bytes} does not fit: {free} bytes are free, {RESERVE_BYTES} stay in reserve; "
            f"lower {knob} to at most {most}"
        )


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such controller, or the word "max"
        return None
