"""The store in a process of its own: the same bytes, and misses in place of waits, whatever becomes of the process."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import select
import signal
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache.storage.process.stores
from disk_case import PATIENCE_S, Gate, TroubledStore, pages
from hicache.storage import LmdbPageStore, PageFormat, StoreCorrupt, StoreError, StoreLocked, open_existing, open_store
from hicache.storage.process import frames
from hicache.storage.process.frames import _COUNT, NO_PAGES, Kind, Pages
from hicache.storage.process.health import Limits
from hicache.storage.process.jobs import FindJob, ReadDone, ReadJob, Stalled, WriteDone, WriteJob
from hicache.storage.process.service import ServiceSettings
from hicache.storage.process.stores import OpenStores, StoreRequest
from hicache.stores import StoreTier, open_tier
from programs import PIPE, Program
from waiting import eventually

PAGE_BYTES, NUM_PAGES = 4096, 64
IDENTITY = {"model": "toy"}
LIMITS = Limits(io_timeout_s=60, reopen_backoff_s=0.01, max_reopen_backoff_s=0.05, close_s=60)
pytestmark = pytest.mark.store_process


def request(url: str, limits: Limits = LIMITS, identity: dict[str, str | int] = IDENTITY) -> StoreRequest:
    return StoreRequest(url, identity, [PageFormat(PAGE_BYTES)], settings=ServiceSettings(readers=2, limits=limits))


def at(folder: Path) -> str:
    return f"lmdb://{folder}?budget=64MiB"


class Case:
    """A tier and the memory that it shares with its process, uint8 [NUM_PAGES, PAGE_BYTES]."""

    def __init__(self, url: str, limits: Limits = LIMITS, identity: dict[str, str | int] = IDENTITY) -> None:
        self._descriptor = os.memfd_create("pages")
        os.ftruncate(self._descriptor, NUM_PAGES * PAGE_BYTES)
        memory = np.frombuffer(mmap.mmap(self._descriptor, NUM_PAGES * PAGE_BYTES), np.uint8)
        self.tier: StoreTier = open_tier(request(url, limits, identity))
        self.tier.share(self._descriptor, memory)
        self.memory = memory.reshape(NUM_PAGES, PAGE_BYTES)
        self._ticket = 0

    def close(self) -> None:
        assert self.tier.close()
        os.close(self._descriptor)

    def write(self, keys: tuple[bytes, ...], data: tuple[np.ndarray, ...], first: int = 0) -> WriteJob:
        """Submit a write from the pages of the memory at `first`."""
        self._ticket += 1
        self.memory[first : first + len(keys)] = data
        job = WriteJob(self._ticket, keys, tuple(self.memory[first : first + len(keys)]))
        assert self.tier.writes.submit(job)
        return job

    def read(self, keys: tuple[bytes, ...], first: int = 32) -> ReadJob:
        self._ticket += 1
        self.memory[first : first + len(keys)] = 0
        target = tuple(self.memory[first : first + len(keys)])
        job = ReadJob(self._ticket, 0, keys, target, threading.Event())
        assert self.tier.reads.submit(job)
        return job

    def answer(self, poll: Callable[[], list]) -> object:
        """The next outcome."""
        found: list = []
        eventually(lambda: found.extend(poll()) or found, self.tier.stats)
        assert len(found) == 1, found
        return found[0]

    def stored(self, keys: tuple[bytes, ...], data: tuple[np.ndarray, ...]) -> tuple[bool, ...]:
        self.write(keys, data)
        done = self.answer(self.tier.writes.poll)
        assert isinstance(done, WriteDone)
        return done.ok

    def found(self, keys: tuple[bytes, ...], data: tuple[np.ndarray, ...]) -> tuple[bool, ...]:
        """Which pages came back; those have the right bytes."""
        self.read(keys)
        done = self.answer(self.tier.reads.poll)
        assert isinstance(done, ReadDone)
        for i, ok in enumerate(done.ok):
            assert not ok or np.array_equal(self.memory[32 + i], data[i])
        return done.ok

    def until_open(self) -> None:
        eventually(lambda: self.tier.reads.poll() or self.tier.is_open, lambda: self.tier.state)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with contextlib.closing(Case(at(tmp_path / "s"))) as case:
        yield case


def test_bytes_come_back(case: Case, tmp_path: Path) -> None:
    """Pages in shared memory go down and come back, what is absent is a miss, lookups wait for their answer, and stats
    are those of the store; after a close the store is whole."""
    keys, data = pages(1, 8)
    assert case.tier.pid != os.getpid() and case.tier.page_sizes == (PAGE_BYTES,)
    assert case.stored(keys, data) == (True,) * 8
    assert case.found(keys, data) == (True,) * 8
    assert case.found((keys[0], b"absent"), (data[0], data[0])) == (True, False)
    found = case.tier.find((*keys, b"absent"), 60, (b"other", keys[3]))
    assert found is not None and (found.num_pages, found.others) == (8, (False, True))
    case.tier.used(keys)
    stats = case.tier.stats()
    assert (stats.entries, stats.puts, stats.hits, stats.misses) == (8, 8, 9, 1)
    with pytest.raises(StoreLocked):
        open_existing(tmp_path / "s")
    assert case.tier.close()
    with contextlib.closing(open_existing(tmp_path / "s")) as store:
        store.check()
        assert store.contains(keys) == [True] * 8


@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_it_logs_what_its_engine_would(level: str, tmp_path: Path) -> None:
    """The process writes to the standard error of its engine, from the engine's level on."""
    code = (
        "import logging, sys; from hicache.storage import PageFormat\n"
        "from hicache.storage.process.stores import StoreRequest; from hicache.stores import open_tier\n"
        "logging.getLogger('hicache').setLevel(sys.argv[2])\n"
        "open_tier(StoreRequest(sys.argv[1], {'model': 'toy'}, [PageFormat(4096)])).close()"
    )
    store = LmdbPageStore(tmp_path / "s", identity=IDENTITY, formats=[PageFormat(PAGE_BYTES)], budget_bytes=64 << 20)
    keys, data = pages(1, 2)
    assert all(store.put(list(zip(keys, data, strict=True))))
    store.close()
    (tmp_path / "s" / "index.mdb").unlink()  # so that it is built anew, which is told
    with Program(code, at(tmp_path / "s"), level) as engine:
        _, said = engine.communicate()
    assert engine.returncode == 0, said
    assert ("WARNING store process" in said) == (level == "WARNING"), said


