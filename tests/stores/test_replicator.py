"""Pages that a store process copies to a remote store, and pages that it reads from the remote store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import hicache.storage.process.stores
import hicache.stores.tier
import process_case
from disk_case import PATIENCE_S, Clock, Gate, TroubledStore, pages
from hicache.storage import PageFormat, PageStore, StoreError, StoreUnavailable, open_store
from hicache.storage.process.jobs import LeaseDone, LeaseJob, Stalled
from hicache.storage.process.server import Server
from hicache.storage.process.settings import Backup, RemoteSettings
from hicache.storage.process.stores import OpenStores
from hicache.storage.process.transports import Transport
from hicache.storage.shared_pages import DirPages
from hicache.stores.tier import open_remote
from process_case import IDENTITY, LIMITS, PAGE_BYTES, Case, at, request
from programs import Program
from waiting import BOUND_S, eventually

KEYS, DATA = pages(1, 8)
SUPPORT = Path(process_case.__file__).parent


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def remote_at(folder: Path, backup: Backup = "all", **limits: int) -> RemoteSettings:
    return RemoteSettings(f"dir://{folder}?concurrency=2", backup, **limits)


@contextlib.contextmanager
def node(folder: Path, remote: RemoteSettings, *, in_process: bool = True) -> Iterator[tuple[Case, Case]]:
    """The local and the remote tier of a machine with its own disk."""
    with (
        closing(Case(at(folder), remote=remote, in_process=in_process)) as local,
        closing(Case(at(folder), remote=remote, in_process=in_process, of=local)) as other,
    ):
        assert local.tier.has_remote
        yield local, other


def shared_store(folder: Path) -> PageStore:
    return open_store(f"dir://{folder}", identity=IDENTITY, formats=[PageFormat(PAGE_BYTES)])


def until_copied(case: Case) -> dict[str, float]:
    """Wait until no page is queued; returns the statistics of the copies."""
    eventually(lambda: case.backup["queued_pages"] == 0, lambda: case.backup)
    return case.backup


EXPECTED: dict[Backup, tuple[bytes, ...]] = {"all": KEYS, "used": (*KEYS[:2], *KEYS[4:6]), "none": ()}


@pytest.mark.parametrize("backup", EXPECTED)
def test_the_pages_that_the_setting_names_are_copied(tmp_path: Path, shared: Path, backup: Backup) -> None:
    """The setting `used` copies pages that were costly to compute, and pages that a request used. The copied bytes are
    those of the disk."""
    expected = EXPECTED[backup]
    with node(tmp_path / "a", remote_at(shared, backup)) as (local, _):
        local.tier.used(KEYS[4:5])  # used from memory, before the page is written
        assert all(local.stored(KEYS[:2], DATA[:2], is_costly=True))
        assert all(local.stored(KEYS[2:], DATA[2:]))
        local.tier.used(KEYS[5:6])
        assert all(local.stored(KEYS[:1], DATA[:1]))  # written after the used pages
        numbers = until_copied(local)
        assert numbers["sent_pages"] == len(expected)
        assert numbers["dropped_pages"] == numbers["failed_pages"] == numbers["state"] == 0
    with closing(shared_store(shared)) as store, closing(_disk_of(tmp_path / "a")) as disk:
        assert store.contains(KEYS) == [key in expected for key in KEYS]
        assert all(store.get_value(key) == disk.get_value(key) for key in expected)
        assert sum(len(store.get_value(key) or b"") for key in expected) == numbers["sent_bytes"]


def test_a_page_of_another_machine_is_read_and_kept(tmp_path: Path, shared: Path) -> None:
    """A read of the remote store stores its pages on the local disk too. Pages on the local disk survive a restart
    without the remote store. Pages from the remote store are not copied back."""
    with node(tmp_path / "a", remote_at(shared)) as (local, _):
        assert all(local.stored(KEYS, DATA))
        until_copied(local)
    with node(tmp_path / "b", remote_at(shared)) as (local, other):
        assert not any(local.found(KEYS[:4], DATA[:4]))
        assert all(other.found(KEYS[:4], DATA[:4]))
        eventually(lambda: local.backup["filled_pages"] == 4, lambda: local.backup)
        assert all(local.found(KEYS[:4], DATA[:4]))
        assert until_copied(local)["sent_pages"] == 0
    with closing(Case(at(tmp_path / "b"), in_process=True)) as alone:
        assert not alone.tier.has_remote and all(alone.found(KEYS[:4], DATA[:4]))


def test_wrong_bytes_of_the_remote_store_stay_there(tmp_path: Path, shared: Path) -> None:
    """A damaged page of the remote store is a miss, is counted, and does not reach the local disk."""
    with node(tmp_path / "a", remote_at(shared)) as (local, _):
        assert all(local.stored(KEYS, DATA))
        until_copied(local)
    files = {file for file in shared.rglob("*") if file.is_file() and file.suffix != ".json"}
    assert len(files) == len(KEYS)
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with node(tmp_path / "b", remote_at(shared)) as (local, other):
        for key, page in zip(KEYS, DATA, strict=True):
            assert other.found((key,), (page,)) == (False,)
        assert other.tier.stats().corrupt == len(KEYS)
        assert not any(local.found(KEYS, DATA)) and local.backup["filled_pages"] == 0


def test_a_page_that_was_removed_is_copied_again(tmp_path: Path, shared: Path) -> None:
    """For an hour, a page that was copied is not looked up again. Later uses copy it again if it was removed from the
    remote store."""
    clock = Clock()
    with closing(Case(at(tmp_path / "a"), remote=remote_at(shared), in_process=True, clock=clock)) as local:
        assert all(local.stored(KEYS, DATA))
        assert until_copied(local)["sent_pages"] == len(KEYS)
        assert DirPages(str(shared)).prune(0).removed == len(KEYS)
        assert all(local.found(KEYS, DATA))
        assert until_copied(local)["sent_pages"] == len(KEYS)
        clock.now_s += 3601
        assert all(local.found(KEYS[:3], DATA[:3]))
        assert until_copied(local)["sent_pages"] == len(KEYS) + 3
    with closing(shared_store(shared)) as store:
        assert store.contains(KEYS) == [True] * 3 + [False] * 5


@pytest.mark.parametrize("limits", [{"max_queued_pages": 3}, {"max_queued_bytes": 3 * PAGE_BYTES}], ids=str)
def test_the_queue_has_limits_and_waits_for_a_store_that_is_absent(tmp_path: Path, limits: dict[str, int]) -> None:
    """Pages beyond the limits of the queue are dropped and counted. Queued pages are copied when the remote store can
    be opened."""
    absent = tmp_path / "absent"
    with closing(Case(at(tmp_path / "a"), remote=remote_at(absent, **limits), in_process=True)) as local:
        assert all(local.stored(KEYS, DATA))
        eventually(lambda: local.backup["dropped_pages"] == 5, lambda: local.backup)
        assert local.backup["queued_pages"] == 3 and local.backup["queued_bytes"] == 3 * PAGE_BYTES
        assert local.backup["state"] == 2 and all(local.found(KEYS, DATA))
        absent.mkdir()
        assert until_copied(local)["sent_pages"] == 3
    with closing(shared_store(absent)) as store:
        assert store.contains(KEYS).count(True) == 3


def test_a_thread_that_cannot_start_delays_copies(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system refuses the threads of the remote store at first, pages are copied after the next attempt."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("hicache-remote-") and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with closing(Case(at(tmp_path / "a"), remote=remote_at(shared), in_process=True)) as local:
        assert all(local.stored(KEYS, DATA))
        assert until_copied(local)["sent_pages"] == len(KEYS) and refused


def test_a_remote_store_that_fails_costs_copies_alone(tmp_path: Path, shared: Path) -> None:
    """Failed copies are counted and open the breaker, while the local store works. When the remote store works again,
    later pages are copied."""
    with node(tmp_path / "a", remote_at(shared)) as (local, other):
        assert all(local.stored(KEYS[:1], DATA[:1]))
        assert until_copied(local)["sent_pages"] == 1
        (namespace,) = (shared / "hicache").iterdir()
        namespace.rename(shared / "away")
        namespace.write_text("no folder")
        for key, page in zip(KEYS[1:4], DATA[1:4], strict=True):
            assert all(local.stored((key,), (page,)))
            until_copied(local)
        assert local.backup["failed_pages"] == 3 and local.backup["state"] == 2
        # These hits queue the failed pages again.
        assert all(local.found(KEYS[:4], DATA[:4])) and not any(other.found(KEYS[:1], DATA[:1]))
        namespace.unlink()
        (shared / "away").rename(namespace)
        assert all(local.stored(KEYS[4:], DATA[4:]))
        assert until_copied(local)["state"] == 0
    with closing(shared_store(shared)) as store:
        assert all(store.contains((KEYS[0], *KEYS[4:])))


def test_a_remote_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """An unknown scheme of the remote store is refused when the local store opens. A remote tier is refused if its
    process has no remote store."""
    with pytest.raises(StoreError, match="unknown scheme"):
        Case(at(tmp_path / "a"), remote=RemoteSettings("nothing://at-all"), in_process=True)
    with closing(Case(at(tmp_path / "b"), in_process=True)) as local:
        with pytest.raises(StoreError, match="no remote store"):
            open_remote(local.tier, request(at(tmp_path / "b")))
        with pytest.raises(ValueError, match="backup"):
            RemoteSettings("s3://bucket", "sometimes")  # type: ignore[arg-type]


def test_one_machine_of_many_gets_a_lease(tmp_path: Path, shared: Path) -> None:
    """Two machines see the same lease of the remote store through their processes. A disk has no leases."""
    until_s = time.time() + 1000

    def lease(case: Case, until_s: float = 0.0) -> tuple[bool, float]:
        assert case.tier.reads.submit(LeaseJob(7, b"prompt", until_s))
        done = case.answer(case.tier.reads.poll)
        assert isinstance(done, LeaseDone) and done.ticket == 7
        return done.has_begun, done.until_s

    with node(tmp_path / "a", remote_at(shared)) as (disk, one), node(tmp_path / "b", remote_at(shared)) as (_, other):
        assert lease(one) == lease(other) == (False, 0.0)
        assert lease(one, until_s) == (True, until_s)
        assert lease(other, until_s + 5) == lease(one, until_s + 5) == (False, pytest.approx(until_s, abs=1e-3))
        assert lease(disk, until_s) == (False, 0.0)


@pytest.mark.store_process
def test_one_process_serves_both_stores_of_a_machine(tmp_path: Path, shared: Path) -> None:
    """One store process of an engine serves both stores. After the process was killed, the disk tier and the remote
    tier return, copies continue, and no page is wrong."""
    with node(tmp_path / "a", remote_at(shared), in_process=False) as (local, other):
        assert other.tier.pid == 0 and all(local.stored(KEYS[:4], DATA[:4]))
        until_copied(local)
        assert all(other.found(KEYS[:4], DATA[:4]))
        local.tier._transport.end()
        eventually(lambda: (local.tier.poll(), other.tier.poll(), local.tier.times_lost and other.tier.times_lost)[2])
        local.until_open()
        other.until_open()
        assert all(local.found(KEYS[:4], DATA[:4])) and all(local.stored(KEYS[4:], DATA[4:]))
        until_copied(local)
        assert all(other.found(KEYS, DATA))


class ThreadAsProcess(Transport):
    """Starts a thread that serves like a store process of an engine."""

    def __init__(self) -> None:
        self._thread = threading.Thread()

    def connect(self) -> socket.socket:
        client_end, server_end = socket.socketpair()
        server = Server(OpenStores())
        server.add(server_end)
        self._thread = threading.Thread(target=server.run, daemon=True)
        self._thread.start()
        return client_end

    def has_ended(self) -> bool:
        return not self._thread.is_alive()


@pytest.mark.parametrize("verb", ["get_into", "contains", "open"])
def test_a_disk_is_closed_while_its_remote_store_hangs(
    verb: str, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a call to the remote store does not return, the process still closes its disk and ends."""
    gate, before = Gate(verb), {*threading.enumerate()}

    def troubled(url: str, **about: Any) -> PageStore:
        if url.startswith("lmdb:"):
            return open_store(url, **about)
        gate("open")
        if verb == "open":
            raise StoreUnavailable("the server was shut down")
        store = TroubledStore(open_store(url, **about))
        store.trouble = gate
        return store

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", troubled)
    monkeypatch.setattr(hicache.stores.tier, "OwnProcess", ThreadAsProcess)
    remote, limits = remote_at(shared, "none"), dataclasses.replace(LIMITS, open_s=0.05)
    with closing(Case(at(tmp_path / "a"), remote=remote)) as local:
        assert all(local.stored(KEYS, DATA))
        other = Case(at(tmp_path / "a"), limits, remote=remote, of=local)
        if verb != "open":
            other.until_open()
            assert other.tier.find(KEYS, 0.0) is None if verb == "contains" else other.read(KEYS)
        eventually(lambda: gate.held)
        assert not other.tier.close(0.0)
        assert local.tier.close(BOUND_S / 2)  # the gate opens after BOUND_S
        gate.open()
        eventually(lambda: {*threading.enumerate()} <= before, threading.enumerate)
    with closing(_disk_of(tmp_path / "a")) as disk:
        assert all(disk.contains(KEYS))


