"""Two machines with their own disks over each remote store. Pages of one machine are read on the other. Faults of the
remote store only cost hits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from disk_case import pages
from hicache.bench.remote_servers import Server
from hicache.storage.process.health import Limits
from hicache.storage.process.settings import RemoteSettings
from process_case import Case, at
from waiting import BOUND_S, eventually

pytestmark = pytest.mark.remote

KEYS, DATA = pages(1, 24)
PATIENT = Limits(io_timeout_s=BOUND_S, reopen_backoff_s=0.01, max_reopen_backoff_s=0.05, close_s=BOUND_S)


@contextlib.contextmanager
def machine(folder: Path, url: str) -> Iterator[tuple[Case, Case]]:
    """The local and the remote tier of a machine."""
    remote = RemoteSettings(url, "all")
    with (
        closing(Case(at(folder), PATIENT, remote=remote, in_process=True)) as local,
        closing(Case(at(folder), PATIENT, remote=remote, in_process=True, of=local)) as other,
    ):
        yield local, other


def until_copied(local: Case) -> dict[str, float]:
    eventually(lambda: local.backup["queued_pages"] == 0, lambda: local.backup)
    return local.backup


def _share(tmp_path: Path, url: str) -> None:
    """Check that one machine stores pages, and that another reads them and then has them on its disk."""
    with machine(tmp_path / "a", url) as (local, _):
        assert all(local.stored(KEYS, DATA))
        numbers = until_copied(local)
        assert (numbers["sent_pages"], numbers["failed_pages"]) == (len(KEYS), 0)
    with machine(tmp_path / "b", url) as (local, other):
        assert all(other.found(KEYS, DATA)) and other.tier.stats().corrupt == 0
        eventually(lambda: local.backup["filled_pages"] == len(KEYS), lambda: local.backup)
        assert all(local.found(KEYS, DATA))
        assert local.backup["sent_pages"] == 0


@pytest.mark.smoke
def test_machines_share_a_directory(tmp_path: Path) -> None:
    """Machines share pages through a directory, without any server."""
    (tmp_path / "shared").mkdir()
    _share(tmp_path, f"dir://{tmp_path / 'shared'}")


@pytest.mark.smoke
@pytest.mark.parametrize("server", ["s3 for a second", "mooncake"], indirect=True)
def test_machines_share_pages(server: Server, tmp_path: Path) -> None:
    """Machines share pages through S3 and Mooncake."""
    _share(tmp_path, server.url)


@pytest.mark.parametrize("server", ["s3 for a second", "mooncake"], indirect=True)
def test_a_server_that_ends_costs_copies_alone(server: Server, tmp_path: Path) -> None:
    """While pages are copied and read, the server is killed. Each read is right or a miss, the disk serves all pages,
    and pages that were not copied are counted. A new server gets later pages."""
    with machine(tmp_path / "a", server.url) as (local, other):
        assert all(local.stored(KEYS[:8], DATA[:8]))
        until_copied(local)
        killing = threading.Thread(target=server.kill)
        killing.start()
        for n in range(8, 16):
            assert local.stored((KEYS[n],), (DATA[n],)) == (True,)
            other.found(KEYS[:8], DATA[:8])  # compares the bytes of hits
        killing.join()
        assert all(local.found(KEYS[:16], DATA[:16]))
        server.start()
        for n in range(16, len(KEYS)):
            assert local.stored((KEYS[n],), (DATA[n],)) == (True,)
        numbers = until_copied(local)
        assert numbers["sent_pages"] + numbers["failed_pages"] + numbers["dropped_pages"] >= len(KEYS) - 8
        eventually(lambda: _sends(local), lambda: local.backup)
        assert all(local.found(KEYS, DATA)) and other.tier.stats().corrupt == 0


def _sends(local: Case) -> bool:
    """Whether a new page reaches the remote store."""
    before, (key,), data = local.backup["sent_pages"], *_new_page()
    assert local.stored((key,), data) == (True,)
    return until_copied(local)["sent_pages"] > before


def _new_page() -> tuple[tuple[bytes, ...], tuple[np.ndarray, ...]]:
    return pages(int(np.random.default_rng().integers(1 << 30)), 1)


@pytest.mark.parametrize("server", ["s3 for a second"], indirect=True)
def test_a_server_that_hangs_costs_copies_alone(server: Server, tmp_path: Path) -> None:
    """A stopped server delays no write and no read of the disk. Copies continue when the server does."""
    with machine(tmp_path / "a", server.url) as (local, other):
        assert all(local.stored(KEYS[:8], DATA[:8]))
        until_copied(local)
        server.freeze()
        try:
            assert all(local.stored(KEYS[8:16], DATA[8:16])) and all(local.found(KEYS[:16], DATA[:16]))
            assert not any(other.found(KEYS[:8], DATA[:8]))
        finally:
            server.thaw()
        eventually(lambda: any(other.found(KEYS[:8], DATA[:8])))
        eventually(lambda: _sends(local), lambda: local.backup)
        assert other.tier.stats().corrupt == 0
