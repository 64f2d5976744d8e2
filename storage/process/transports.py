"""Connects a client to its server. The server runs in a new process, in a process that an operator started, or in a
thread of the client's process."""

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
    """Starts or finds the server of a client. `same_process`: the server is in the client's process, so the client
    names pages by their addresses. `pid`: id of the process that `connect` started; 0 if it started none.

    The server closes a connection only when it no longer uses the client's memory. If the server's process ends, the
    kernel closes the connection after all threads of the process have ended.
    """

    same_process = False
    pid = 0

    @abstractmethod
    def connect(self) -> socket.socket:
        """Start a server, or connect to a running server. An earlier connection of this client must have ended. Raises
        StoreError."""

    def has_ended(self) -> bool:
        """Return whether the server that `connect` started has ended, so that it has no store open. Never blocks."""
        return True

    def end(self) -> None:  # noqa: B027 - a thread cannot be killed, and an operator's process also serves other engines
        """Kill the process that `connect` started. Never blocks."""

    def keep(self, client: object) -> None:  # noqa: B027 - a separate process maps the pages
        """Keep `client`, and so the pages of its jobs, alive while the server may use them."""

    def look(self) -> None:  # noqa: B027 - a separate process has a real clock
        """Announce stalled jobs before returning, if a test sets the server's clock. With a real clock, the server
        announces stalled jobs without this call."""


class ServerClient(Protocol):
    """The attributes of a `StoreClient` through which a second client connects."""

    in_process: bool

    def join(self) -> socket.socket: ...


class OwnProcess(Transport):
    """Starts the program of `__main__`, which runs until it has closed its store after this process has ended. The
    program uses the import path of this process, in any working directory.

    The program is neither a descendant of this process nor in the session of this process. vLLM kills the process tree
    of a worker that takes long to end, and Ctrl-C ends all processes of a session. After a kill of the worker or a
    Ctrl-C, the program still finishes its writes and closes its store.
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
            except (OSError, ValueError) as error:  # ValueError: a shell that cannot fork prints no process id
                raise StoreUnavailable(f"cannot start the store process {sys.executable}: {error}") from error
            undone.pop_all()
        return client_end

    def _launch(self, number: int, engine: int) -> None:
        """Start the program through a shell, which is the parent of the program. The shell waits until this process has
        a pidfd of the program. Until then the kernel cannot reuse the program's process id."""
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
                # The ended program becomes a child of process 1, and process 1 may be this process.
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
            raise StoreError(f"the store at {self._path} is served by user {uid}; use a socket of your own user")
        return connected


class JoinedClient(Transport):
    """Connects to the server of another client. The other client starts and ends the server."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self.same_process = client.in_process

    def connect(self) -> socket.socket:
        return self._client.join()


class InlineServer(Transport):
    """Runs the server in a thread of this process, for stores that are Python objects of this process, and for small
    caches. `clock`: the clock of the server's stores."""

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
        """Run the server. `self` refers to the client, so the client's pages stay allocated while a stalled thread may
        use them."""
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
    """Open a pidfd of the process `pid`. Raises StoreError if the kernel or this Python lacks pidfd_open, or the
    seccomp profile of a container refuses it."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError) as error:
        raise StoreError(
            f"the store process cannot be watched, because pidfd_open is refused here ({error}); allow it in the "
            f"container's seccomp profile, {_INSTEAD}"
        ) from error


def _import_path() -> list[str]:
    """Return the import path of this process. The folder with the hicache package is first, because the working
    directory may contain another folder named hicache."""
    package = find_spec("hicache")
    assert package is not None and package.submodule_search_locations
    return [str(Path(package.submodule_search_locations[0]).parent), *sys.path]