def hang_reads(folder: Path) -> None:
    """Store a page in the shared store of `folder`. A read of this page never returns."""
    with closing(shared_store(folder)) as store:
        assert all(store.put([(KEYS[0], DATA[0])]))
    (file,) = folder.rglob(KEYS[0].hex())
    file.unlink()
    os.mkfifo(file)  # opening it never returns


# Arguments: the folder of the disk, the URL of the remote store, the folder tests/support, the folder of a plug-in, and
# the call to the remote store that hangs.
HANGING_ENGINE = """
import dataclasses, os, sys, time
sys.path[:0] = sys.argv[3:5]
import process_case
from disk_case import PATIENCE_S, Clock, pages
from hicache.storage.process.settings import RemoteSettings, ServiceSettings
remote = RemoteSettings(sys.argv[2], "none")
keys, data = pages(1, 8)
local = process_case.Case(sys.argv[1], remote=remote)
assert all(local.stored(keys, data))
settings = ServiceSettings.of_remote(remote.url)
if sys.argv[5] == "open":
    settings = dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, open_s=0.05))
local_request = process_case.request
process_case.request = lambda *about: dataclasses.replace(local_request(*about), settings=settings)
other = process_case.Case(sys.argv[1], remote=remote, of=local)
if sys.argv[5] == "read":
    other.until_open()
    other.read(keys[:1])
    other.answer(other.tier.reads.poll)
print(local.tier.pid, flush=True)
time.sleep(60)
"""


