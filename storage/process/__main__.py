"""`python -m hicache.storage.process SOCKET ENGINE LOG_LEVEL`: the store process of one engine; see `server`.

When the engine disconnects or ends, the process finishes its queued writes, closes the store and ends. It logs to the
standard error of the engine.
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import sys

from hicache.process.logs import server_lines, text_lines
from hicache.storage.process.server import Server
from hicache.storage.process.stores import OpenStores

log = logging.getLogger(__name__)

_TEXT = "%(asctime)s %(levelname)s store process %(process)d: %(message)s"


def main(descriptor: int, engine: int, log_level: int, is_json: bool = False) -> None:
    """Serve the client at a socket's `descriptor` until it disconnects, or the process of the pidfd `engine` ends.
    `log_level`, `is_json`: the settings of the engine's logs."""
    with server_lines(log_level) if is_json else text_lines(_TEXT, log_level):
        _serve(descriptor, engine)


def _serve(descriptor: int, engine: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when this process ends
    server = Server(OpenStores())
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.add(socket.socket(fileno=descriptor))

    def leave(_events: int) -> None:
        server.selector.unregister(engine)
        server.end_clients("its engine has ended")

    # Forked children of the engine share its socket and may outlive it. Therefore the socket alone does not show that
    # the engine has ended.
    server.selector.register(engine, selectors.EVENT_READ, leave)
    try:
        server.run()
    except Exception:
        log.exception("the store process failed")
        raise SystemExit(1) from None


if __name__ == "__main__":
    _descriptor, _engine, _level = map(int, sys.argv[1:])
    main(_descriptor, _engine, _level)
