"""A server of stores like `hicache store serve`, in a thread of the test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from hicache.storage.process.server import Server
from hicache.storage.process.stores import OpenStores


@contextlib.contextmanager
def served(directory: Path, path: Path) -> Iterator[str]:
    """Serve the stores of `directory` at the socket `path`; yields the URL for clients."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    server = Server(OpenStores(f"lmdb://{directory}?budget=64MiB"), listener=listener)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield f"unix:{path}"
    server.stop()
    thread.join()