# Arguments: the URL of the remote store, the folder tests/support, and the folder of the plug-in, whose store never
# answers a find.
ASKING_ENGINE = """
import sys, time
sys.path[:0] = sys.argv[2:4]
from disk_case import pages
from process_case import Case
case = Case(sys.argv[1])
keys, data = pages(1, 8)
assert all(case.stored(keys, data))
case.tier.find(keys, 0.0)
print(case.tier.pid, flush=True)
time.sleep(60)
"""
HANGING_STORE = """
import threading
from disk_case import TroubledStore
from hicache.storage.urls import open_store
def opener(url, **about):
    if url.endswith("//open"):
        threading.Event().wait()
    store = TroubledStore(open_store(url.replace("hanging:", "dir:"), **about))
    store.trouble = lambda verb: threading.Event().wait() if verb == "contains" else None
    return store
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with an installed package whose store never answers a find, or never opens at `hanging://open`."""
    info = tmp_path / "site/hanging-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hicache.stores]\nhanging = hanging:opener\n")
    (info.parent / "hanging.py").write_text(HANGING_STORE)
    return info.parent


@pytest.mark.long
@pytest.mark.store_process
@pytest.mark.parametrize("call", ["read", "open"])
def test_a_remote_store_that_hangs_keeps_no_process(call: str, tmp_path: Path, shared: Path, plugin: Path) -> None:
    """If a read or the open of the remote store never returns, the store process closes its disk and ends after its
    engine."""
    hang_reads(shared)
    url = f"dir://{shared}" if call == "read" else "hanging://open"
    _wait_for_end_after_kill(HANGING_ENGINE, at(tmp_path / "a"), url, SUPPORT, plugin, call)
    with closing(_disk_of(tmp_path / "a")) as disk:
        assert all(disk.contains(KEYS))


