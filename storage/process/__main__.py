"""The program `python -m hicache.storage.process SOCKET ENGINE LOG_LEVEL`, the store process of one engine; see
`server`.

When the engine disconnects or ends, the process finishes its queued writes, closes the store and ends. For a remote
store the process waits at most 5 s, after the disk is closed if there is one, until this store has finished its queued
writes and is closed. The store process logs to the standard error of the engine.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys

from hicache.process.logs import server_lines, text_lines
from hicache.storage.process.closing import wait_for_closing
from hicache.storage.process.server import Server
from hicache.storage.process.stores import OpenStores

log = logging.getLogger(__name__)

_TEXT = "%(asctime)s %(levelname)s store process %(process)d: %(message)s"


def main(descriptor: int, engine: int, log_level: int, is_json: bool = False) -> None:
    """Serve the client at the socket `descriptor` until the client disconnects or the process of the pidfd `engine`
    ends. `log_level`, `is_json`: the settings of the engine's logs."""
    with server_lines(log_level) if is_json else text_lines(_TEXT, log_level):
        _serve(descriptor, engine)
        is_hanging = not wait_for_closing()
    if is_hanging:
        os._exit(0)  # the interpreter would wait for the threads that hang, and keep the engine's memory mapped


def _serve(descriptor: int, engine: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when this process ends
    server = Server(OpenStores())
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.add(socket.socket(fileno=descriptor))

    def leave(_events: int) -> None:
        server.selector.unregister(engine)
        server.end_clients("its engine has ended")

    # Forked children of the engine share the engine's socket and may run longer than the engine. So an open socket does
    # not show that the engine is alive.
    server.selector.register(engine, selectors.EVENT_READ, leave)
    try:
        server.run()
    except Exception:
        log.exception("the store process failed")
        raise SystemExit(1) from None


if __name__ == "__main__":
    _descriptor, _engine, _level = map(int, sys.argv[1:])
    main(_descriptor, _engine, _level)
