"""The control groups of this process, which limit its memory and CPU time.

Paths are parameters: tests describe a machine by a tree of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def groups(controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> Iterator[tuple[Path, int]]:
    """Yield each directory of a control group that may limit this process, with its version of control groups, 2 or 1.

    `cgroup`: mount point of the file system of version 2, or of the controllers of version 1. A container often sees
    its own group at the mount point, while /proc names the group by its path on the machine. So the mount point always
    counts, and a missing directory sets no limit.
    """
    yield cgroup, 2
    yield cgroup / controller, 1
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # hierarchy:controllers:path, with no controllers in version 2
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield from ((group, 2) for group in _chain(cgroup, path))
        elif controller in controllers.split(","):
            yield from ((group, 1) for group in _chain(cgroup / controller, path))


def _chain(root: Path, path: str) -> Iterator[Path]:
    """Yield the group at `path` below `root` and the parents of this group, without `root`."""
    parts = [part for part in PurePosixPath(path).parts if part != "/"]
    if ".." in parts:  # the group is outside this namespace
        return
    for depth in range(len(parts), 0, -1):
        yield root.joinpath(*parts[:depth])


def number(path: Path) -> int | None:
    """Return the number in a file; None if the file does not exist or has the word "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