@pytest.mark.long
@pytest.mark.store_process
def test_a_remote_store_alone_that_hangs_keeps_no_process(shared: Path, plugin: Path) -> None:
    """If there is no disk, and a find of the remote store never returns, the store process ends after its engine."""
    _wait_for_end_after_kill(ASKING_ENGINE, f"hanging://{shared}", SUPPORT, plugin)


def _wait_for_end_after_kill(code: str, *arguments: object) -> None:
    """Run an engine that prints the process id of its store process, kill the engine, and wait for the end of the store
    process."""
    with Program(code, *arguments) as engine:
        assert engine.stdout is not None
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)


@pytest.mark.store_process
def test_a_served_store_has_a_remote(tmp_path: Path, shared: Path) -> None:
    """With `hicache store serve --remote`, all clients of the machine share its remote store, whatever remote store
    they request."""
    path = tmp_path / "run" / "hicache.sock"
    code = "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"
    flags = ("--socket", path, "--remote", f"dir://{shared}", "--backup", "all")
    with Program(code, "store", "serve", at(tmp_path / "root"), *flags) as program:
        eventually(path.is_socket)
        with node_of(f"unix:{path}") as (local, other):
            assert local.tier.has_remote and all(local.stored(KEYS, DATA))
            until_copied(local)
            assert all(other.found(KEYS, DATA))
        program.send_signal(signal.SIGTERM)
        program.communicate()
        assert program.returncode == 0
    with closing(shared_store(shared)) as store:
        assert store.contains(KEYS) == [True] * len(KEYS)


