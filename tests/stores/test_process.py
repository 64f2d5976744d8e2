"""A store in its own process returns the same bytes, and misses instead of waits, whatever happens to the process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache.storage.process.service
import hicache.storage.process.stores
import hicache.storage.store_files
import process_case
from disk_case import PATIENCE_S, Clock, Gate, TroubledStore, blank, disk_threads, pages
from hicache.metrics import Metrics
from hicache.storage import (
    StoreError,
    StoreLocked,
    StoreUnavailable,
    open_existing,
    open_store,
)
from hicache.storage.process import client as client_module
from hicache.storage.process import frames
from hicache.storage.process.client import State, StoreClient
from hicache.storage.process.frames import Kind
from hicache.storage.process.health import Limits
from hicache.storage.process.jobs import ReadDone, ReadJob, Stalled, WriteDone, WriteJob
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.stores import OpenStores
from hicache.stores.tier import open_tier
from process_case import LIMITS, PAGE_BYTES, SEEDS, WRITER, Case, at, is_free, request
from programs import Program, output
from store_server import served
from waiting import eventually

pytestmark = pytest.mark.store_process
SUPPORT = Path(process_case.__file__).parent


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with contextlib.closing(Case(at(tmp_path / "s"))) as case:
        yield case


def test_bytes_are_restored(case: Case, tmp_path: Path) -> None:
    """Pages in shared memory are stored and restored, an absent page is a miss, and lookups wait for their answer.
    Stats are those of the store, and a closed store is intact."""
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
    case.tier.keep(b"a note")
    assert case.tier.close()
    with contextlib.closing(open_existing(tmp_path / "s")) as store:
        store.check()
        assert store.contains(keys) == [True] * 8
    with contextlib.closing(Case(at(tmp_path / "s"))) as again:
        assert again.tier.note == b"a note"


def test_a_deadline_reaches_the_store(tmp_path: Path) -> None:
    """Pages with a deadline outlast pages that are stored later."""
    with contextlib.closing(Case(f"lmdb://{tmp_path / 's'}?budget=1MiB")) as case:
        case.stored(*pages(1, 4))
        case.tier.keep_until(pages(1, 4)[0], math.inf)
        for seed in range(2, 14):
            case.stored(*pages(seed, 30))
        assert case.tier.stats().evicted
        assert case.found(*pages(1, 4)) == (True,) * 4


def test_the_store_process_logs_like_its_engine(tmp_path: Path) -> None:
    """The store process logs to the standard error of its engine, with the log level and the format of the engine."""
    code = (
        "import logging, os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from hicache.process.logs import server_lines; from hicache.storage import store_at\n"
        "from hicache.stores.tier import open_tier; from process_case import at, request\n"
        "for level in ('WARNING', 'ERROR'):\n"
        "    logging.getLogger('hicache').setLevel(level)\n"
        "    os.unlink(store_at(sys.argv[1]) / 'index.mdb')  # so that it is built anew, which is told\n"
        "    open_tier(request(at(sys.argv[1]))).close()\n"
        "with server_lines():\n"
        "    os.unlink(store_at(sys.argv[1]) / 'index.mdb')\n"
        "    open_tier(request(at(sys.argv[1]))).close()"
    )
    with contextlib.closing(Case(at(tmp_path / "s"))) as case:
        assert case.stored(*pages(1, 2)) == (True, True)
    with Program(code, tmp_path / "s", SUPPORT) as engine:
        _, printed = engine.communicate()
    first, second = printed.splitlines()
    assert engine.returncode == 0 and "WARNING store process" in first and json.loads(second)["level"] == "warning"


def test_wrong_jobs_are_refused(case: Case) -> None:
    """A page in other memory, a page that ends after its memory, a page of a wrong size, and an invalid key raise.
    Afterwards no job is in flight, and the store's breakers count no failure."""
    (key,), (page,) = pages(1, 1)
    shared, last = case.memory[0], np.resize(np.frombuffer(case.memory.data, np.uint8)[-100:], PAGE_BYTES)
    for keys, wrong in ((key, page), (key, last), (key, shared[:100]), (b"", shared), (b"k" * 512, shared)):
        with pytest.raises(StoreError, match=r"does not share|store has pages of|a key has"):
            case.tier.writes.submit(WriteJob(7, (keys,), (wrong,)))
    assert not case.tier.writes.in_flight and case.stored((key,), (page,)) == (True,)


