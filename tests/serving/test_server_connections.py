"""Connections: their limits in number and time, and how the server sees that a client disconnects. The application has
a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hicache.errors import ConfigError
from hicache.serving.server.connections import IS_CROWDED, Connection, ConnectionLimits, require_known_parser

HEAD = b"%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
ASK, HANG, FLOOD = (HEAD % (b"GET " + path, 0) for path in (b"/", b"/hang", b"/flood"))
DONE = b"done\r\n0\r\n\r\n"  # one chunk of a body, and its end
EVER = 1e6  # seconds

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """An application that answers "done". The application never answers under /hang, and answers without an end under
    /flood. `ends`: how requests without a complete answer ended."""

    def __init__(self) -> None:
        self.crowded: list[bool] = []
        self.begun, self.ends = asyncio.Semaphore(0), asyncio.Queue[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        self.begun.release()
        self.crowded.append(scope[IS_CROWDED])
        if scope["path"] == "/hang":
            while (message := await receive())["type"] == "http.request":
                pass
            self.ends.put_nowait(message["type"])
        elif scope["path"] == "/flood":
            await send(start)
            removed = asyncio.ensure_future(self._gone(receive))
            while not removed.done():
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            self.ends.put_nowait(removed.result())
        else:
            await send(start)
            await send({"type": "http.response.body", "body": b"done"})

    async def _gone(self, receive: Receive) -> str:
        while (message := await receive())["type"] == "http.request":
            pass
        return str(message["type"])


def refused(status: int, client: tuple[str, int] | None) -> Response:
    return Response(f"refused {client is not None}", status)


@contextlib.asynccontextmanager
async def serving(
    limits: ConnectionLimits, keep_alive_s: float = EVER
) -> AsyncIterator[tuple[App, Callable[[bytes], Awaitable[Streams]]]]:
    """Run the application. Yields the application, and a function that opens a connection and sends bytes."""
    app, opened = App(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        http: Any = partial(Connection, limits)
        keep_alive: Any = keep_alive_s  # uvicorn also takes fractions of a second
        config = uvicorn.Config(app, http=http, lifespan="off", log_config=None, timeout_keep_alive=keep_alive)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listener]))

        async def connect(sent: bytes) -> Streams:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            writer.write(sent)
            await writer.drain()
            return reader, writer

        try:
            yield app, connect
        finally:
            for writer in opened:
                writer.close()
            server.should_exit = True
            await task


async def is_closed(streams: Streams) -> bool:
    with contextlib.suppress(ConnectionError):
        while await streams[0].read(1 << 20):
            pass
    return True


def test_what_is_no_request() -> None:
    """Bytes that are no valid request get an answer of their own, and the connection is closed. If a response has
    begun, the connection is only closed."""
    many = b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"

    async def run() -> None:
        async with serving(ConnectionLimits(100, EVER, refused, head_s=EVER)) as (app, connect):
            for sent in (
                many,
                b"\0\r\n\r\n",
                HEAD[:-2] % (b"POST /hang", 9) + b"Transfer-Encoding: chunked\r\n\r\n-\r\n",
            ):
                answer = await (await connect(sent))[0].read()
                assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b"\r\n\r\nrefused True"), answer
            assert await app.ends.get() == "http.disconnect"
            flood = await connect(HEAD[:-2] % (b"POST /flood", 9) + b"Transfer-Encoding: chunked\r\n\r\n")
            assert (await flood[0].read(12)) == b"HTTP/1.1 200"
            flood[1].write(b"-\r\n")
            assert await is_closed(flood)

    asyncio.run(run())


def test_connections_without_a_request_are_closed() -> None:
    """A connection that sends nothing, an incomplete head, or an incomplete head after a response is closed after the
    time limit."""

    async def run() -> None:
        async with serving(ConnectionLimits(100, EVER, refused, head_s=0.05)) as (_, connect):
            for sent in (b"", ASK[:-2], ASK + ASK[:-2]):
                assert await is_closed(await connect(sent))

    asyncio.run(run())


def test_an_idle_connection_takes_the_next_request() -> None:
    """After a response a connection may be idle for the keep-alive time, which is not the time limit of a head; then
    the connection is closed. The time limit of a head begins with the first byte of the next request."""

    async def run() -> None:
        limits = ConnectionLimits(100, EVER, refused, head_s=EVER)
        async with serving(limits) as (_, connect):
            reader, writer = await connect(ASK)
            await reader.readuntil(DONE)
            limits.head_s = 0.05
            writer.write(ASK)
            await reader.readuntil(DONE)
            assert await is_closed(await connect(b""))  # the time limit of a head has passed
            writer.write(ASK)
            await reader.readuntil(DONE)
            writer.write(ASK[:-2])
            assert await is_closed((reader, writer))
        async with serving(ConnectionLimits(100, EVER, refused, head_s=EVER), keep_alive_s=0.05) as (_, connect):
            assert await is_closed(await connect(ASK))

    asyncio.run(run())


def test_requests_have_their_time() -> None:
    """The connection of an unanswered request, or of a response that the client does not read, is closed after the
    timeout, and the application is notified."""

    async def run() -> None:
        async with serving(ConnectionLimits(100, 0.05, refused, head_s=EVER)) as (app, connect):
            assert await is_closed(await connect(HANG))
            await connect(FLOOD)
            assert [await app.ends.get(), await app.ends.get()] == ["http.disconnect"] * 2

    asyncio.run(run())


def test_more_connections_than_may_be() -> None:
    """If there are too many connections, a new one closes the one that has waited longest for a request or for the rest
    of one. A connection whose request is being answered is not closed. If all are being answered, the new one is
    closed."""

    async def run() -> None:
        async with serving(ConnectionLimits(3, EVER, refused, head_s=EVER)) as (app, connect):
            answered = await connect(HANG)
            await app.begun.acquire()
            idle = await connect(ASK[:-2])
            uploading = await connect(HEAD % (b"POST /hang", 2) + b"1")
            await app.begun.acquire()
            reader, writer = await connect(ASK)
            await reader.readuntil(DONE)
            assert await is_closed(idle)
            await connect(HANG), await connect(HANG)
            assert await is_closed(uploading) and await is_closed((reader, writer))
            assert await app.ends.get() == "http.disconnect"
            assert (await (await connect(ASK))[0].read()).startswith(b"HTTP/1.1 503 ")
            assert not answered[0].at_eof() and app.ends.empty()
            assert app.crowded == [False] * 4 + [True]

    asyncio.run(run())


@pytest.mark.parametrize("extra", [b"\r\n", ASK * 100])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_leaves_is_seen(extra: bytes, at_once: bool) -> None:
    """The application sees the disconnect, whether the client sent more bytes with its request, later, or none."""

    async def run() -> None:
        async with serving(ConnectionLimits(100, EVER, refused, head_s=EVER)) as (app, connect):
            _, writer = await connect(HANG + extra if at_once else HANG)
            await app.begun.acquire()
            writer.write(b"" if at_once else extra)
            writer.close()
            assert await app.ends.get() == "http.disconnect"

    asyncio.run(run())


def test_requests_that_come_together() -> None:
    """Requests in one piece are answered one after the other."""

    async def run() -> None:
        async with serving(ConnectionLimits(100, EVER, refused, head_s=EVER)) as (_, connect):
            reader, _ = await connect(ASK * 3)
            for _ in range(3):
                await reader.readuntil(DONE)

    asyncio.run(run())


def test_an_unknown_parser_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The installed uvicorn has all methods and attributes that the server needs. An untested release that has them too
    causes one warning. A method with other parameters, or a missing attribute, is refused by name."""

    class OtherMethod(H11Protocol):
        pass

    class OtherAttribute:
        def __init__(self) -> None:
            self.keep_alive = self.more_body = True

    with caplog.at_level(logging.WARNING):
        require_known_parser()
        assert not caplog.records
        require_known_parser("0.99.1")
    (line,) = caplog.messages
    assert "uvicorn 0.99.1 was never tested" in line
    for given, part in (
        ({"parser": OtherMethod}, "send_400_response"),
        ({"cycle": OtherAttribute}, "response_complete"),
    ):
        with pytest.raises(ConfigError, match=part):
            require_known_parser("0.99.1", **given)