def test_wrong_jobs_are_refused(case: Case) -> None:
    """A page elsewhere, or one that ends behind its memory, one of a size that the store has not, and what is no key
    raise, and are not under way; the store's breakers hear nothing of it."""
    (key,), (page,) = pages(1, 1)
    shared, last = case.memory[0], np.resize(np.frombuffer(case.memory.data, np.uint8)[-100:], PAGE_BYTES)
    for keys, wrong in ((key, page), (key, last), (key, shared[:100]), (b"", shared), (b"k" * 512, shared)):
        with pytest.raises(StoreError, match=r"does not share|store has pages of|a key has"):
            case.tier.writes.submit(WriteJob(7, (keys,), (wrong,)))
    assert not case.tier.writes.under_way and case.stored((key,), (page,)) == (True,)


@pytest.mark.parametrize("url", ["nowhere://x", "lmdb://relative", "lmdb:///proc/x/y?budget=64MiB"])
def test_what_opening_raises_is_raised_here(url: str) -> None:
    """A store that cannot be opened there raises the store's own error here, and the process ends."""
    with pytest.raises(StoreError) as raised:
        open_tier(request(url))
    assert "the store process ended" not in str(raised.value)


def test_errors_keep_their_class(tmp_path: Path) -> None:
    """StoreLocked and StoreCorrupt arrive as what they are."""
    store = LmdbPageStore(tmp_path / "s", identity=IDENTITY, formats=[PageFormat(PAGE_BYTES)], budget_bytes=64 << 20)
    with contextlib.closing(store), pytest.raises(StoreLocked, match="in use"):
        open_tier(request(at(tmp_path / "s")))
    (tmp_path / "s" / "store.json").write_text("{")
    with pytest.raises(StoreCorrupt):
        open_tier(request(at(tmp_path / "s")))


def test_a_process_that_dies_is_started_again(case: Case) -> None:
    """After SIGKILL, jobs that were under way are answered as not done, jobs until the restart as well, and then every
    page that was acknowledged is there."""
    keys, data = pages(1, 8)
    assert case.stored(keys[:4], data[:4]) == (True,) * 4
    for turn in range(3):
        pid = case.tier.pid
        os.kill(pid, signal.SIGSTOP)
        case.write(keys[4:], data[4:])
        case.read(keys[:4])
        os.kill(pid, signal.SIGKILL)
        assert case.answer(case.tier.writes.poll).ok == (False,) * 4  # type: ignore[attr-defined]
        assert case.answer(case.tier.reads.poll).ok == (False,) * 4  # type: ignore[attr-defined]
        assert case.tier.find(keys, 60) is None or case.tier.is_open
        case.until_open()
        assert case.tier.pid != pid and case.tier.times_lost == turn + 1
        assert case.found(keys[:4], data[:4]) == (True,) * 4
    assert case.stored(keys[4:], data[4:]) == (True,) * 4 and case.found(keys, data) == (True,) * 8