@pytest.mark.parametrize("why", ["in use", "damaged", "No space left", "nothing serves"])
def test_a_start_continues_without_an_unavailable_store(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the store is unavailable, the tier starts closed, logs the reason once, and answers with misses. When the
    store becomes available, the tier opens it."""

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    url = f"unix:{tmp_path / 'socket'}" if why == "nothing serves" else at(tmp_path / "s")
    with contextlib.ExitStack() as cause, monkeypatch.context() as patched:
        if why == "in use":
            cause.enter_context(contextlib.closing(open_tier(request(url), in_process=True)))
        elif why == "damaged":
            open_tier(request(url), in_process=True).close()
            [record] = (tmp_path / "s").rglob("store.json")
            record.write_text("{")
            cause.callback(record.unlink)
            for file in record.parent.glob("index.*"):
                file.unlink()
        elif why == "No space left":
            patched.setattr(hicache.storage.store_files, "replacing", full)
        tier = open_tier(request(url), in_process=True)
        assert not tier.is_open and tier.find([b"key"], 60) is None
        eventually(lambda: (tier.poll(), tier.times_lost > 2)[1])
        assert [why in message for message in caplog.messages if "without its store" in message] == [True]
    with served(tmp_path / "s", tmp_path / "socket") if why == "nothing serves" else contextlib.nullcontext():
        found = eventually(lambda: tier.find([b"key"], 60))
        assert found.num_pages == 0 and tier.is_open and tier.close()


def test_wrong_settings_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong setting is raised at the start as the store's error, because a retry cannot fix it. No log line announces
    a retry."""
    (tmp_path / "file").write_text("mine")
    for url in (
        "nowhere://x",
        at(tmp_path / "file"),
        at(tmp_path / "file" / "below"),
        f"lmdb://{tmp_path}/s?budget=9kB",
        f"lmdb://{tmp_path}/{'s' * 256}?budget=9MB",
    ):
        with pytest.raises(StoreError) as raised:
            open_tier(request(url))
        assert not isinstance(raised.value, StoreUnavailable) and "the store process ended" not in str(raised.value)
    assert not caplog.messages


def test_a_store_whose_threads_cannot_be_started_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine has no thread left for an opened store, the store is closed again completely."""
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.endswith("-writes-0"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(StoreError, match="start new thread"):
            open_tier(request(at(tmp_path / "s")), in_process=True)
    eventually(lambda: is_free(tmp_path / "s"))
    assert not disk_threads()
    for wrong in ({"readers": 0}, {"readers": 1 << 30}, {"full_bytes": 0}, {"queue_jobs": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServiceSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="io_timeout_s"):
        Limits(io_timeout_s=math.nan)


def test_a_process_that_dies_is_started_again(case: Case) -> None:
    """After SIGKILL, jobs in flight and jobs until the restart are answered as not done. Then every acknowledged page
    is there."""
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


def test_a_frozen_process_is_abandoned(tmp_path: Path) -> None:
    """Under SIGSTOP, as on a frozen disk, jobs in flight are announced as stalled, and are answered when the process
    has been killed. A new process serves the acknowledged pages."""
    with contextlib.closing(Case(at(tmp_path / "s"))) as case:
        keys, data = pages(1, 4)
        assert case.stored(keys, data) == (True,) * 4
        os.kill(case.tier.pid, signal.SIGSTOP)
        read = case.read(keys)
        found: list = []
        eventually(lambda: found.extend(case.poll_in_silence()) or len(found) == 2, lambda: found)
        assert found == [Stalled(read.ticket, 0), ReadDone(read.ticket, 0, (False,) * 4)]
        case.until_open()
        assert case.found(keys, data) == (True,) * 4


@pytest.mark.parametrize("verb", ["open", "put", "get_into"])
def test_a_thread_that_says_nothing_is_left_and_its_store_is_used_again(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier counts as lost while a silent thread of this process opens its store, writes or reads. When that call
    returns, the tier opens the store again, and a close leaves the store free."""
    gate = Gate(verb)

    def troubled(url: str, **about: Any) -> TroubledStore:
        gate("open")
        store = TroubledStore(open_store(url, **about))
        store.trouble = gate
        return store

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", troubled)
    limits = dataclasses.replace(LIMITS, open_s=0.05)
    with contextlib.closing(open_tier(request(at(tmp_path / "s"), limits), in_process=True, clock=Clock())) as tier:
        keys, data = pages(1, 4)
        if verb != "open":
            eventually(lambda: tier.poll() or tier.is_open, lambda: tier.state)
        if verb == "put":
            assert tier.writes.submit(WriteJob(1, keys, data))
        elif verb == "get_into":
            assert tier.reads.submit(ReadJob(1, 0, keys, blank(4), threading.Event()))
        eventually(lambda: gate.held)
        with monkeypatch.context() as silence:
            silence.setattr(StoreClient, "_is_silent", lambda *_: True)
            silence.setattr(client_module, "_MIN_SILENCE_S", -math.inf)
            tier.poll()
        assert tier.state is State.LOST
        for _ in range(2):  # when this returns, the loop of the thread has noticed the loss
            tier._transport.look()
        gate.open()
        eventually(lambda: tier.poll() or tier.is_open, lambda: tier.state)
        assert not tier.reads.in_flight and not tier.writes.in_flight
        found = tier.writes.poll()
        assert [done.ok for done in found if isinstance(done, WriteDone)] == [(False,) * 4] * (verb == "put")
        assert tier.writes.submit(WriteJob(2, keys, data))
        [done] = eventually(tier.writes.poll)
        assert isinstance(done, WriteDone) and done.ok == (True,) * 4
    eventually(lambda: is_free(tmp_path / "s"))


def test_silence_before_a_lookup_does_not_count(case: Case) -> None:
    """A process that had no work for an hour does not count as late when a lookup asks it."""
    client, asked_s = case.tier, time.monotonic()
    client.last_message_s -= 3600
    os.kill(client.pid, signal.SIGSTOP)
    found = client.find([b"key"], 0.0)
    os.kill(client.pid, signal.SIGCONT)
    assert found is None
    assert not client._is_stalled  # so `close` waits as long for this answer as for a job
    assert client.last_message_s >= asked_s


def test_a_process_that_dies_idle_is_started_again(case: Case) -> None:
    """The client of an idle engine sends no job. The client still notices that its process has died, and is ready for
    the next request."""
    pid = case.tier.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: any(case.tier.reads.poll() or case.tier.pid != pid for _ in range(256)))
    case.until_open()
    assert case.tier.times_lost == 1 and case.stored(*pages(1, 2)) == (True, True)


