"""Pages that a store process copies to a remote store, and pages that it reads from there."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from disk_case import pages
from hicache.storage import PageFormat, PageStore, StoreError, open_store
from hicache.storage.process.jobs import LeaseDone, LeaseJob
from hicache.storage.process.settings import Backup, RemoteSettings
from hicache.stores.tier import open_remote
from process_case import IDENTITY, PAGE_BYTES, Case, at, request
from programs import Program
from waiting import eventually

KEYS, DATA = pages(1, 8)


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
    """Wait until no page is queued; returns the numbers."""
    eventually(lambda: case.backup["queued_pages"] == 0, lambda: case.backup)
    return case.backup


EXPECTED: dict[Backup, tuple[bytes, ...]] = {"all": KEYS, "used": (*KEYS[:2], *KEYS[4:6]), "none": ()}


@pytest.mark.parametrize("backup", EXPECTED)
def test_the_pages_that_the_setting_names_are_copied(tmp_path: Path, shared: Path, backup: Backup) -> None:
    """`used` copies pages that were costly to compute, and pages that a request used. The bytes are those of the
    disk."""
    expected = EXPECTED[backup]
    with node(tmp_path / "a", remote_at(shared, backup)) as (local, _):
        local.tier.used(KEYS[4:5])  # from memory, before its write
        assert all(local.stored(KEYS[:2], DATA[:2], is_costly=True))
        assert all(local.stored(KEYS[2:], DATA[2:]))
        local.tier.used(KEYS[5:6])
        assert all(local.stored(KEYS[:1], DATA[:1]))  # after the used pages
        numbers = until_copied(local)
        assert numbers["sent_pages"] == len(expected)
        assert numbers["dropped_pages"] == numbers["failed_pages"] == numbers["state"] == 0
    with closing(shared_store(shared)) as store, closing(_disk_of(tmp_path / "a")) as disk:
        assert store.contains(KEYS) == [key in expected for key in KEYS]
        assert all(store.get_value(key) == disk.get_value(key) for key in expected)
        assert sum(len(store.get_value(key) or b"") for key in expected) == numbers["sent_bytes"]


def test_a_page_of_another_machine_is_read_and_kept(tmp_path: Path, shared: Path) -> None:
    """A read of the remote store stores its pages on this disk too, where they survive a restart without the remote
    store; they are not sent back."""
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
    """A damaged page is a miss, is counted, and does not reach the local disk."""
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


@pytest.mark.parametrize("limits", [{"max_queued_pages": 3}, {"max_queued_bytes": 3 * PAGE_BYTES}], ids=str)
def test_the_queue_has_limits_and_waits_for_a_store_that_is_absent(tmp_path: Path, limits: dict[str, int]) -> None:
    """Pages beyond the limits are dropped and counted; queued ones are copied once the remote store can be opened."""
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


def test_a_remote_store_that_fails_costs_copies_alone(tmp_path: Path, shared: Path) -> None:
    """Failed copies are counted and open the breaker; the local store works meanwhile, and later pages are copied once
    the remote store works again."""
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
    """An unknown scheme when the local store opens; a remote tier of a process that has none when that opens."""
    with pytest.raises(StoreError, match="unknown scheme"):
        Case(at(tmp_path / "a"), remote=RemoteSettings("nothing://at-all"), in_process=True)
    with closing(Case(at(tmp_path / "b"), in_process=True)) as local:
        with pytest.raises(StoreError, match="no remote store"):
            open_remote(local.tier, request(at(tmp_path / "b")))
        with pytest.raises(ValueError, match="backup"):
            RemoteSettings("s3://bucket", "sometimes")  # type: ignore[arg-type]


def test_one_machine_of_many_gets_a_lease(tmp_path: Path, shared: Path) -> None:
    """Through their processes two machines see the same lease of the remote store; a disk has no leases."""
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
    """A store process of an engine: after its kill both tiers come back, and copies go on; no page is wrong."""
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


@pytest.mark.store_process
def test_a_served_store_has_a_remote(tmp_path: Path, shared: Path) -> None:
    """`hicache store serve --remote`: all clients of the machine share its remote store, whatever they ask for."""
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


@contextlib.contextmanager
def node_of(url: str) -> Iterator[tuple[Case, Case]]:
    with closing(Case(url)) as local, closing(Case(url, of=local)) as other:
        yield local, other


def _disk_of(folder: Path) -> PageStore:
    (store,) = (each for each in folder.iterdir() if each.is_dir())
    return open_store(at(store), identity=IDENTITY, formats=[PageFormat(PAGE_BYTES)])
