"""Kernels, containers and file systems that refuse a call: the disk tier works without it, or its error names a
remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.errors import OutOfMemory
from hicache.host.arena import PinnedArena
from hicache.storage import StoreError
from hicache.storage.slot_file import SlotFile
from programs import Program
from storage_pages import found_numbers, open_store, put_numbers

# Arguments: an error, the transport of the store, its path, and the refused calls.
PROGRAM = """
import gc, logging, os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[1])))
import numpy as np
from hicache import CacheRequest, DiskConfig, build_engine
from hicache.storage import StoreError
from refusals import refuse
from toy_model import GEOMETRY, config, serve
logging.basicConfig(format="%(levelname)s %(message)s")
error, transport, path, calls = int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:]
if not refuse(error, *calls):
    print("not to be had")
    sys.exit()
tokens, held = np.arange(90) % 50, len(os.listdir("/proc/self/fd"))
for turn in range(2):
    disk = DiskConfig(path=path, budget_bytes=8 << 20, transport=transport)
    try:
        with build_engine(config(disk=disk, prefetch_mode="wait_complete"), GEOMETRY) as engine:
            handle = engine.prefetch("a", tokens)
            while not handle.ended:
                engine.poll()
            print("served", serve(engine, "a", tokens).hit.disk)
            engine.flush()
    except StoreError as error:
        print("StoreError", error)
engine = handle = None
gc.collect()
print("left", len(os.listdir("/proc/self/fd")) - held)
"""
SUPPORT = Path(__file__).parent.parent / "support"
UNNEEDED = ("memfd_create", "fallocate", "fsync", "fdatasync", "madvise", "sched_getaffinity", "sched_setaffinity")


def outputs_of(error: int, transport: str, path: Path, *calls: str) -> tuple[list[str], list[str]]:
    """The lines that the program prints, and the lines that it logs."""
    with Program(PROGRAM, SUPPORT / "x", error, transport, path, *calls) as program:
        printed, logged = program.communicate()
    assert program.returncode == 0, logged
    if printed.startswith("not to be had"):
        pytest.skip("seccomp is not to be had here")
    return printed.splitlines(), logged.splitlines()


@pytest.mark.store_process
@pytest.mark.parametrize("error", [errno.EPERM, pytest.param(errno.ENOSYS, marks=pytest.mark.long)])
def test_calls_that_are_not_needed_may_be_refused(error: int, tmp_path: Path) -> None:
    """Without these calls an engine still stores its pages and finds them again. Each process logs once what it
    loses."""
    printed, logged = outputs_of(error, "process", tmp_path / "s", *UNNEEDED)
    assert printed == ["served 0", "served 88", "left 0"], (printed, logged)
    warnings = [line for line in logged if "WARNING" in line]
    for words in ("memfd_create is refused", "cannot flush writes to its disk"):
        assert 1 <= sum(words in line for line in warnings) <= 3, logged  # of the engine and each of its processes
    assert all("refused" in line or "cannot flush" in line for line in warnings), warnings


@pytest.mark.store_process
@pytest.mark.parametrize("error", [errno.EPERM, pytest.param(errno.ENOSYS, marks=pytest.mark.long)])
def test_a_store_process_that_cannot_be_watched_is_refused(error: int, tmp_path: Path) -> None:
    """Without pidfd_open the error names the call and the remedy, and no descriptor stays open. A store in threads
    works."""
    printed, _ = outputs_of(error, "process", tmp_path / "s", "pidfd_open")
    assert printed[2:] == ["left 0"]
    for line in printed[:2]:
        assert line.startswith("StoreError") and "pidfd_open" in line and "transport=inline" in line, line
    assert outputs_of(error, "inline", tmp_path / "s", "pidfd_open")[0] == ["served 0", "served 88", "left 0"]


def refused(error: int, *, always: bool = True) -> Callable[..., object]:
    """A call that fails: for every argument if `always`, otherwise only for folders."""

    def call(descriptor: int, *_: object) -> None:
        if always or os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(error, os.strerror(error))

    return call


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP])
def test_a_file_system_may_lack_calls(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a file system that cannot sync folders, reserve space, free single slots or read directly, a store keeps its
    pages. The store logs once that a power failure may lose some."""
    monkeypatch.setattr(os, "fsync", refused(error, always=False))
    monkeypatch.setattr(os, "posix_fallocate", refused(error))
    monkeypatch.setattr(SlotFile, "_punch", lambda *_: False)
    for turn in range(2):
        store = open_store(tmp_path / "s")
        if not turn:
            assert put_numbers(store, range(300)) == [True] * 300
        assert len(found_numbers(store, range(300))) == 300
        store.check()
        store.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"], caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refused(errno.EIO))
        store = open_store(tmp_path / "t")
        assert put_numbers(store, [1]) == [False] and store.stats().read_only
        store.close()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks is refused with an error that names the path."""
    monkeypatch.setattr("fcntl.flock", refused(error))
    with pytest.raises(StoreError, match=str(tmp_path)):
        open_store(tmp_path / "s")


def test_shared_memory_that_is_too_small_is_no_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memfd_create is refused and /dev/shm is too small, as in a container, the error names the setting, the call
    and the size of /dev/shm. Otherwise the process would end when it touches missing memory."""
    monkeypatch.setattr(os, "memfd_create", refused(errno.EPERM))
    monkeypatch.setattr(os, "pwrite", refused(errno.ENOSPC))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OutOfMemory, match=r"memfd_create.*/dev/shm.*--shm-size.*lower host_bytes"):
        PinnedArena(4, 4096, pin=False, shared=True)
    assert os.listdir("/proc/self/fd") == before