def test_a_process_that_stands_still_is_left(tmp_path: Path) -> None:
    """Under SIGSTOP, as under a frozen disk, what is under way is announced as stalled, and answered when the process
    has been ended; a new one serves what was acknowledged."""
    limits = Limits(io_timeout_s=0.1, reopen_backoff_s=0.01, close_s=60)
    with contextlib.closing(Case(at(tmp_path / "s"), limits)) as case:
        keys, data = pages(1, 4)
        assert case.stored(keys, data) == (True,) * 4
        os.kill(case.tier.pid, signal.SIGSTOP)
        read = case.read(keys)
        found: list = []
        eventually(lambda: found.extend(case.tier.reads.poll()) or len(found) == 2, lambda: found)
        assert found == [Stalled(read.ticket, 0), ReadDone(read.ticket, 0, (False,) * 4)]
        case.until_open()
        assert case.found(keys, data) == (True,) * 4


def test_a_process_that_dies_idle_is_started_again(case: Case) -> None:
    """The client of an idle engine, which asks nothing, notices and is ready for the next request."""
    pid = case.tier.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: any(case.tier.reads.poll() or case.tier.pid != pid for _ in range(256)))
    case.until_open()
    assert case.tier.times_lost == 1 and case.stored(*pages(1, 2)) == (True, True)


def test_a_process_that_stands_still_while_it_opens_is_left(case: Case) -> None:
    """It is ended and another one is started, as one that stands still with jobs under way."""
    client, first = case.tier, case.tier.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: client.find((b"key",), 0.01) is None and client.pid != first)
    os.kill(second := client.pid, signal.SIGSTOP)

    def is_served() -> bool:
        if client.pid == second:
            client._silence.heard_s -= 3600
        return client.find((b"key",), 0.01) is not None and client.pid != second

    eventually(is_served)
    assert client.times_lost == 2 and case.stored(*pages(1, 2)) == (True, True)


