"""The routes: completions, chats, models, health, metrics and the dashboard, as an ASGI application."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from hicache.monitoring.figures import figures
from hicache.serving.server.clients import unless_gone, watched
from hicache.serving.server.frontend import Frontend
from hicache.serving.server.generation import Generation
from hicache.serving.server.logprobs import TokenTexts
from hicache.serving.server.middleware import Gate, HttpRecord, RequestLog, record_of
from hicache.serving.server.prometheus import ServerMetrics
from hicache.serving.server.prompts import NO_OBJECT, Prepared
from hicache.serving.server.protocol import ChatBody, CompletionBody, GenerationBody
from hicache.serving.server.replies import DONE, ApiError, Delta, ErrorBody, Reply, event_of, internal_error, invalid
from hicache.serving.server.uploads import Uploads
from hicache.serving.server.workers import PromptWorkers

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_PAGE = Path(__file__).with_name("dashboard.html")
# The page asks its own server only, and runs in no frame.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class AppSettings:
    """`api_key`: empty where every client may ask."""

    model_name: str
    api_key: str
    max_body_bytes: int


class EventStream(Response):
    """Server-sent events of a generation.

    The response begins with the first token, so that its status tells of what goes wrong before; later errors are
    events.
    """

    def __init__(self, generation: Generation, reply: Reply, fields: dict[str, Any]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._generation, self._reply, self._fields = generation, reply, fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(receive, self._generation, self._fields):
            deltas = self._generation.deltas()
            first = await anext(deltas)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events(first, deltas):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _events(self, first: list[Delta], deltas: AsyncIterator[list[Delta]]) -> AsyncIterator[bytes]:
        reply = self._reply
        yield b"".join(map(reply.event, first))
        try:
            async for news in deltas:
                yield b"".join(map(reply.event, news))
        except ApiError as error:
            yield event_of(error.body)
        else:
            yield reply.usage_event(self._generation.usage)


def create_app(frontend: Frontend, workers: PromptWorkers, settings: AppSettings) -> ASGIApp:
    """The application; `frontend` may not be serving yet."""
    app = FastAPI(title="hicache", docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS)
    _add_errors(app)
    _add_generation(app, frontend, Uploads(settings.max_body_bytes), workers, settings)
    _add_status(app, frontend, settings)
    _add_dashboard(app, frontend.metrics)
    _describe_bodies(app)
    return RequestLog(Gate(app, settings.api_key, settings.max_body_bytes), frontend.metrics)


def _add_generation(
    app: FastAPI, frontend: Frontend, uploads: Uploads, workers: PromptWorkers, settings: AppSettings
) -> None:
    texts = TokenTexts(frontend.model.tokenizer)

    async def answer(kind: str, prefix: str, request: Request) -> Response:
        frontend.require_room(1)
        _require_json(request)
        record = record_of(request.scope)
        async with uploads.body(request, frontend.left_s(record.arrival_s)) as raw:
            prepared = await unless_gone(
                request.receive,
                workers.prepare(kind, raw),
                frontend.left_s(record.arrival_s),
                frontend.limits.timeout_s,
            )
        _require_model(prepared.body, settings)
        reply = Reply(prepared.body, f"{prefix}-{uuid.uuid4().hex}", settings.model_name, texts)
        return await _answer(frontend, prepared, reply, request, record)

    @app.post("/v1/completions", responses=_STREAMED)
    async def create_completion(request: Request) -> Response:
        return await answer("completion", "cmpl", request)

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def create_chat_completion(request: Request) -> Response:
        return await answer("chat", "chatcmpl", request)


def _add_status(app: FastAPI, frontend: Frontend, settings: AppSettings) -> None:
    created = int(time.time())
    model = {"id": settings.model_name, "object": "model", "created": created, "owned_by": "hicache"}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        if name != settings.model_name:
            raise _unknown_model(settings)
        return model

    @app.get("/health")
    async def health() -> dict[str, str]:
        frontend.require_serving()
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(frontend.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_dashboard(app: FastAPI, metrics: ServerMetrics) -> None:
    """The page, and the figures that it reads each second. Like `/metrics`, neither asks for the key."""
    page = _PAGE.read_text(encoding="utf-8")

    @app.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})

    @app.get("/metrics.json")
    async def metrics_json() -> Response:
        """`figures`: those of hicache.monitoring.figures. `time_s`: when, on a clock that only grows."""
        found = figures(metrics.registry.collect())
        return JSONResponse({"time_s": time.monotonic(), "figures": found}, headers={"Cache-Control": "no-store"})


async def _answer(
    frontend: Frontend, prepared: Prepared, reply: Reply, request: Request, record: HttpRecord
) -> Response:
    generation = frontend.start(prepared, reply.reply_id, record.arrival_s)
    record.fields.update(reply_id=reply.reply_id, stream=bool(prepared.body.stream))
    if prepared.body.stream:
        return EventStream(generation, reply, record.fields)
    async with watched(request.receive, generation, record.fields):
        texts = await generation.whole()
    return JSONResponse(reply.whole(texts, generation.usage))


def _require_json(request: Request) -> None:
    """A page of another site may send other types without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise invalid(NO_OBJECT)


def _describe_bodies(app: FastAPI) -> None:
    """Add what the routes parse themselves to `/openapi.json`."""
    paths: dict[str, type[BaseModel]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
    keys, schemas = models_json_schema(
        [(kind, "validation") for kind in paths.values()], ref_template="#/components/schemas/{model}"
    )
    described = app.openapi()
    described["components"]["schemas"].update(schemas["$defs"])
    for path, kind in paths.items():
        content = {"application/json": {"schema": keys[kind, "validation"]}}
        described["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}


def _require_model(body: GenerationBody, settings: AppSettings) -> None:
    if body.model not in (None, settings.model_name):
        raise _unknown_model(settings)


def _unknown_model(settings: AppSettings) -> ApiError:
    return ApiError(
        404, f"no such model; {settings.model_name!r} is served here", param="model", code="model_not_found"
    )


def _add_errors(app: FastAPI) -> None:
    """Every error has OpenAI's body."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        record_of(request.scope).fields["code"] = error.body["error"]["code"]
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        texts = {404: "there is no such route", 405: "the route does not have this method"}
        text = texts.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, text, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def on_defect(request: Request, error: Exception) -> Response:
        return internal_error().response()
