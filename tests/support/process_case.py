"""A tier over a store process, the memory that both share, and programs that write through such a tier."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hicache.storage import PageFormat, StoreLocked, open_existing
from hicache.storage.process.health import Limits
from hicache.storage.process.jobs import ReadDone, ReadJob, Stalled, WriteDone, WriteJob
from hicache.storage.process.settings import RemoteSettings, ServiceSettings
from hicache.storage.process.shared_memory import BACKUP_NUMBERS
from hicache.storage.process.stores import NO_REMOTE, StoreRequest
from hicache.stores.tier import StoreTier, open_remote, open_tier
from waiting import eventually

PAGE_BYTES, NUM_PAGES = 4096, 64
IDENTITY: dict[str, str | int] = {"model": "toy"}
LIMITS = Limits(io_timeout_s=60, reopen_backoff_s=0.01, max_reopen_backoff_s=0.05, close_s=60)
SEEDS = range(60)

# Arguments: the URL, the folder tests/support, and the action of the program after its writes.
WRITER = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from disk_case import pages
from process_case import SEEDS, Case
case = Case(sys.argv[1])
if case.tier.pid:
    os.kill(case.tier.pid, signal.SIGSTOP)
for seed in SEEDS:
    case.write(pages(seed, 32)[0], pages(0, 32)[1])
print(case.tier.pid, flush=True)
if sys.argv[3] == "leaves":
    assert not case.tier.close(0.0)
    os._exit(0)
if sys.argv[3] == "forks" and not os.fork():
    os.close(1)
time.sleep(60)
"""


def request(
    url: str,
    limits: Limits = LIMITS,
    identity: dict[str, str | int] = IDENTITY,
    remote: RemoteSettings = NO_REMOTE,
) -> StoreRequest:
    settings = ServiceSettings(readers=2, limits=limits)
    return StoreRequest(url, identity, [PageFormat(PAGE_BYTES)], settings=settings, remote=remote)


def at(folder: Path) -> str:
    return f"lmdb://{folder}?budget=64MiB"


class Case:
    """A tier and the memory that it shares with its store process, uint8 [NUM_PAGES, PAGE_BYTES]. `remote`: the remote
    store of the process. If `of` is given, the tier is the remote tier of that case's process. `clock`: the clock of
    the stores with `in_process`."""

    def __init__(
        self,
        url: str,
        limits: Limits = LIMITS,
        identity: dict[str, str | int] = IDENTITY,
        *,
        remote: RemoteSettings = NO_REMOTE,
        in_process: bool = False,
        of: Case | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._descriptor = os.memfd_create("pages")
        os.ftruncate(self._descriptor, NUM_PAGES * PAGE_BYTES)
        memory = np.frombuffer(mmap.mmap(self._descriptor, NUM_PAGES * PAGE_BYTES), np.uint8)
        asked = request(url, limits, identity, remote)
        self.tier: StoreTier = (
            open_remote(of.tier, asked) if of else open_tier(asked, in_process=in_process, clock=clock)
        )
        self.tier.share(self._descriptor, memory)
        self.memory = memory.reshape(NUM_PAGES, PAGE_BYTES)
        self._ticket, self._outcomes = 0, list[object]()

    def close(self) -> None:
        assert self.tier.close()
        os.close(self._descriptor)

    def write(
        self, keys: tuple[bytes, ...], data: tuple[np.ndarray, ...], first: int = 0, *, is_costly: bool = False
    ) -> WriteJob:
        """Copy `data` to the memory from page `first` on, and submit a write of it."""
        self._ticket += 1
        self.memory[first : first + len(keys)] = data
        job = WriteJob(self._ticket, keys, tuple(self.memory[first : first + len(keys)]), is_costly=is_costly)
        assert self.tier.writes.submit(job)
        return job

    def read(self, keys: tuple[bytes, ...], first: int = 32) -> ReadJob:
        self._ticket += 1
        self.memory[first : first + len(keys)] = 0
        target = tuple(self.memory[first : first + len(keys)])
        job = ReadJob(self._ticket, 0, keys, target, threading.Event())
        assert self.tier.reads.submit(job)
        return job

    def poll_in_silence(self) -> list:  # type: ignore[type-arg]
        """The outcomes of reads, as if the process had sent no message for an hour."""
        self.tier.last_message_s -= 3600
        return self.tier.reads.poll()

    def answer(self, poll: Callable[[], list]) -> object:
        """Wait for the next outcome."""
        while not self._outcomes:
            self._outcomes += eventually(poll, self.tier.stats)
        return self._outcomes.pop(0)

    def stored(
        self, keys: tuple[bytes, ...], data: tuple[np.ndarray, ...], *, is_costly: bool = False
    ) -> tuple[bool, ...]:
        self.write(keys, data, is_costly=is_costly)
        done = self._done(self.tier.writes.poll)
        assert isinstance(done, WriteDone)
        return done.ok

    def found(self, keys: tuple[bytes, ...], data: tuple[np.ndarray, ...]) -> tuple[bool, ...]:
        """Read the pages and compare their bytes; returns which pages were found."""
        self.read(keys)
        done = self._done(self.tier.reads.poll)
        assert isinstance(done, ReadDone)
        for i, ok in enumerate(done.ok):
            assert not ok or np.array_equal(self.memory[32 + i], data[i])
        return done.ok

    def _done(self, poll: Callable[[], list]) -> object:
        """Wait for the next outcome, even if the medium takes longer than the I/O timeout."""
        while isinstance(done := self.answer(poll), Stalled):
            continue
        return done

    @property
    def backup(self) -> dict[str, float]:
        """The statistics of the copies to the remote store."""
        self.tier.poll()
        return dict(zip(BACKUP_NUMBERS, self.tier.status.backup, strict=True))

    def until_open(self) -> None:
        eventually(lambda: self.tier.reads.poll() or self.tier.is_open, lambda: self.tier.state)


def is_free(folder: Path) -> bool:
    """Whether no process has the store of `folder` open."""
    try:
        open_existing(folder).close()
    except StoreLocked:
        return False
    return True
