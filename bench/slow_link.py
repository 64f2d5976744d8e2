"""A TCP proxy for a port of this machine, with a limited number of bytes per second."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

_PIECE_BYTES = 16 << 10


class SlowLink:
    """Forwards connections from its `port` to `target_port`. Each connection transfers at most `bytes_per_s` in each
    direction."""

    def __init__(self, target_port: int, bytes_per_s: float) -> None:
        self._target_port = target_port
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *_: Any) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                target.sendall(data)
                time.sleep(len(data) / self._bytes_per_s)
            target.shutdown(socket.SHUT_WR)
