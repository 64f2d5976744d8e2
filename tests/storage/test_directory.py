"""The directory of a store is private, and one writer at a time holds it. Errors name the right holder. A store notices
if another one replaced its directory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.storage import StoreError, StoreLocked, describe
from storage_pages import IDENTITY, found_numbers, key_of, open_store, put_numbers, slots_path
from waiting import eventually

HOLDER = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Let all users read new files, unless a file is created with other permissions."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(path: Path) -> dict[str, int]:
    files = {"": path, **{file.name: file for file in path.iterdir()}}
    return {name: stat.S_IMODE(file.stat().st_mode) for name, file in files.items()}


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def descriptors() -> list[str]:
    """The targets of the open descriptors of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return sorted(found)


@pytest.mark.usefixtures("open_umask")
def test_files_are_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With any umask, only the user can read or write the files of a store."""
    path = tmp_path / "parent" / "store"
    store = open_store(path)
    put_numbers(store, range(30))
    assert set(modes(path).values()) == {0o600, 0o700} and modes(path)[""] == 0o700
    store.close()
    assert set(modes(path).values()) == {0o600, 0o700} and "index.mdb" in modes(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o777, "what is above it is not the store's"
    assert "other users" not in caplog.text


def test_existing_files_are_narrowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Opening removes the access rights of other users from the files of an existing store, and warns. Opening does not
    change the modes of the directory and of other files."""
    path = tmp_path / "store"
    with contextlib.closing(open_store(path)) as store:
        put_numbers(store, [0])
    for file in (path, *path.iterdir()):
        file.chmod(0o755)
    caplog.set_level(logging.WARNING)
    open_store(path).close()
    assert modes(path).pop("") == 0o755 and caplog.text.count("other users; it is private now") == 3
    (path / "notes.txt").write_text("of somebody else")
    (path / "notes.txt").chmod(0o644)
    open_store(path).close()
    assert modes(path).pop("notes.txt") == 0o644
    assert not any(mode & 0o077 for name, mode in modes(path).items() if name not in ("", "notes.txt"))


def test_the_holder_of_the_lock_is_named_truly(tmp_path: Path) -> None:
    """The error names the process that has the lock, also if it belongs to another user, and not the process that
    opened the store last."""
    path = tmp_path / "store"
    open_store(path).close()  # this process has opened the store last
    command = [sys.executable, "-c", HOLDER, str(path / "writer.lock")]
    if not os.geteuid():
        for folder in (path / "writer.lock", path, *tmp_path.parents, tmp_path):
            if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o055)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "held\n":
            pytest.skip(f"{command[0]} is not permitted here")
        with pytest.raises(StoreLocked, match=f"in use by process {holder.pid}"):
            open_store(path)
        assert describe(path).writer_pid == holder.pid
        holder.communicate("\n")
    assert describe(path).writer_pid is None
    open_store(path).close()


def test_who_comes_while_a_store_is_closed_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An opener waits if the holder has announced its close, and gets the store even if it tries just before the lock
    is released. Without an announcement the opener is refused."""
    path, looks, flock = tmp_path / "store", list[int](), fcntl.flock

    def looked_at(descriptor: int, operation: int) -> None:
        """Before the lock is released, wait until the opener has tried to take the lock once more."""
        if operation == fcntl.LOCK_UN and looks:
            count = len(looks)
            eventually(lambda: len(looks) > count)
        try:
            flock(descriptor, operation)
        except BlockingIOError:
            looks.append(descriptor)
            raise

    monkeypatch.setattr(fcntl, "flock", looked_at)
    first = open_store(path)
    with pytest.raises(StoreLocked):
        open_store(path)
    put_numbers(first, range(8))
    looks.clear()
    first.announce_close()
    with ThreadPoolExecutor(1) as others:
        second = others.submit(open_store, path)
        put_numbers(first, range(8, 16))
        eventually(lambda: looks or second.done())
        first.close()
        with contextlib.closing(second.result(60)) as store:
            looks.clear()
            assert store.rebuilt_pages is None and found_numbers(store, range(20)) == set(range(16))
            with pytest.raises(StoreLocked):
                open_store(path)
            looks.clear()


def test_a_store_that_took_the_place_has_one_writer(tmp_path: Path) -> None:
    """After the directory of a live writer was removed, the writer never writes again. The old writer serves the pages
    that it had, and does not touch a new store at the same path."""
    path = tmp_path / "store"
    old = open_store(path)
    put_numbers(old, range(8))
    shutil.rmtree(path)
    assert not old.stats().read_only and old.stats().entries == 8
    assert put_numbers(old, [8]) == [False] and old.stats().read_only
    assert not old.reopen()
    new = open_store(path)
    put_numbers(new, range(100, 120))
    before = contents(path)
    assert not old.reopen() and put_numbers(old, [9]) == [False]
    assert old.compact() == 0 and old.delete([key_of(1)]) == 0
    assert found_numbers(old, range(200)) == set(range(8))
    assert contents(path) == before
    old.close()
    assert contents(path) == before
    assert put_numbers(new, range(120, 130)) == [True] * 10
    assert found_numbers(new, range(200)) == set(range(100, 130))
    new.check()
    new.close()


@pytest.mark.parametrize("why", ["identity", "damaged record", "slots"])
def test_no_descriptor_is_left(tmp_path: Path, why: str) -> None:
    """Opening and closing a store, or failing to open it, leaves no open descriptor, and no file outside of the
    store."""
    path = tmp_path / "store"
    with contextlib.closing(open_store(path)) as store:
        put_numbers(store, range(20))
    changes = {"identity": {**IDENTITY, "model": "huge"}} if why == "identity" else {}
    file = {"damaged record": path / "store.json", "slots": slots_path(path)}.get(why)
    gc.collect()  # closes files that earlier tests have left
    before = descriptors()
    if file is not None:
        file.rename(tmp_path / "moved")
        file.write_text("{}") if why == "damaged record" else file.mkdir()
    for _ in range(2):
        with pytest.raises(StoreError):
            open_store(path, **changes)
        assert descriptors() == before
    if file is not None:
        file.unlink() if file.is_file() else file.rmdir()
        (tmp_path / "moved").rename(file)
    with contextlib.closing(open_store(path)):
        opened = set(descriptors()) - set(before)
        assert {name for name in opened if not name.startswith(str(path))} == {"/memfd:hicache-index (deleted)"}
    assert descriptors() == before
