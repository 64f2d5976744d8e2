"""A disk that really stalls: a file system that is frozen under the store, or a device that answers no reads.

Run as a program, this file is the serving process. The test freezes the disk and thaws it when the process says that it
has served, or when it has said nothing for so long that it must be standing still (waiting.BOUND_S).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hicache import AdvancedConfig, CacheEngine, CacheRequest, DiskConfig, Lease, build_engine
from hicache.errors import ResourceExhausted
from programs import PIPE, program
from storage_pages import forget_cached
from toy_model import GEOMETRY, config
from waiting import eventually

BLKIO = Path("/sys/fs/cgroup/blkio")
NUM_STORED, NUM_SERVED, NUM_BEATS = 60, 40, 200


class Freezer(NamedTuple):
    """`freeze` stops "writes" or "reads" of the file system at `mount`, for a process; `thaw` lets them go on."""

    kind: str
    mount: Path
    freeze: Callable[[int], None]
    thaw: Callable[[], None]


def run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, check=True, text=True).stdout


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, on a loop device."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    try:
        run("mkfs.ext4", "-q", image)
        run("mount", "-o", "loop", image, mount)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root, a loop device and mkfs.ext4: {error}")
    yield mount
    run("umount", "-l", mount)


@pytest.fixture(params=["writes", "reads"])
def freezer(request: pytest.FixtureRequest, mount: Path) -> Iterator[Freezer]:
    """A file system whose writes, or reads, can be made to stall."""
    if request.param == "writes":
        with contextlib.ExitStack() as frozen:

            def freeze(pid: int) -> None:
                run("fsfreeze", "--freeze", mount)
                frozen.callback(run, "fsfreeze", "--unfreeze", mount)

            yield Freezer("writes", mount, freeze, frozen.close)
        return
    device = run("lsblk", "--noheadings", "--output", "MAJ:MIN", run("findmnt", "-no", "SOURCE", mount).strip()).strip()
    group = BLKIO / f"hicache-test-{os.getpid()}"
    limit = group / "blkio.throttle.read_bps_device"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs root and the control group blkio: {error}")

    def freeze_reads(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        limit.write_text(f"{device} 1")  # byte a second

    def thaw_reads() -> None:
        limit.write_text(f"{device} 0")

    yield Freezer("reads", mount, freeze_reads, thaw_reads)
    thaw_reads()
    eventually(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.long
def test_serving_goes_on_while_the_disk_stalls(freezer: Freezer) -> None:
    """While the disk answers no write, or no read, a job is stalled in it, requests are served to their end, another
    thread runs, lookup and stats return, and so does close; when it answers again, closing ends and the store opens."""
    said: list[str] = []
    with program(__file__, freezer.mount / "store", freezer.kind, stdin=PIPE) as child:

        def until(word: str, tell: str = "") -> None:
            print(tell, end="", file=child.stdin, flush=True)
            eventually(lambda: word in said or child.poll() is not None, lambda: said)
            assert word in said, f"the process ended after {said}"

        reader = threading.Thread(target=lambda: [said.append(line.strip()) for line in child.stdout], daemon=True)
        reader.start()
        try:
            until("ready")
            freezer.freeze(child.pid)
            until("served", "frozen\n")  # else it stands still
            until("closed")
            freezer.thaw()
            until("whole", "thawed\n")
        finally:
            freezer.thaw()


def engine_at(path: str) -> CacheEngine:
    disk = DiskConfig(path=path, budget_bytes=16 << 20)
    advanced = AdvancedConfig(disk_io_timeout_s=1.0, disk_reopen_backoff_s=1.0)
    engine = build_engine(
        config(disk=disk, advanced=advanced, prefetch_mode="best_effort", device_tokens=1024), GEOMETRY
    )
    for layer in range(GEOMETRY.layer_num):
        for buffer in engine.pool.get_kv_buffer(layer):
            buffer.random_()
    engine.start()
    return engine


def serve(engine: CacheEngine, number: int) -> None:
    tokens = np.random.default_rng(number).integers(0, 5000, 100)
    handle = engine.prefetch(f"r{number}", tokens)
    # A request is served sooner than a reader begins: until one is stalled, each waits for something to read.
    eventually(lambda: engine.poll() or handle.found_tokens or handle.ended or stalled_jobs(engine))
    engine.lookup(tokens)
    while (lease := admitted(engine, CacheRequest(f"r{number}", tokens))) is None:
        engine.poll()
    engine.commit(lease, tokens)
    engine.release(lease)
    engine.poll()
    engine.stats()


def stalled_jobs(engine: CacheEngine) -> float:
    stats = engine.stats()
    return stats["disk.reads_stalled_jobs"] + stats["disk.writes_stalled_jobs"]


def admitted(engine: CacheEngine, request: CacheRequest) -> Lease | None:
    try:
        return engine.acquire(request)
    except ResourceExhausted:
        return None


def beat(beats: list[int]) -> None:
    pause = threading.Event()
    while True:
        pause.wait(0.001)
        beats[0] += 1


def main(path: str, kind: str) -> None:
    engine = engine_at(path)
    for number in range(NUM_STORED):
        serve(engine, number)
        engine.flush()
    if kind == "reads":
        engine.close()
        engine = engine_at(path)
        for file in Path(path).glob("pages-*.dat"):
            forget_cached(file)
    os.sync()  # what was written back is write-protected from here on
    beats = [0]
    threading.Thread(target=beat, args=(beats,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    before = beats[0]
    served = 0
    # New prompts are written and asked for; old ones are read.
    while served < NUM_SERVED or not engine.stats()[f"disk.{kind}_stalled_jobs"] or beats[0] < before + NUM_BEATS:
        serve(engine, served % NUM_STORED if kind == "reads" else 1000 + served)
        served += 1
    print("served", flush=True)
    engine.close()
    print("closed", flush=True)
    sys.stdin.readline()
    disk = engine.inspect.context.disk
    assert disk is not None
    eventually(disk.close)
    engine.close()
    again = engine_at(path)
    again.check()
    again.inspect.context.disk.store.check()
    serve(again, 0)
    again.close()
    print("whole", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
