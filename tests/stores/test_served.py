"""A store process that an operator started. Engines share it, and no engine affects another one."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hicache.storage.process.server
import hicache.storage.process.session
import process_case
from disk_case import pages
from frame_fuzz import Nonsense, held_by
from hicache.storage import open_existing
from hicache.storage.process import frames
from hicache.storage.process.frames import Kind
from hicache.storage.process.jobs import ReadDone, Stalled
from hicache.storage.process.server import Server
from hicache.storage.process.stores import OpenStores
from process_case import SEEDS, WRITER, Case, at
from programs import Program
from waiting import BOUND_S, eventually

pytestmark = pytest.mark.store_process
SUPPORT = Path(process_case.__file__).parent


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Program, str]]:
    """Start an operator's process; yields the process, and the path that engines use."""
    path = tmp_path / "run" / "hicache.sock"
    code = "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"
    with Program(code, "store", "serve", at(tmp_path / "root"), "--socket", path) as program:
        eventually(lambda: _is_served(path))
        yield program, f"unix:{path}"
        program.send_signal(signal.SIGTERM)
        program.communicate()
        assert program.returncode == 0 and not path.exists()


def test_engines_share_a_served_store(served: tuple[Program, str], tmp_path: Path) -> None:
    """Two clients of one identity read the pages of both; a client of another identity finds nothing. If a client is
    killed in the middle of writes, the others are not affected, and each of its pages is complete or absent. When the
    operator's process has ended, the stores are intact."""
    program, path = served
    keys, data = pages(100, 8)
    with contextlib.closing(Case(path)) as first, contextlib.closing(Case(path, identity={"model": "other"})) as other:
        with contextlib.closing(Case(path)) as second:
            assert first.stored(keys[:4], data[:4]) == (True,) * 4 and second.found(keys[:4], data[:4]) == (True,) * 4
        assert other.found(keys[:4], data[:4]) == (False,) * 4 and other.stored(keys[:2], data[2:4]) == (True, True)
        with Program(WRITER, path, SUPPORT, "stays") as third:
            assert third.stdout is not None and third.stdout.readline()
            third.kill()
        assert first.stored(keys[4:], data[4:]) == (True,) * 4 and first.found(keys, data) == (True,) * 8
        for seed in SEEDS:
            first.found(pages(seed, 32)[0], pages(0, 32)[1])
        assert other.found(keys[:2], data[2:4]) == (True, True)
    program.send_signal(signal.SIGTERM)
    program.wait()
    folders = list((tmp_path / "root").iterdir())
    assert len(folders) == 2
    for folder in folders:
        with contextlib.closing(open_existing(folder)) as store:
            store.check()


def test_jobs_sent_before_a_client_ends_are_done(tmp_path: Path) -> None:
    """Jobs that a client sent before its end are executed, even if the process notices the end by a failed answer,
    before it has read all frames."""
    listener, read_later, keys, data = Scarce(tmp_path / "sock"), threading.Event(), *pages(1, 2)
    listener.has_room = True
    server = Server(OpenStores(at(tmp_path / "root")), listener=listener)

    def look_before_reading() -> None:
        assert read_later.wait(BOUND_S)
        server.look()

    path = f"unix:{tmp_path / 'sock'}"
    with joined(threading.Thread(target=server.run), server.stop), contextlib.closing(Case(path)) as other:
        leaves = Case(path)
        server.call(look_before_reading)
        leaves.write(keys, data)
        assert leaves.tier._connection is not None
        leaves.tier._connection.close()
        read_later.set()
        assert other.stored(*pages(2, 1)) == (True,)
        eventually(lambda: other.found(keys, data) == (True, True))


def test_a_served_process_that_continues_is_used_again(served: tuple[Program, str]) -> None:
    """A client disconnects from a process that hangs. When the process continues, it answers its jobs, and the client
    connects again."""
    program, path = served
    keys, data = pages(1, 4)
    with contextlib.closing(Case(path)) as case:
        assert case.stored(keys, data) == (True,) * 4
        program.send_signal(signal.SIGSTOP)
        read = case.read(keys)
        assert case.answer(case.poll_in_silence) == Stalled(read.ticket, 0)
        program.send_signal(signal.SIGCONT)
        assert case.answer(case.tier.reads.poll) == ReadDone(read.ticket, 0, (False,) * 4)
        case.until_open()
        assert case.found(keys, data) == (True,) * 4


@pytest.mark.parametrize("flags", [("odd:///x",), ("lmdb:///nowhere", "--remote", "odd://x")], ids=["disk", "remote"])
def test_an_unknown_store_is_not_served(flags: tuple[str, ...], tmp_path: Path) -> None:
    """If no store has the scheme of a URL, the process ends with an error before an engine connects."""
    path = tmp_path / "hicache.sock"
    code = "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"
    with Program(code, "store", "serve", *flags, "--socket", path) as program:
        eventually(lambda: program.poll() is not None or path.is_socket())
        assert not path.is_socket() and "unknown scheme" in program.communicate()[1] and program.returncode == 2


