"""Programs that run as if in their own interpreter, but are forked from a process that has imported the library
(fork_server.py).

Unlike a new interpreter, they have modules imported already. So a test of imports, or of a signal during an import,
uses `subprocess`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from waiting import eventually

ADDRESS = "HICACHE_TEST_FORK_SERVER"  # set by conftest.py: the folder of the fork servers of this run
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL


@functools.cache
def _address(kind: str) -> str:
    """The socket of the fork server `kind` of this run (fork_server.py). The first caller of `_address` starts the
    server, which ends with the run."""
    folder = Path(os.environ[ADDRESS])
    address = folder / kind
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(address), folder.name, kind]
            server = subprocess.Popen(command, stdin=DEVNULL, start_new_session=True)
            eventually(lambda: address.exists() or server.poll() is not None)
            assert server.poll() is None, "the fork server ended"
    return str(address)


class Program:
    """A running program. It has the attributes of `subprocess.Popen`: text on `stdin`, `stdout` and `stderr` if they
    are piped."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        name: str = "-c",
        stdin: int | IO[Any] = DEVNULL,
        stdout: int | IO[Any] = PIPE,
        stderr: int | IO[Any] = PIPE,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        server: str = "hicache",
        is_torn_down: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        with contextlib.ExitStack() as theirs:
            standard = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            files = [self._file(*item, theirs) for item in standard.items()]
            request = {
                "code": code,
                "name": name,
                "arguments": [name, *map(str, arguments)],
                "path": "" if name == "-c" else str(Path(name).parent),
                "folder": str(cwd or Path.cwd()),
                "environment": dict(os.environ if env is None else env),
                "new_session": start_new_session,
                "is_torn_down": is_torn_down,
            }
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._connection.connect(_address(server))
            socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], files)
        self.pid = int(self._connection.recv(64))

    def _file(self, name: str, given: int | IO[Any], theirs: contextlib.ExitStack) -> int:
        """The program's end of a standard file. If the file is piped, our end becomes an attribute."""
        if given == PIPE:
            reader, writer = os.pipe()
            own, other = (writer, reader) if name == "stdin" else (reader, writer)
            setattr(self, name, os.fdopen(own, "w" if name == "stdin" else "r"))
            theirs.callback(os.close, other)
            return other
        if given == DEVNULL:
            return theirs.enter_context(open(os.devnull, "r+b")).fileno()
        return given if isinstance(given, int) else given.fileno()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = int(self._connection.recv(64))
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0.0) from error
            self.returncode = status
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired, BlockingIOError):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the program has ended, and is no child of this process
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Close the standard input, and return the text of standard output and standard error, if they are piped."""
        if self.stdin is not None:
            self.stdin.close()
        found = ["", ""]

        def read(at: int, stream: IO[str]) -> None:
            found[at] = stream.read()

        streams = [(at, stream) for at, stream in enumerate((self.stdout, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=read, args=item, daemon=True) for item in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return found[0], found[1]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.kill()
        self.wait()


def program(file: str, *arguments: object, **settings: Any) -> Program:
    """Start a file of the tests as a program in the folder of that file."""
    return Program(Path(file).read_text(), *arguments, name=file, **{"cwd": Path(file).parent, **settings})


def command(*arguments: object, **settings: Any) -> Program:
    """Start `hicache ARGUMENTS`. Serving commands are forked from a server that has imported their slow modules."""
    if arguments[0] in ("serve", "chat", "demo"):
        settings["server"] = "serving"
    return Program("import sys; from hicache.cli import main; sys.exit(main())", *arguments, **settings)


def output(code: str, *arguments: object, status: int = 0, **settings: Any) -> str:
    """Run a program, which must end with `status`; returns the text of its standard output."""
    with Program(code, *arguments, **settings) as running:
        said, errors = running.communicate()
    assert running.returncode == status, errors
    return said
