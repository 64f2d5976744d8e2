"""Runs programs that serve, each in its own process: they read a task, and write a result and files."""

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
    """Run `python -m <module>` with a task as JSON on its standard input; returns the JSON of the task's file `result`.

    BenchUnavailable if it wrote no result; then the end of its log is printed. After `patience_s` it is killed, and a
    result that it wrote before counts.
    """
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            cwd=folder,  # `-m` looks for modules in the working directory first; a checkout has a folder hicache
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
    """The type of a folder's file system, such as "ext4" or "tmpfs"."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = {Path(point): kind for point, kind in mounts if folder.resolve().is_relative_to(point)}
    return around[max(around, key=lambda point: len(point.parts))]


def drop_files(folder: Path, known: dict[Path, int] | None = None) -> None:
    """Drop all files below a folder from the kernel's page cache. Only pages that are on the disk can be dropped, so
    files are written to the disk first, unless `known` has their present time of modification."""
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
    """Within the block, drop the files below a folder from the kernel's page cache once a second, as if memory were
    full."""
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