def test_a_user_of_another_name_is_refused(served: tuple[Program, str]) -> None:
    """The socket is in a folder that only its owner can enter, and a client of another user is not served."""
    path = Path(served[1].removeprefix("unix:"))
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    if os.getuid():
        pytest.skip("becoming another user needs root")
    for opened in (path, path.parent):
        opened.chmod(0o777)
    code = (  # enters the folder first, because pytest makes the folders above it private
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "try:\n    print(s.recv(1) == b'')\nexcept ConnectionResetError:\n    print(True)"
    )
    with Program(code, path.name, cwd=path.parent) as stranger:
        assert stranger.communicate()[0].strip() == "True"


def test_shared_memory_ends_with_its_engine(served: tuple[Program, str]) -> None:
    """When an engine disconnects, the process unmaps its memory, even if the threads of its last jobs have had no job
    since. The next engine may need as much memory."""
    program, path = served
    keys, data = pages(1, 2)
    with contextlib.closing(Case(path)) as first:
        assert first.stored(keys, data) == (True, True)
        before = held_by(program.pid)
        with contextlib.closing(Case(path)) as second:
            for _ in range(4):  # one job for each reader
                assert second.found(keys, data) == (True, True) and second.stored(keys, data) == (True, True)
        eventually(lambda: held_by(program.pid) == before, lambda: (held_by(program.pid), before))


def test_a_refused_client_is_not_accepted_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no descriptor is free for a waiting client, the server does not retry before its next check, and then serves
    the client. A client that requests no store is disconnected in the end."""
    monkeypatch.setattr(hicache.storage.process.server, "LOOK_S", 3600.0)
    listener = Scarce(tmp_path / "sock")
    server = Server(OpenStores(at(tmp_path / "root")), listener=listener)
    with joined(threading.Thread(target=server.run), server.stop), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "sock"))
        eventually(lambda: listener.num_refused)
        for _ in range(10):
            arrived = threading.Event()
            server.call(arrived.set)
            assert arrived.wait(BOUND_S)
        assert listener.num_refused == 1
        listener.has_room = True
        server.call(server.look)
        client.settimeout(BOUND_S)
        client.sendall(b"\xff" * 8)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        monkeypatch.setattr(hicache.storage.process.session, "OPEN_WITHIN_S", -1.0)
        with socket.socket(socket.AF_UNIX) as idle:
            idle.connect(str(tmp_path / "sock"))
            eventually(lambda: (server.call(server.look), select.select([idle], [], [], 0)[0])[1])
            assert idle.recv(1) == b""


class Scarce(socket.socket):
    """A listener that has no free descriptor for a client until `has_room`."""

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX)
        self.bind(str(path))
        self.listen()
        self.num_refused, self.has_room = 0, False

    def accept(self) -> tuple[socket.socket, Any]:
        if self.has_room:
            return super().accept()
        self.num_refused += 1
        raise OSError(errno.EMFILE, "Too many open files")


@contextlib.contextmanager
def joined(thread: threading.Thread, stop: Callable[[], None]) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join()


def test_a_descriptor_that_is_no_socket_is_closed(served: tuple[Program, str]) -> None:
    """A client announces a new client, and sends a descriptor that is no socket. The process disconnects the client and
    keeps nothing of it."""
    program, path = served
    keys, data = pages(1, 4)
    with contextlib.closing(Case(path)) as good:
        assert good.stored(keys, data) == (True,) * 4
        before = held_by(program.pid)
        with socket.socket(socket.AF_UNIX) as client, Path(os.devnull).open() as file:
            client.connect(path.removeprefix("unix:"))
            client.settimeout(BOUND_S)
            socket.send_fds(client, [frames.frame(Kind.JOIN)], [file.fileno()])
            assert client.recv(1) == b""
        eventually(lambda: held_by(program.pid) == before, lambda: (held_by(program.pid), before))
        assert good.stored(keys, data) == (True,) * 4 and good.tier.is_open


@pytest.mark.parametrize("num_clients", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_invalid_frames_affect_no_other_client(served: tuple[Program, str], num_clients: int) -> None:
    """Clients send random frames, requests, lengths and descriptors, change their memory, and disconnect at any point.
    Another client still gets its bytes. Afterwards the process has the same open files and memory as before."""
    program, path = served
    keys, data = pages(1, 4)
    with contextlib.closing(Case(path)) as good:
        assert good.stored(keys, data) == (True,) * 4
        before = held_by(program.pid)
        for seed in range(num_clients):
            Nonsense(path.removeprefix("unix:"), seed).send_all()
        eventually(lambda: held_by(program.pid) == before, lambda: (held_by(program.pid), before))
        assert good.stored(keys, data) == (True,) * 4 and good.found(keys, data) == (True,) * 4
        assert good.tier.times_lost == 0 and good.tier.is_open


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return not probe.connect_ex(str(path))