@pytest.mark.parametrize("closes", [False, True])
def test_a_store_that_does_not_open_holds_nobody_up(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine goes on without it, and one line tells; it is used once it is open; one that nobody waits for any more
    is closed when it is."""
    gate, opened = Gate("open"), threading.Event()

    def slow(url: str, **about: Any) -> Any:
        gate("open")
        store = open_store(url, **about)
        opened.set()
        return store

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", slow)
    limits = Limits(open_s=0.05, close_s=60)
    with contextlib.closing(open_tier(request(at(tmp_path / "s"), limits), in_process=True)) as tier:
        assert tier.find([b"key"], 60) is None and gate.held == 1
        assert len([line for line in caplog.messages if "not open" in line]) == 1
        if not closes:
            gate.open()
            eventually(lambda: tier.find([b"key"], 60))
            assert tier.times_lost == 0
    gate.open()
    eventually(opened.is_set)
    eventually(lambda: _is_free(tmp_path / "s"))


def test_stores_of_a_process_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is being opened another is opened and closed; one whose closing raised can be opened again."""
    stores, gate = OpenStores(), Gate("first")

    def slow(url: str, **about: Any) -> Any:
        gate(Path(url.partition("?")[0]).name)
        return open_store(url, **about)

    def about(name: str) -> dict[str, Any]:
        return json.loads(request(at(tmp_path / name)).pack())

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", slow)
    first = threading.Thread(target=lambda: stores.release(stores.acquire(about("first"))))
    first.start()
    eventually(lambda: gate.held)
    for _ in range(2):
        service = stores.acquire(about("second"))
        service.store, closes = TroubledStore(service.store), service.store.close

        def failing_close(closes: Callable[[], None] = closes) -> None:
            closes()
            raise OSError("the disk is gone")

        monkeypatch.setattr(service.store, "close", failing_close, raising=False)
        with pytest.raises(OSError, match="is gone"):
            stores.release(service)
    gate.open()
    first.join(PATIENCE_S)
    assert not first.is_alive()


def test_a_client_that_did_not_look_for_long_loses_nothing(case: Case) -> None:
    """However long ago it heard of a process that had no time to answer either, as when the machine stood still."""
    keys, data = pages(1, 4)
    assert case.stored(keys, data) == (True,) * 4
    for _ in range(20):
        case.read(keys)
        case.tier._silence.heard_s -= 3600
        assert case.answer(case.tier.reads.poll).ok == (True,) * 4  # type: ignore[attr-defined]
    assert case.tier.times_lost == 0


def test_answers_that_are_none_end_the_process(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no frame, or the outcome of no job, are the last that is taken from a process."""
    keys, data = pages(1, 2)
    assert case.stored(keys, data) == (True, True)
    garbage = [
        b"\xff" * 64,
        frames.frame(Kind.WRITTEN, b"short"),
        frames.outcome(WriteDone(99, (True,)), is_write=True),
    ]
    for turn, wrong in enumerate(garbage, 1):
        connection = case.tier._connection
        assert connection is not None
        with monkeypatch.context() as patch:
            patch.setattr(connection, "take", iter([wrong]).__next__)
            read = case.read(keys)
            eventually(lambda: case.tier.reads.poll() or not case.tier.is_open)
        assert not read.cancelled.is_set() and case.tier.times_lost == turn
        eventually(lambda: case.tier.reads.poll() or not case.tier.reads.under_way)
        case.until_open()
        assert case.found(keys, data) == (True, True)


ENGINE = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from test_process import Case, pages
case = Case(sys.argv[1])
for seed in range(60):
    case.write(pages(seed, 32)[0], pages(0, 32)[1])
print(case.tier.pid, flush=True)
if sys.argv[3] == "leaves":
    assert not case.tier.close(0.0)
    os._exit(0)
if sys.argv[3] == "forks" and not os.fork():
    os.close(1)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["leaves", "killed", "forks"])
def test_what_an_engine_left_is_stored(how: str, tmp_path: Path) -> None:
    """An engine that does not wait for the end of its store may end, or be killed with all of its descendants: its
    store process does the writes that it has, seals the index and ends. Also where a forked child lives on."""
    with Program(ENGINE, at(tmp_path / "s"), Path(__file__).parent, how) as engine:
        assert engine.stdout is not None
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        if how != "leaves":
            for pid in [engine.pid, *(descendants(engine.pid) if how == "killed" else [])]:
                os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)
    with contextlib.closing(open_existing(tmp_path / "s")) as store:
        assert store.rebuilt_pages is None
        assert all(all(store.contains(pages(seed, 32)[0])) for seed in range(60))
        store.check()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Program, str]]:
    """An operator's process, and the path that engines give."""
    path = tmp_path / "run" / "hicache.sock"
    code = "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"
    with Program(code, "store", "serve", at(tmp_path / "root"), "--socket", path) as program:
        eventually(lambda: _is_served(path))
        yield program, f"unix:{path}"
        program.send_signal(signal.SIGTERM)
        program.communicate()
        assert program.returncode == 0 and not path.exists()


WRITING = """
import sys
sys.path.insert(0, sys.argv[2])
from test_process import Case, pages
case = Case(sys.argv[1])
for seed in range(60):
    case.write(pages(seed, 32)[0], pages(0, 32)[1])
print("under way", flush=True)
sys.stdin.read()
"""


def test_engines_share_a_served_store(served: tuple[Program, str], tmp_path: Path) -> None:
    """Two clients of one identity read what either wrote, one of another identity finds nothing; one that is killed in
    the middle of writes takes nothing with it, and each of its pages is whole or absent; the stores are whole when the
    operator's process has ended."""
    program, path = served
    keys, data = pages(100, 8)
    with contextlib.closing(Case(path)) as first, contextlib.closing(Case(path, identity={"model": "other"})) as other:
        with contextlib.closing(Case(path)) as second:
            assert first.stored(keys[:4], data[:4]) == (True,) * 4 and second.found(keys[:4], data[:4]) == (True,) * 4
        assert other.found(keys[:4], data[:4]) == (False,) * 4 and other.stored(keys[:2], data[2:4]) == (True, True)
        with Program(WRITING, path, Path(__file__).parent, stdin=PIPE) as third:
            assert third.stdout is not None and third.stdout.readline()
            third.kill()
        assert first.stored(keys[4:], data[4:]) == (True,) * 4 and first.found(keys, data) == (True,) * 8
        for seed in range(60):
            first.found(pages(seed, 32)[0], pages(0, 32)[1])
        assert other.found(keys[:2], data[2:4]) == (True, True)
    program.send_signal(signal.SIGTERM)
    program.wait()
    folders = list((tmp_path / "root").iterdir())
    assert len(folders) == 2
    for folder in folders:
        with contextlib.closing(open_existing(folder)) as store:
            store.check()


def test_a_served_process_that_goes_on_is_used_again(served: tuple[Program, str]) -> None:
    """One that stood still is left, and when it goes on it answers for what it was given, and is connected to again."""
    program, path = served
    keys, data = pages(1, 4)
    limits = Limits(io_timeout_s=0.1, reopen_backoff_s=0.01, max_reopen_backoff_s=0.05, close_s=60)
    with contextlib.closing(Case(path, limits)) as case:
        assert case.stored(keys, data) == (True,) * 4
        program.send_signal(signal.SIGSTOP)
        read = case.read(keys)
        assert case.answer(case.tier.reads.poll) == Stalled(read.ticket, 0)
        program.send_signal(signal.SIGCONT)
        assert case.answer(case.tier.reads.poll) == ReadDone(read.ticket, 0, (False,) * 4)
        case.until_open()
        assert case.found(keys, data) == (True,) * 4


def test_a_user_of_another_name_is_refused(served: tuple[Program, str]) -> None:
    """The socket is in a folder of its owner alone, and a client of another user is not served."""
    path = Path(served[1].removeprefix("unix:"))
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    if os.getuid():
        pytest.skip("becoming another user needs root")
    for folder in (path, *path.parents):
        with contextlib.suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o777)
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "try:\n    print(s.recv(1) == b'')\nexcept ConnectionResetError:\n    print(True)"
    )
    with Program(code, path) as stranger:
        assert stranger.communicate()[0].strip() == "True"


