"""A Redis server of one's own: started, stopped, frozen, filled and corrupted by tests and benchmarks."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MISSING = "" if shutil.which("redis-server") else "redis-server is not installed: apt-get install redis-server"
PATIENCE_S = 60


class RedisServer:
    """Listens on a Unix socket in a folder of its own, with `arguments` elsewhere too; keeps nothing on a disk."""

    def __init__(self, *arguments: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hicache-redis-"))  # a path of a socket is short
        self.socket = self.folder / "socket"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis+unix://{self.socket}"

    def start(self) -> None:
        listen = ("--port", "0", "--unixsocket", str(self.socket))
        command = ("redis-server", *listen, "--save", "", "--dir", str(self.folder), *self._arguments)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        give_up_s = time.monotonic() + PATIENCE_S
        while self._answers("ping") != "PONG":
            assert self._process.poll() is None and time.monotonic() < give_up_s, "redis-server does not start"
            time.sleep(0.01)

    def ask(self, *words: str) -> str:
        """The answer of redis-cli, which fails the test where the server refuses."""
        answer = self._answers(*words)
        assert not answer.startswith(("ERR", "NOAUTH", "WRONGTYPE")), answer
        return answer

    def keys(self) -> list[str]:
        return sorted(self.ask("keys", "*").split())

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)

    def _answers(self, *words: str) -> str:
        command = ["redis-cli", "-s", str(self.socket), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stdout.strip()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class CuttingProxy:
    """Stands between a client and a server, and cuts each connection after so many bytes of requests and of answers."""

    def __init__(self, server: Path, folder: Path) -> None:
        self.path = folder / "proxy"
        self.request_bytes = self.answer_bytes = 1 << 40
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._server))
                for source, target, num_bytes in (
                    (client, server, self.request_bytes),
                    (server, client, self.answer_bytes),
                ):
                    threading.Thread(target=_copy, args=(source, target, num_bytes), daemon=True).start()


class Babbler:
    """Listens at `path`, and answers each connection with the next of `answers`, in turns, before it closes it."""

    def __init__(self, path: Path, answers: Sequence[bytes]) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._answer, args=(itertools.cycle(answers),), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self, answers: Iterator[bytes]) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    client.recv(1 << 16)
                    client.sendall(next(answers))
                client.close()


def _copy(source: socket.socket, target: socket.socket, num_bytes: int) -> None:
    with contextlib.suppress(OSError):
        while num_bytes and (part := source.recv(min(num_bytes, 1 << 16))):
            target.sendall(part)
            num_bytes -= len(part)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[RedisServer]:
    server = RedisServer(*arguments)
    try:
        yield server
    finally:
        server.close()
