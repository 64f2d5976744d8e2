"""`python -m hicache.storage.process DESCRIPTOR PARENT LOG_LEVEL`: the store process of one engine; see `server`.

Ends when the engine has left or ended. Logs to the standard error of the engine.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys

from hicache.storage.process.server import Server
from hicache.storage.process.stores import OpenStores


def main(descriptor: int, parent: int, log_level: int) -> None:
    """Serve the client at a socket's `descriptor` until it leaves, or the process `parent` ends. `log_level`: of the
    parent."""
    logging.basicConfig(format="%(asctime)s %(levelname)s store process %(process)d: %(message)s", level=log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when it ends
    server = Server(OpenStores())
    server.add(socket.socket(fileno=descriptor))
    watched = os.pidfd_open(parent)  # forked children of the engine hold the socket too, and may live on
    server.selector.register(watched, selectors.EVENT_READ, lambda _events: server.stop())
    if os.getppid() == parent:
        server.run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
