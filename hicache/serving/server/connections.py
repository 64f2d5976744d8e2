"""Limits the number of connections and the time of each, and detects when clients disconnect.

uvicorn lets a new connection that sends nothing, or an incomplete head, stay open forever. Only the limit of open files
bounds the number of connections; uvicorn's `limit_concurrency` would refuse probes like other requests. uvicorn also
stops reading from a connection that sent bytes after its request, and then does not notice that the client disconnects.
"""

from __future__ import annotations

import asyncio
import http
import inspect
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from hicache.errors import ConfigError
from hicache.releases import TESTED

MAX_BACKLOG = 2048
# key of an ASGI scope; its value says whether all connections for requests other than probes are in use
IS_CROWDED = "hicache.is_crowded"
_SHARE_OF_PROBES = 16
# The parts of uvicorn's parser that `Connection` overrides and reads.
_OVERRIDDEN = ("connection_made", "connection_lost", "data_received", "send_400_response", "on_response_complete")
_ATTRIBUTES = ("app", "client", "conn", "connections", "cycle", "loop", "transport")
_ATTRIBUTES_OF_CYCLE = ("keep_alive", "more_body", "response_complete")

log = logging.getLogger(__name__)


@dataclass
class ConnectionLimits:
    """Limits of connections. `max_connections`: maximum number of open connections. `head_s`: maximum seconds until the
    head of a request has arrived. They count from the start of the connection, or from the first byte after the last
    response. `request_s`: maximum seconds from the head of a request until its response is sent. `refused`: given a
    status and the client's address, returns the response to an invalid request (400) or to a connection above the limit
    (503). uvicorn's `timeout_keep_alive` closes connections that are idle after a response."""

    max_connections: int
    request_s: float
    refused: Callable[[int, tuple[str, int] | None], Response]
    head_s: float = 10.0
    is_reached: bool = False

    @property
    def max_requests(self) -> int:
        """Maximum number of requests in progress other than probes. A few connections are reserved for probes."""
        return max(1, self.max_connections - max(1, self.max_connections // _SHARE_OF_PROBES))


def bounds_by_descriptors(max_connections: int) -> tuple[int, int]:
    """Return two limits: of open connections, and of connections that are accepted at once. Open connections may use
    half of the file descriptors of this process, and connections that were accepted but not refused yet may use a
    quarter."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(max_connections, soft // 2)), max(1, min(MAX_BACKLOG, soft // 16))


class Connection(H11Protocol):
    """One connection. A new connection above the limit closes the connection that has waited longest for a request or
    for the rest of a request. If responses are in progress on all other connections, the new connection itself is
    closed. The scope of each request has the key `IS_CROWDED`."""

    def __init__(self, limits: ConnectionLimits, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._served = self.app
        self.app = self._answer
        self._timer: asyncio.TimerHandle | None = None
        self._timed: object = None  # request whose time is limited by the timer; None: the head of the next request
        self._waits_since_s = self.loop.time()

    @property
    def is_answering(self) -> bool:
        """Return whether a complete request has arrived to which the response is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._close_one()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self.is_answering:
            # Drop bytes after a request. uvicorn would keep them, and then not notice that the client disconnects.
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot parse. uvicorn would answer with plain text, without counting the
        request."""
        self._refuse(400)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waits_since_s = self.loop.time()
        self._watch()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        others = self.connections - {self}
        most = self._limits.max_requests
        scope[IS_CROWDED] = len(others) >= most and most <= sum(
            isinstance(one, Connection) and one.is_answering for one in others
        )
        await self._served(scope, receive, send)

    def _refuse(self, status: int) -> None:
        """Send an error response unless a response has begun, and close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        response = self._limits.refused(status, self.client)
        reason = http.HTTPStatus(status).phrase.encode()
        head = h11.Response(status_code=status, headers=response.raw_headers, reason=reason)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Start the timer for the event that the connection waits for, unless this timer already runs."""
        request = None if self.cycle is None or self.cycle.response_complete else self.cycle
        if self._timer is not None:
            if request is self._timed:
                return
            self._timer.cancel()
        is_sending = request is not None or self.transport.get_write_buffer_size()
        if not is_sending and self.cycle is not None and not self.conn.trailing_data[0]:
            self._timer = None
            return
        seconds = self._limits.request_s if is_sending else self._limits.head_s
        self._timed = request
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _close_one(self) -> None:
        waiting = [one for one in self.connections if isinstance(one, Connection) and not one.is_answering]
        victim = min(waiting, key=lambda one: one._waits_since_s)
        self.connections.discard(victim)
        if victim is self:
            self._refuse(503)
        else:
            victim.transport.abort()
        if not self._limits.is_reached:
            self._limits.is_reached = True
            log.warning(
                "%d connections are open; each new one closes another that waits for a request. Raise "
                "--max-connections, and the limit of open files to twice that number",
                self._limits.max_connections,
            )


def require_known_parser(
    version: str = uvicorn.__version__, parser: type[Any] = H11Protocol, cycle: type[Any] = RequestResponseCycle
) -> None:
    """Check that `parser` has the methods and attributes of uvicorn that `Connection` overrides and reads. Logs a
    warning if uvicorn's release was not tested. Raises ConfigError if one is missing or has other parameters."""
    tested = TESTED["uvicorn"]
    missing = [
        name
        for name in _OVERRIDDEN
        if not inspect.isfunction(own := vars(parser).get(name))
        or [*inspect.signature(own).parameters] != [*inspect.signature(getattr(Connection, name)).parameters]
    ]
    missing += {*_ATTRIBUTES}.difference(parser.__init__.__code__.co_names)
    missing += {*_ATTRIBUTES_OF_CYCLE}.difference(cycle.__init__.__code__.co_names)
    if missing:
        raise ConfigError(
            f"uvicorn {version} has another parser than the tested releases: {', '.join(missing)}; "
            f"pip install 'uvicorn>={tested.first},<={tested.last}.99'"
        )
    if version not in tested:
        log.warning("uvicorn %s was never tested with hicache; %s to %s were", version, tested.first, tested.last)