def test_a_process_frozen_while_opening_is_abandoned(case: Case) -> None:
    """A process that freezes while it opens a store is killed and replaced, like a process that hangs with jobs in
    flight."""
    client, first = case.tier, case.tier.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: client.find((b"key",), 0.01) is None and client.pid != first)
    os.kill(second := client.pid, signal.SIGSTOP)

    def is_served() -> bool:
        if client.pid == second:
            client.last_message_s -= 3600
        return client.find((b"key",), 0.01) is not None and client.pid != second

    eventually(is_served)
    assert client.times_lost == 2 and case.stored(*pages(1, 2)) == (True, True)


@pytest.mark.parametrize("closes", [False, True])
def test_a_store_that_does_not_open_delays_no_request(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine runs without a store that takes long to open, logs one line, and uses the store when it is open. If the
    engine no longer waits for it, the store is closed as soon as it is open."""
    gate, opened = Gate("open"), threading.Event()

    def slow(url: str, **about: Any) -> Any:
        gate("open")
        store = open_store(url, **about)
        opened.set()
        return store

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", slow)
    limits = Limits(open_s=0.05, close_s=60)
    with contextlib.closing(open_tier(request(at(tmp_path / "s"), limits), in_process=True)) as tier:
        assert tier.find([b"key"], 60) is None
        eventually(lambda: gate.held == 1)
        assert len([line for line in caplog.messages if "not open" in line]) == 1
        if not closes:
            gate.open()
            eventually(lambda: tier.find([b"key"], 60))
            assert tier.times_lost == 0
    gate.open()
    eventually(opened.is_set)
    eventually(lambda: is_free(tmp_path / "s"))


def test_a_close_does_not_raise_why_opening_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine ran without a store that took long to open. If opening the store finally fails, close does not raise
    that error."""
    gate, before = Gate("open"), {*threading.enumerate()}

    def fails_late(url: str, **about: Any) -> Any:
        gate("open")
        raise StoreError("the settings are wrong")

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", fails_late)
    tier = open_tier(request(at(tmp_path / "s"), Limits(open_s=0.05, close_s=60)), in_process=True)
    serving = {thread for thread in threading.enumerate() if thread.name.startswith("hicache-store")}
    gate.open()
    eventually(lambda: not any(thread.is_alive() for thread in serving - before))  # the error has been sent
    assert tier.close()


def test_a_store_without_writes_leaves_others_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stores on one path, the first has the complete budget and writes no more. When the second has written its
    share, the first shrinks, and both together fit the budget."""
    monkeypatch.setattr(hicache.storage.process.service, "_IDLE_S", 0.01)
    stores, budget_bytes = OpenStores(f"lmdb://{tmp_path}?budget=1MiB"), 1 << 20
    services = [stores.acquire(json.loads(request("", identity={"model": model}).pack())) for model in "ab"]
    for seed, num_pages, service in zip((1, 2), (120, 60), services, strict=True):
        items = list(zip(*pages(seed, num_pages), strict=True))
        for start in range(0, num_pages, 20):
            assert all(service.store.put(items[start : start + 20]))
    eventually(lambda: sum(service.store.stats().file_bytes for service in services) <= budget_bytes)
    assert all(service.store.stats().entries > 40 for service in services)
    for service in services:
        stores.release(service)


def test_the_used_ratio_counts_all_stores_of_the_budget(tmp_path: Path) -> None:
    """Two stores on one path have the smallest budget. The ratio of the store that wrote last is above 1.05, at which
    the alert HicacheBudget fires, although each store is within the budget."""
    url = f"lmdb://{tmp_path}?budget=320KiB"
    with contextlib.ExitStack() as stack:
        cases = [
            stack.enter_context(contextlib.closing(Case(url, identity={"model": model}, in_process=True)))
            for model in "ab"
        ]
        for case in cases:
            for seed in range(4):
                assert all(case.stored(*pages(seed, 16)))
        metrics = Metrics()
        cases[1].tier.register(metrics)
        assert cases[1].tier.stats().file_bytes <= 320 << 10
        assert metrics.snapshot()["disk.used_ratio"] > 1.05


def test_stores_of_a_process_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one store is being opened, another is opened and closed. A store whose close raised can be opened again."""
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


def test_a_client_that_did_not_look_for_long_loses_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has not polled for long loses no answer, however old the last message is. The process had no time
    to answer either, as if the machine had been suspended."""
    keys, data = pages(1, 4)
    assert case.stored(keys, data) == (True,) * 4
    monkeypatch.setattr(client_module, "_DOUBT_S", PATIENCE_S)
    for _ in range(20):
        case.read(keys)
        case.tier.last_message_s -= 3600
        assert case.answer(case.tier.reads.poll).ok == (True,) * 4  # type: ignore[attr-defined]
    assert case.tier.times_lost == 0


def test_answers_that_are_none_end_the_process(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """After bytes that are no frame, or an outcome of an unknown job, the client accepts nothing more from the
    process."""
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
        eventually(lambda: case.tier.reads.poll() or not case.tier.reads.in_flight)
        case.until_open()
        assert case.found(keys, data) == (True, True)


@pytest.mark.parametrize("mode", ["leaves", "killed", "forks"])
def test_queued_pages_of_an_ended_engine_are_stored(mode: str, tmp_path: Path) -> None:
    """An engine may end without waiting for its store, or be killed with all its descendants, even if a forked child
    lives on. The store process of this engine still executes the writes that were sent, seals the index, and ends."""
    with Program(WRITER, at(tmp_path / "s"), SUPPORT, mode) as engine:
        assert engine.stdout is not None
        stopped = int(engine.stdout.readline())
        pidfd = os.pidfd_open(stopped)
        if mode != "leaves":
            for pid in [engine.pid, *(descendants(engine.pid) if mode == "killed" else [])]:
                os.kill(pid, signal.SIGKILL)
        engine.wait()
        os.kill(stopped, signal.SIGCONT)
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)
    with contextlib.closing(open_existing(tmp_path / "s")) as store:
        assert store.rebuilt_pages is None
        assert [seed for seed in SEEDS if not all(store.contains(pages(seed, 32)[0]))] == []
        store.check()


_LEAVES_NOTHING = """
import ctypes, gc, os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from disk_case import pages
from process_case import Case

SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)

def held():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path(f"/proc/self/task/{os.getpid()}/children").read_text()

before, (keys, data) = held(), pages(1, 4)
for n in range(3):
    case = Case(sys.argv[1])
    assert case.found(keys, data) == (n > 0,) * 4 or n == 0
    assert case.stored(keys, data) == (True,) * 4
    if n == 1:
        os.kill(case.tier.pid, signal.SIGKILL)
        assert case.found(keys, data) == (False,) * 4
        case.until_open()
    case.close()
    del case
assert held() == before, (held(), before)
"""


def test_all_files_are_removed(tmp_path: Path) -> None:
    """After tiers were closed and processes were lost, descriptors and child processes are as before. Nothing is left
    even if the lost processes become children of this one, as of process 1 of a container."""
    output(_LEAVES_NOTHING, at(tmp_path / "s"), SUPPORT)


def descendants(pid: int) -> list[int]:
    """The processes that are killed together with the process tree of an engine."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]
