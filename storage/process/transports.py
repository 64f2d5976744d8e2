"""Connects a client to its server: in a new process, in a process that an operator started, or in a thread."""

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
from typing import Protocol

from hicache.process.logs import is_json
from hicache.storage.base import StoreError, StoreUnavailable
from hicache.storage.process.server import Server, user_of
from hicache.storage.process.stores import OpenStores

log = logging.getLogger(__name__)

_LOOK_WAIT_S = 5.0  # time between two checks whether the serving thread has ended
_INSTEAD = (
    "run the store in threads of the engine (transport=inline), or start `hicache store serve URL --socket PATH` and "
    "give the engine unix:PATH"
)


class Transport(ABC):
    """Starts or finds the server of a client. `same_process`: pages may be named by their addresses. `pid`: id of the
    process that it started; 0 if there is none.

    The server closes a connection only when it no longer uses the client's memory. If a process ends, the kernel closes
    it after all its threads have ended.
    """

    same_process = False
    pid = 0

    @abstractmethod
    def connect(self) -> socket.socket:
        """Start a server, or connect to a running one; any earlier connection must have ended. Raises StoreError."""

    def has_ended(self) -> bool:
        """Return whether the server that `connect` started has ended, so that it has no store open. Never blocks."""
        return True

    def end(self) -> None:  # noqa: B027 - a thread cannot be killed, and a served process serves other engines too
        """Kill the process that `connect` started. Never blocks."""

    def keep(self, client: object) -> None:  # noqa: B027 - a process has mapped the pages itself
        """Keep `client`, and so the pages of its jobs, alive while the server may use them."""

    def look(self) -> None:  # noqa: B027 - a process looks on its own
        """With a clock set by hand, announce stalled jobs before returning. With a real clock, the server announces
        them itself."""


class ServerClient(Protocol):
    """The part of `StoreClient` that a second client uses."""

    in_process: bool

    def join(self) -> socket.socket: ...


class OwnProcess(Transport):
    """Starts the program of `__main__`, which ends after this process. It uses the import path of this process, in any
    working directory.

    The program is neither a descendant of this process nor in its session. vLLM kills the process tree of a worker that
    takes long to end, and Ctrl-C ends a session: in both cases the program still finishes its writes and closes its
    store.
    """

    def __init__(self) -> None:
        self._watched = -1  # a pidfd of the process

    def connect(self) -> socket.socket:
        with contextlib.ExitStack() as undone:
            try:
                client_end, server_end = socket.socketpair()
                undone.callback(client_end.close)
                with server_end:
                    engine = _pidfd_of(os.getpid())
                    try:
                        self._launch(server_end.fileno(), engine)
                    finally:
                        os.close(engine)
            except (OSError, ValueError) as error:  # a shell that cannot fork prints no process id
                raise StoreUnavailable(f"cannot start the store process {sys.executable}: {error}") from error
            undone.pop_all()
        return client_end

    def _launch(self, number: int, engine: int) -> None:
        """Start the program through a shell, its parent, which waits until this process has a pidfd of the program.
        Until then its process id cannot be reused."""
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
            poller = select.poll()  # poll is used because select() accepts only descriptors below 1024
            poller.register(self._watched, select.POLLIN)
            if poller.poll(0):
                # orphans become children of process 1, which may be this process
                with contextlib.suppress(ChildProcessError):
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
    """Connects to the process that an operator started: `hicache store serve URL --socket PATH`."""

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


class JoinedClient(Transport):
    """Connects to the server of another client, which starts and ends it."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self.same_process = client.in_process

    def connect(self) -> socket.socket:
        return self._client.join()


class InlineServer(Transport):
    """Runs the server in a thread of this process: for stores that are Python objects of this process, and for small
    uses. `clock`: the clock of the server's stores."""

    same_process = True

    def __init__(self, stores: OpenStores, clock: Callable[[], float] = time.monotonic) -> None:
        self._stores = stores
        self._looks_when_asked = clock is not time.monotonic
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._client: object = None

    def connect(self) -> socket.socket:
        client_end, server_end = socket.socketpair()
        self._server = Server(self._stores, same_process=True)
        self._server.add(server_end)
        self._thread = threading.Thread(
            target=self._run, args=(self._server,), name="hicache-store-server", daemon=True
        )
        self._thread.start()
        return client_end

    def _run(self, server: Server) -> None:
        """Run the server. `self` refers to the client, so its pages stay alive while a stalled thread may use them."""
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
    """Open a pidfd. Raises StoreError if the kernel, the seccomp profile of a container or this Python has no
    pidfd_open."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError) as error:
        raise StoreError(
            f"the store process cannot be watched, for pidfd_open is refused here ({error}); allow it in the "
            f"container's seccomp profile, {_INSTEAD}"
        ) from error


def _import_path() -> list[str]:
    """Return the import path of this process, with the folder of its hicache package first: the working directory may
    contain another folder of that name."""
    package = find_spec("hicache")
    assert package is not None and package.submodule_search_locations
    return [str(Path(package.submodule_search_locations[0]).parent), *sys.path]