@pytest.mark.store_process
def test_a_served_store_ends_while_its_remote_store_hangs(tmp_path: Path, shared: Path) -> None:
    """If a read of the remote store never returns, `hicache store serve` still ends on SIGTERM, and its disk is
    closed."""
    hang_reads(shared)
    path = tmp_path / "run" / "hicache.sock"
    code = (
        "import sys; from hicache.cli import main; import hicache.storage.process.closing as closing\n"
        "closing._REMOTE_CLOSE_S = 0.1\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    limits = dataclasses.replace(LIMITS, io_timeout_s=0.1)
    with Program(
        code, "store", "serve", at(tmp_path / "root"), "--socket", path, "--remote", f"dir://{shared}"
    ) as program:
        eventually(path.is_socket)
        with closing(Case(f"unix:{path}")) as local:
            local.until_open()
            assert all(local.stored(KEYS, DATA))
            other = Case(f"unix:{path}", limits, of=local)
            other.until_open()
            other.read(KEYS[:1])
            assert isinstance(other.answer(other.tier.reads.poll), Stalled)
            assert not other.tier.close(0.0)
        program.send_signal(signal.SIGTERM)
        program.communicate()
        assert program.returncode == 0 and not path.exists()
    with closing(_disk_of(tmp_path / "root")) as disk:
        assert all(disk.contains(KEYS))


@contextlib.contextmanager
def node_of(url: str) -> Iterator[tuple[Case, Case]]:
    with closing(Case(url)) as local:
        local.until_open()  # the socket exists shortly before the process accepts clients
        with closing(Case(url, of=local)) as other:
            yield local, other


def _disk_of(folder: Path) -> PageStore:
    (store,) = (each for each in folder.iterdir() if each.is_dir())
    return open_store(at(store), identity=IDENTITY, formats=[PageFormat(PAGE_BYTES)])
