"""A store process that an operator starts for a machine: `hicache store serve URL --socket PATH`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from pathlib import Path

from hicache.storage.base import StoreError, StoreLocked
from hicache.storage.process.closing import wait_for_closing
from hicache.storage.process.server import Server
from hicache.storage.process.settings import RemoteSettings
from hicache.storage.process.stores import NO_REMOTE, OpenStores
from hicache.storage.store_url import scheme_of
from hicache.storage.urls import opener_of

log = logging.getLogger(__name__)

_BACKLOG = 64


def serve(url: str, path: Path, remote: RemoteSettings = NO_REMOTE) -> bool:
    """Serve the store at `url` to engines of this user, at the Unix socket `path`. On SIGTERM or SIGINT, close the
    stores, and return whether all are closed (`wait_for_closing`). Pages are copied to the store `remote`, if it has a
    URL.

    On a disk each identity has its own subfolder of the URL's folder. Raises StoreError for an invalid URL or path,
    StoreLocked if another process serves at the path.
    """
    for each in filter(None, (url, remote.url)):
        opener_of(each)
    with _listening(path) as listener:
        server = Server(OpenStores(url, remote=remote), listener=listener)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        log.info("stores of %s are served at %s", scheme_of(url), path)
        server.run()
        path.unlink(missing_ok=True)
    return wait_for_closing()


def _listening(path: Path) -> socket.socket:
    """Listen at a Unix socket that only this user can access. Create the folder of the socket if it is missing."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700, parents=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if not probe.connect_ex(str(path)):
                    raise StoreLocked(f"another process serves a store at {path}; choose another path")
            path.unlink()  # left by a killed process
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StoreError(f"cannot serve at {path}: {error.strerror or error}; choose another path") from error
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
