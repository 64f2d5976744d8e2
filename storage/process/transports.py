"""Where the server of a client runs: in a process of its own, in one of the machine's, or in a thread beside it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hicache.process.logs import is_json
from hicache.storage.base import StoreError, StoreUnavailable
from hicache.storage.process.server import Server, user_of
from hicache.storage.process.stores import OpenStores

log = logging.getLogger(__name__)

_LOOK_WAIT_S = 5.0  # between two checks whether the serving thread has ended
_INSTEAD = (
    "run the store in threads of the engine (transport=inline), or start `hicache store serve URL --socket PATH` and "
    "give the engine unix:PATH"
)


class Transport(ABC):
    """`same_process`: pages may be named by their addresses. `pid`: of the process that it started; 0 without one.

    The other end closes a connection only when it touches the client's memory no more, and the system does when all
    threads of a process have ended.
    """

    same_process = False
    pid = 0

    @abstractmethod
    def connect(self) -> socket.socket:
        """A new server, or one more connection to it. Raises StoreError. What was before must have ended."""

    def has_ended(self) -> bool:
        """Whether what `connect` started has ended, so that it holds no store. Never blocks."""
        return True

    def end(self) -> None:  # noqa: B027 - a thread cannot be killed, and a served process serves other engines too
        """Kill the process that `connect` started. Never blocks."""

    def keep(self, client: object) -> None:  # noqa: B027 - a process has mapped the pages itself
        """`client` names pages of this process: keep it as long as they may be used."""

    def look(self) -> None:  # noqa: B027 - a process looks on its own
        """What stalls by a clock that is set by hand is announced when this returns. Else stalls are announced on their
        own."""


class OwnProcess(Transport):
    """The program of `__main__`, which ends after this process, and imports from where it does, whatever its folder.

    It is no descendant of this process, nor in its session: a server that kills the process tree of its engine, as vLLM
    does where a worker takes long to end, or a key at a terminal, leaves it the time to write what it has and to close
    its store.
    """

    def __init__(self) -> None:
        self._watched = -1  # a pidfd

    def connect(self) -> socket.socket:
        with contextlib.ExitStack() as undone:
            try:
                ours, theirs = socket.socketpair()
                undone.callback(ours.close)
                with theirs:
                    engine = _pidfd_of(os.getpid())
                    try:
                        self._launch(theirs.fileno(), engine)
                    finally:
                        os.close(engine)
            except (OSError, ValueError) as error:  # a shell that cannot fork says no number
                raise StoreUnavailable(f"cannot start the store process {sys.executable}: {error}") from error
            undone.pop_all()
        return ours

    def _launch(self, number: int, engine: int) -> None:
        """The shell between is its parent, and waits until it is watched, so that its number is not that of another."""
        imported = f"import sys; sys.path[:] = {_import_path()}; from hicache.storage.process.__main__ import main"
        code = f"{imported}; main({number}, {engine}, {log.getEffectiveLevel()}, {is_json()})"
        with subprocess.Popen(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!; read -r _', "sh", sys.executable, "-c", code],
            pass_fds=[number, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        ) as shell:  # fmt: skip
            assert shell.stdout is not None
            self.pid = int(shell.stdout.readline())
            self._watched = _pidfd_of(self.pid)

    def has_ended(self) -> bool:
        if self._watched >= 0:
            poller = select.poll()  # select() takes no descriptor from 1024 on
            poller.register(self._watched, select.POLLIN)
            if poller.poll(0):
                with contextlib.suppress(ChildProcessError):  # an orphan is a child of process 1, which this one may be
                    os.waitid(os.P_PIDFD, self._watched, os.WEXITED | os.WNOHANG)
                os.close(self._watched)
                self._watched = -1
        return self._watched < 0

    def end(self) -> None:
        if self._watched >= 0:
            try:
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)
            except ProcessLookupError:
                return
            except OSError as error:
                log.warning("the store process %d cannot be ended (pidfd_send_signal: %s)", self.pid, error)


class ServedSocket(Transport):
    """The process that an operator started: `hicache store serve URL --socket PATH`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def connect(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(str(self._path))
            uid = user_of(connected)
        except StoreError:
            connected.close()
            raise
        except OSError as error:
            connected.close()
            command = f"hicache store serve URL --socket {self._path}"
            raise StoreUnavailable(
                f"nothing serves a store at {self._path} ({error.strerror or error}); start `{command}`"
            ) from error
        if uid != os.getuid():
            connected.close()
            raise StoreError(f"the store at {self._path} is served by user {uid}; use one of your own")
        return connected


class InlineServer(Transport):
    """The same server in a thread of this process: for stores that are Python objects here, and tiny uses. `clock`: of
    the server's stores."""

    same_process = True

    def __init__(self, stores: OpenStores, clock: Callable[[], float] = time.monotonic) -> None:
        self._stores = stores
        self._looks_when_asked = clock is not time.monotonic
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._client: object = None

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._server = Server(self._stores, same_process=True)
        self._server.add(theirs)
        self._thread = threading.Thread(
            target=self._run, args=(self._server,), name="hicache-store-server", daemon=True
        )
        self._thread.start()
        return ours

    def _run(self, server: Server) -> None:
        """With a reference to the client: a stalled thread may use the pages of its jobs."""
        server.run()

    def has_ended(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def keep(self, client: object) -> None:
        self._client = client

    def look(self) -> None:
        if self._looks_when_asked and self._server is not None and not self.has_ended():
            looked = threading.Event()
            self._server.call(self._server.look)
            self._server.call(looked.set)
            while not looked.wait(_LOOK_WAIT_S) and not self.has_ended():
                continue


def _pidfd_of(pid: int) -> int:
    """StoreError where the kernel, the profile of a container or this Python has no pidfd_open."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError) as error:
        raise StoreError(
            f"the store process cannot be watched, for pidfd_open is refused here ({error}); allow it in the "
            f"container's seccomp profile, {_INSTEAD}"
        ) from error


def _import_path() -> list[str]:
    """Where this process finds modules, and first of all the package that it has: in a checkout another folder of that
    name may be the working directory."""
    package = find_spec("hicache")
    assert package is not None and package.submodule_search_locations
    return [str(Path(package.submodule_search_locations[0]).parent), *sys.path]
