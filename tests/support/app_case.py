"""Helpers of tests that call the server's ASGI application in their own process, without connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from hicache.engine import CacheEngine
from hicache.serving.models import ByteTokenizer, Tokenizer
from hicache.serving.request import Runner
from hicache.serving.scheduler import Scheduler
from hicache.serving.server.app import AppSettings, create_app
from hicache.serving.server.engine_thread import EngineThread
from hicache.serving.server.frontend import Frontend, Limits, ServedModel
from hicache.serving.server.prompts import PromptEncoder, PromptLimits
from hicache.serving.server.workers import PromptWorkers
from serving_case import VOCAB, shared, tiny_engine, tiny_llama, tiny_runner

CONTEXT, MAX_OPEN = 512, 8


@dataclass(frozen=True)
class ServedApp:
    """Parts of a server. `app` serves requests through the other parts."""

    thread: EngineThread
    frontend: Frontend
    workers: PromptWorkers
    app: ASGIApp


@contextlib.asynccontextmanager
async def served(
    tokenizer: Tokenizer, make_runner: Callable[[Any, CacheEngine], Runner] = tiny_runner, *, timeout_s: float = 60.0
) -> AsyncIterator[ServedApp]:
    """Run a server's parts in this process, over a tiny model. At the end the engine stops."""
    tiny = shared(tiny_llama, device="cpu")
    engine = tiny_engine(tiny)
    thread = EngineThread(engine, Scheduler(engine, make_runner(tiny, engine)), lambda: None)
    model = ServedModel(("tiny",), tokenizer, VOCAB, CONTEXT)
    encoder = PromptEncoder(tokenizer, PromptLimits(CONTEXT, MAX_OPEN, VOCAB))
    workers = PromptWorkers(encoder, ByteTokenizer)
    frontend = Frontend(model, Limits(MAX_OPEN, timeout_s), thread, {})
    app = create_app(frontend, workers, AppSettings((), 1 << 20))
    parts = ServedApp(thread, frontend, workers, app)
    loop = asyncio.get_running_loop()
    thread.start(lambda events: loop.call_soon_threadsafe(parts.frontend.deliver, events) and None)
    try:
        yield parts
    finally:
        thread.stop()
        await loop.run_in_executor(None, thread.join)
        parts.workers.close()


class Client:
    """A client that posts one body to a route of the application. Set `removed` to disconnect it. Without `sends_all`,
    the body stays incomplete."""

    def __init__(self, app: ASGIApp, path: str, body: bytes, *, sends_all: bool = True) -> None:
        self._app, self._path, self._messages = app, path, [(body, not sends_all)]
        self._sent: list[Message] = []
        self.removed = asyncio.Event()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Post the body; returns the status and the error of the response."""
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": self._path, "headers": headers, "query_string": b""}
        await self._app(scope, self._receive, self._send)
        start, *bodies = self._sent
        return start["status"], json.loads(b"".join(body["body"] for body in bodies))["error"]

    async def _receive(self) -> Message:
        if self._messages:
            body, more = self._messages.pop()
            return {"type": "http.request", "body": body, "more_body": more}
        await self.removed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._sent.append(message)