def test_a_client_that_sends_nonsense_is_left(served: tuple[Program, str]) -> None:
    """Whatever a client sends, its connection ends and the others are served."""
    keys, data = pages(1, 2)
    with contextlib.closing(Case(served[1])) as good:
        assert good.stored(keys, data) == (True, True)
        pack = request("").pack()
        wrong = json.dumps({**json.loads(pack), "version": 99}).encode()
        for nonsense in (
            b"\0" * 64,
            b"\xff" * 64,
            frames.frame(Kind.CLOSE),
            frames.of_job(FindJob(1, keys), NO_PAGES),
            frames.frame(Kind.OPEN, wrong),
            frames.frame(Kind.OPEN, pack),  # without the descriptor of its status
            frames.frame(Kind.OPEN, b"[]"),
            frames.frame(Kind.OPEN, b"no JSON"),
            frames.memory(1, 1 << 40),
            os.urandom(4096),
        ):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(served[1].removeprefix("unix:"))
                stranger.sendall(nonsense)
                stranger.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(1) == b""
            assert good.found(keys, data) == (True, True)


def test_a_client_that_asks_wrongly_is_left_alone(served: tuple[Program, str]) -> None:
    """Jobs that are none end the connection that brought them; the store serves the others, and its breakers are as
    they were."""
    keys, data = pages(1, 2)

    def write(keys: tuple[bytes, ...], memory: int = 1, page_bytes: int = PAGE_BYTES, offset: int = 0) -> bytes:
        return frames.of_job(WriteJob(7, keys, ()), Pages(memory, page_bytes, array("Q", [offset])))

    no_key = _COUNT.pack(1) + array("H", [0]).tobytes()
    wrong = [
        write((b"k",), memory=99),
        write((b"k",), offset=NUM_PAGES * PAGE_BYTES),
        write((b"k",), page_bytes=100),
        write((b"k", b"l")),
        frames.frame(Kind.FIND, frames.of_job(FindJob(7, ()), NO_PAGES)[5:-4], no_key),
        frames.frame(Kind.REMOVE, b"short"),
    ]
    with contextlib.closing(Case(served[1])) as good, contextlib.closing(Case(served[1])) as bad:
        for times, frame in enumerate(wrong, 1):
            bad.tier._send(frame)
            eventually(lambda times=times: bad.tier.find(keys, 0.01) is None and bad.tier.times_lost == times)
            bad.until_open()
            assert good.stored(keys, data) == (True, True) and good.found(keys, data) == (True, True)
        assert good.tier.is_healthy


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Descriptors and children are as before, after tiers that were closed and processes that were lost."""

    def held() -> tuple[int, str]:
        return len(os.listdir("/proc/self/fd")), Path(f"/proc/self/task/{os.getpid()}/children").read_text()

    gc.collect()
    before = held()
    keys, data = pages(1, 4)
    for n in range(3):
        case = Case(at(tmp_path / "s"))
        assert case.found(keys, data) == (n > 0,) * 4 or n == 0
        assert case.stored(keys, data) == (True,) * 4
        if n == 1:
            os.kill(case.tier.pid, signal.SIGKILL)
            assert case.found(keys, data) == (False,) * 4
            case.until_open()
        case.close()
        del case
    gc.collect()
    assert held() == before


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return not probe.connect_ex(str(path))


def _is_free(folder: Path) -> bool:
    """Whether nobody has the store open."""
    try:
        open_existing(folder).close()
    except StoreLocked:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """What a server finds that kills the process tree of its engine."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]
