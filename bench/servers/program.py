"""Runs the programs that serve, each in a separate process. A program reads a task, and writes a result and files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable

_USED = 0.7  # share of the free disk space that hicache's disk tier may use


def run_program(
    module: str, name: str, task: Mapping[str, Any], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> Any:
    """Run `python -m <module>` with a task as JSON on the program's standard input. Return the parsed JSON of the file
    that the task names as `result`.

    If the program wrote no result, print the errors and the end of its log, and raise BenchUnavailable. After
    `timeout_s` the program is killed, but a result that it wrote before that is returned.
    """
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            cwd=folder,  # `-m` searches the working directory first, and a checkout has a folder hicache
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps({**task, "result": str(result)}).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            out.write(f"\nnot done after {timeout_s:.0f} s".encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills its workers
            process.wait()
    if not result.exists():
        lines = log.read_text(errors="replace").splitlines()
        causes = [line for line in lines[:-40] if "Error" in line]  # errors of other processes, often far from the end
        print(*causes[-20:], *lines[-40:], sep="\n", file=sys.stderr)
        raise BenchUnavailable(f"{name} is not served: errors and the end of its log are above")
    return json.loads(result.read_text(encoding="utf-8"))


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as "ext4" or "tmpfs"."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = {Path(point): kind for point, kind in mounts if folder.resolve().is_relative_to(point)}
    return around[max(around, key=lambda point: len(point.parts))]


def disk_settings(mode: str, small: bool, folder: Path) -> dict[str, Any]:
    """Return the settings of hicache's disk tier. A mode that ends with "-always" loads all pages that it finds. A mode
    that ends with "-never" loads none after it has measured the disk. With a tiny model, which computes faster than a
    disk reads, all other modes also load all pages."""
    speed = {"always": 0.0, "never": 1e12}.get(mode.rpartition("-")[2], 0.0 if small else None)
    budget = max(1, min(100, int(shutil.disk_usage(folder).free * _USED / 1e9)))
    return {"budget": f"{budget}GB", **({} if speed is None else {"prefill_tokens_per_s": speed})}
