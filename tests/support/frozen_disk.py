"""An engine with a store process on a disk that really stalls: a file system that is frozen, or a device that answers
no reads.

It needs root, a loop device and mkfs.ext4. As a program it is the engine's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hicache import AdvancedConfig, CacheEngine, CacheRequest, DiskConfig, Lease, build_engine
from hicache.errors import ResourceExhausted
from hicache.storage import PageFormat, open_existing, store_at
from hicache.storage.process.health import Limits
from hicache.storage.process.jobs import PageRows
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.stores import StoreRequest
from hicache.storage.store_files import INDEX_FILE
from hicache.stores.tier import open_tier
from programs import PIPE, program
from storage_pages import forget_cached
from toy_model import GEOMETRY, config, flush_error
from waiting import BOUND_S, eventually

BLKIO = Path("/sys/fs/cgroup/blkio")
NUM_STORED, NUM_TOKENS = 60, 100
KINDS = ("writes", "reads")


class Unavailable(Exception):
    """What is missing to freeze a disk."""


def run(*command: object) -> str:
    try:
        return subprocess.run([str(word) for word in command], capture_output=True, check=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"needs root, a loop device and mkfs.ext4: {error}") from error


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """A file system of its own, on a loop device."""
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", image)
    run("mount", "-o", "loop", image, mount)
    try:
        yield mount
    finally:
        run("umount", "-l", mount)


@contextlib.contextmanager
def frozen(kind: str, mount: Path, pid: int) -> Iterator[None]:
    """Writes to the file system, or reads of it by a process, do not end before the end of the block."""
    if kind == "writes":
        run("fsfreeze", "--freeze", mount)
        try:
            yield
        finally:
            run("fsfreeze", "--unfreeze", mount)
        return
    device = run("lsblk", "--noheadings", "--output", "MAJ:MIN", run("findmnt", "-no", "SOURCE", mount).strip()).strip()
    group = BLKIO / f"hicache-test-{os.getpid()}"
    limit = group / "blkio.throttle.read_bps_device"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise Unavailable(f"needs root and the control group blkio: {error}") from error
    limit.write_text(f"{device} 1")  # byte a second
    try:
        yield
    finally:
        limit.write_text(f"{device} 0")
        eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def observe(kind: str, folder: Path, num_requests: int) -> dict[str, int]:
    """Serve `num_requests` while the disk stalls, close the engine and end its process; when the disk answers again,
    the store opens, with all that the engine was told is stored. Returns how many requests were served meanwhile, and
    how many pages jobs kept. Raises Unavailable."""
    with mounted(folder) as mount, program(__file__, mount / "store", kind, num_requests, stdin=PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        pid, stored = json.loads(child.stdout.readline())
        with frozen(kind, mount, pid):
            print(file=child.stdin, flush=True)
            served: dict[str, int] = json.loads(child.stdout.readline())  # else the engine stands still
            assert child.wait(BOUND_S) == 0
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        assert (store_at(mount / "store") / INDEX_FILE).exists(), "what the engine closed was not closed"
        with contextlib.closing(open_existing(mount / "store")) as store:
            store.check()
            assert stored and all(store.contains([bytes.fromhex(key) for key in stored]))
        with engine_at(mount / "store") as again:
            handle = again.prefetch("again", tokens_of(0), mode="wait_complete")
            eventually(lambda: again.poll() or handle.ready)
            assert handle.found_tokens == NUM_TOKENS // 8 * 8
    return served


def tokens_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 5000, NUM_TOKENS)


def engine_at(path: Path) -> CacheEngine:
    disk = DiskConfig(path=str(path), budget_bytes=16 << 20)
    advanced = AdvancedConfig(disk_io_timeout_s=1.0, disk_reopen_backoff_s=1.0)
    engine = build_engine(config(disk=disk, advanced=advanced, device_tokens=1024), GEOMETRY)
    for layer in range(GEOMETRY.layer_num):
        for buffer in engine.pool.get_kv_buffer(layer):
            buffer.random_()
    return engine


class ServingEngine:
    """Calls an engine as a scheduler does."""

    def __init__(self, path: Path) -> None:
        self.engine = engine_at(path)
        self.engine.start()
        disk = self.engine.inspect.context.disk
        assert disk is not None
        self.disk = disk

    def serve(self, number: int) -> None:
        """To its end: what a stalled job should have brought is computed."""
        engine, name, tokens = self.engine, f"r{number}", tokens_of(number)
        handle = engine.prefetch(name, tokens, mode="wait_complete")
        eventually(lambda: engine.poll() or handle.ready)
        engine.lookup(tokens, disk_wait_s=0.0)
        lease = eventually(lambda: self._admitted(CacheRequest(name, tokens)))
        engine.commit(lease, tokens)
        engine.release(lease)
        engine.poll()
        engine.stats()

    def _admitted(self, request: CacheRequest) -> Lease | None:
        try:
            return self.engine.acquire(request)
        except ResourceExhausted:
            self.engine.poll()
            return None

    def quarantined(self) -> int:
        """How many pages stalled jobs have; none of them is free."""
        queues = (self.disk.reads, self.disk.writes)
        of_jobs = [job.pages for queue in queues for job in queue.under_way.values()]
        pages = [row for rows in of_jobs if isinstance(rows, PageRows) for row in rows.rows]
        host = self.engine.inspect.context.full.host
        free = host.alloc(host.available())
        assert free is not None and not {*pages} & {*free}
        host.free(free)
        return len(pages)


def serve(path: Path, kind: str, num_requests: int) -> None:
    """The program of the engine: serves from its first line of input on."""
    serving = ServingEngine(path)
    for number in range(NUM_STORED):
        serving.serve(number)
        serving.engine.flush()
    tree = serving.engine.inspect.context.tree
    keys = [tree.names.of_prompt(tree.match(tokens_of(n), ""), tokens_of(n)) for n in range(NUM_STORED)]
    serving.engine.close()
    serving = ServingEngine(path)
    for file in path.iterdir():
        forget_cached(file)
    os.sync()  # what was written back is write-protected from here on
    print(json.dumps([serving.disk.pid, [key.hex() for each in keys for key in each]]), flush=True)
    sys.stdin.readline()
    num_served = 0
    # New prompts are written and asked for; old ones are read.
    while num_served < num_requests or not serving.engine.stats()[f"disk.{kind}_stalled_jobs"]:
        serving.serve(num_served % NUM_STORED if kind == "reads" else 1000 + num_served)
        num_served += 1
    flush_error(serving.engine)
    serving.engine.check()
    quarantined = serving.quarantined()
    if kind == "writes":
        opens_late(path.with_name("another"))
    serving.engine.close()
    print(json.dumps({"requests": num_served, "quarantined": quarantined}), flush=True)


def opens_late(path: Path) -> None:
    """A store that does not come to its end of being opened holds nobody up, in the beginning or at the end."""
    settings = ServiceSettings(limits=Limits(open_s=0.2))
    tier = open_tier(
        StoreRequest(f"lmdb://{path}?budget=8MiB", {"model": "toy"}, [PageFormat(4096)], settings=settings)
    )
    assert tier.find([b"key"], 60) is None
    tier.abandon(0.1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
