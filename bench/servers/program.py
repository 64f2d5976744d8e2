"""Programs that serve, each in a process of its own: they get a task and leave a result, and files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable

_EVERY_S = 1.0


def run_program(
    module: str, name: str, task: Mapping[str, Any], environment: Mapping[str, str], folder: Path, patience_s: float
) -> Any:
    """What `python -m <module>` has written into the file `result` of its task, which it reads as JSON.

    BenchUnavailable where it wrote nothing; the end of its log is printed. After `patience_s` it is killed, and what it
    had written until then counts.
    """
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            cwd=folder,  # `-m` looks for modules there first: in a checkout it would find a folder hicache
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps({**task, "result": str(result)}).encode(), timeout=patience_s)
        except subprocess.TimeoutExpired:
            out.write(f"\nnot done after {patience_s:.0f} s".encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
            process.wait()
    if not result.exists():
        print(*log.read_text(errors="replace").splitlines()[-40:], sep="\n", file=sys.stderr)
        raise BenchUnavailable(f"{name} is not served: the end of its log is above")
    return json.loads(result.read_text(encoding="utf-8"))


def file_system(folder: Path) -> str:
    """The type of what a folder lies on, such as "ext4" or "tmpfs"."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = {Path(point): kind for point, kind in mounts if folder.resolve().is_relative_to(point)}
    return around[max(around, key=lambda point: len(point.parts))]


def drop_files(folder: Path, known: dict[Path, int] | None = None) -> None:
    """Have all files below a folder leave the system's memory. `known`: when those were written that are on the disk by
    now; the others are written there first, since only such pages leave."""
    known = {} if known is None else known
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
            written = os.fstat(file.fileno()).st_mtime_ns
            if known.get(path) != written:
                os.fdatasync(file.fileno())
                known[path] = written
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def files_dropped(folder: Path) -> Iterator[None]:
    """Meanwhile the files below a folder leave the system's memory once a second, as where it is full."""
    stop, known = threading.Event(), dict[Path, int]()

    def drop() -> None:
        while not stop.wait(_EVERY_S):
            drop_files(folder, known)

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
