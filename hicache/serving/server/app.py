"""The ASGI application with the routes for completions, chats, models, health, metrics and the dashboard."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from hicache.engine import MemoryTier
from hicache.errors import ConfigError
from hicache.monitoring.figures import figures
from hicache.monitoring.kept import KeptReadings
from hicache.serving.constrained import JsonAnswers, JsonConstraint
from hicache.serving.server.clients import run_unless_disconnected, watched
from hicache.serving.server.frontend import Frontend, ServedModel
from hicache.serving.server.generation import Generation
from hicache.serving.server.logprobs import TokenTexts
from hicache.serving.server.middleware import Gate, RequestLog, record_of
from hicache.serving.server.prometheus import ServerMetrics
from hicache.serving.server.prompts import NO_OBJECT, Prepared, Prompt
from hicache.serving.server.protocol import ChatBody, CompletionBody, GenerationBody
from hicache.serving.server.replies import DONE, ApiError, Delta, ErrorBody, Reply, event_of, internal_error, invalid
from hicache.serving.server.side_protocol import DetokenizeBody, ResetBody, TokenizeBody
from hicache.serving.server.uploads import Uploads
from hicache.serving.server.workers import PromptWorkers

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_DEBUG = "x-hicache-debug"  # with this header, the usage has `missed_tokens_details`
_PAGE = Path(__file__).with_name("dashboard.html")
# Content security policy: the dashboard page sends requests only to its own server, and no other page may show it in a
# frame.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class AppSettings:
    """Settings of the application. `api_keys`: a request must have one of these keys; if there are none, every client
    may send requests."""

    api_keys: Sequence[str]
    max_body_bytes: int


class EventStream(Response):
    """Server-sent events of a generation.

    The response begins with the first token. So an error before the first token sets the HTTP status, and a later error
    is sent as an event.
    """

    def __init__(self, generation: Generation, reply: Reply, fields: dict[str, Any]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._generation = generation
        self._reply = reply
        self._fields = fields

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


def create_app(
    frontend: Frontend, workers: PromptWorkers, settings: AppSettings, kept: KeptReadings | None = None
) -> RequestLog:
    """Create the ASGI application. `frontend` may start to serve later. `kept`: readings of the last hour for the
    dashboard."""
    app = FastAPI(title="hicache", docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS)
    _add_errors(app)
    model = frontend.model
    answers = JsonAnswers(model.tokenizer, model.vocab_size, model.eos_ids)
    reader, texts = _RequestReader(frontend, Uploads(settings.max_body_bytes), workers), TokenTexts(model.tokenizer)
    _add_generation(app, frontend, reader, texts, answers)
    _add_tokens(app, frontend, reader, texts)
    _add_reset(app, frontend, reader)
    _add_status(app, frontend)
    _add_dashboard(app, frontend.metrics, kept)
    _describe_bodies(app)
    return RequestLog(Gate(app, settings.api_keys, settings.max_body_bytes), frontend.metrics)


class _RequestReader:
    """Receives and parses the bodies of requests."""

    def __init__(self, frontend: Frontend, uploads: Uploads, workers: PromptWorkers) -> None:
        self._frontend = frontend
        self._uploads = uploads
        self._workers = workers

    async def prepared(self, kind: str, request: Request) -> Prepared:
        """Receive, parse and tokenize the body of a request. `kind`: a key of `BODIES`. Raises `ApiError`."""
        _require_json(request)
        frontend = self._frontend
        arrival_s = record_of(request.scope).arrival_s
        async with self._uploads.body(request, frontend.left_s(arrival_s)) as raw:
            with frontend.preparing():
                prepared = await run_unless_disconnected(
                    request.receive,
                    self._workers.prepare(kind, raw),
                    frontend.left_s(arrival_s),
                    frontend.limits.timeout_s,
                )
        if prepared.body.model not in (None, *frontend.model.names):
            raise _unknown_model(frontend.model)
        return prepared


def _add_generation(
    app: FastAPI, frontend: Frontend, reader: _RequestReader, texts: TokenTexts, json_answers: JsonAnswers
) -> None:
    async def answer(kind: str, prefix: str, request: Request) -> Response:
        frontend.require_capacity(1)
        prepared = await reader.prepared(kind, request)
        body = prepared.body
        assert isinstance(body, GenerationBody)
        reply = Reply(body, f"{prefix}-{uuid.uuid4().hex}", body.model or frontend.model.names[0], texts)
        constraint = await _constraint(json_answers, body)
        return await _answer(frontend, body, prepared.prompts, reply, request, constraint)

    @app.post("/v1/completions", responses=_STREAMED)
    async def create_completion(request: Request) -> Response:
        return await answer("completion", "cmpl", request)

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def create_chat_completion(request: Request) -> Response:
        return await answer("chat", "chatcmpl", request)


def _add_tokens(app: FastAPI, frontend: Frontend, reader: _RequestReader, texts: TokenTexts) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        frontend.require_serving()
        prepared = await reader.prepared("tokenize", request)
        tokens, body = prepared.prompts[0].tokens.tolist(), prepared.body
        assert isinstance(body, TokenizeBody)
        strings = [texts[token] for token in tokens] if body.root.return_token_strs else None
        limit = frontend.model.max_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        frontend.require_serving()
        return JSONResponse({"prompt": (await reader.prepared("detokenize", request)).prompts[0].text})


def _add_reset(app: FastAPI, frontend: Frontend, reader: _RequestReader) -> None:
    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, bool]:
        if request.query_params:
            raise invalid('parameters are in the body here, like {"tiers": ["device", "host"]}')
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        body = (await reader.prepared("reset", request)).body if has_body else ResetBody()
        assert isinstance(body, ResetBody)
        return {"success": await frontend.reset(body.tiers or get_args(MemoryTier))}


def _add_status(app: FastAPI, frontend: Frontend) -> None:
    served = frontend.model
    about = {"object": "model", "created": int(time.time()), "owned_by": "hicache"}
    models = {
        name: {"id": name, **about, "root": served.names[0], "max_model_len": served.max_len} for name in served.names
    }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [*models.values()]}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        if name not in models:
            raise _unknown_model(served)
        return models[name]

    async def health() -> dict[str, str]:
        frontend.require_serving()
        return {"status": "ok"}

    for path, methods in {"/health": ("GET", "HEAD"), "/ping": ("GET", "HEAD", "POST")}.items():
        for method in methods:
            app.add_api_route(path, health, methods=[method])

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": frontend.metrics.about["version"]}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(frontend.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_dashboard(app: FastAPI, metrics: ServerMetrics, kept: KeptReadings | None) -> None:
    """Add the route of the dashboard page, and the route of the figures that the page reads each second. Like
    `/metrics`, both routes need no API key."""
    page = _PAGE.read_text(encoding="utf-8")

    @app.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("dashboard")  # relative, because a proxy may add a prefix to paths

    @app.get("/metrics.json")
    async def metrics_json(history: bool = False) -> Response:
        """Return the figures of the dashboard. In the result, `figures` are the figures of hicache.monitoring.figures,
        and `time_s` is a monotonic time of the server. `history`: also return the readings of the last hour."""
        payload = {"time_s": time.monotonic(), "about": metrics.about, "figures": figures(metrics.registry.collect())}
        if history and kept is not None:
            payload["history"] = kept.as_json()
        return JSONResponse(payload, headers={"Cache-Control": "no-store"})


async def _constraint(answers: JsonAnswers, body: GenerationBody) -> JsonConstraint | None:
    """Return the constraint of a request. A thread creates the constraint, because a large schema would block the event
    loop for long. Raises `ApiError`."""
    schema = None if body.response_format is None else body.response_format.answer_schema
    if schema is None:
        return None
    try:
        return await run_in_threadpool(answers.constraint, schema)
    except ConfigError as error:
        raise invalid(str(error), "response_format") from None


async def _answer(
    frontend: Frontend,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    reply: Reply,
    request: Request,
    constraint: JsonConstraint | None,
) -> Response:
    record = record_of(request.scope)
    is_debug = request.headers.get(_DEBUG, "") not in ("", "0")
    generation = frontend.start(body, prompts, reply.reply_id, record.arrival_s, constraint, is_debug=is_debug)
    record.fields.update(reply_id=reply.reply_id, stream=bool(body.stream))
    if body.stream:
        return EventStream(generation, reply, record.fields)
    async with watched(request.receive, generation, record.fields):
        texts = await generation.collect()
    # A thread encodes the reply, because encoding log probabilities of a long prompt would block the event loop.
    return await run_in_threadpool(lambda: JSONResponse(reply.complete(texts, generation.usage)))


def _require_json(request: Request) -> None:
    """Refuse content types other than JSON, because a browser lets pages of other sites send them without a preflight
    request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise invalid(NO_OBJECT)


def _describe_bodies(app: FastAPI) -> None:
    """Add schemas of the bodies to `/openapi.json`. FastAPI does not know them, because the routes parse bodies
    themselves."""
    paths: dict[str, type[BaseModel]] = {
        "/v1/completions": CompletionBody,
        "/v1/chat/completions": ChatBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
        "/reset_prefix_cache": ResetBody,
    }
    keys, schemas = models_json_schema(
        [(kind, "validation") for kind in paths.values()], ref_template="#/components/schemas/{model}"
    )
    described = app.openapi()
    described["components"]["schemas"].update(schemas["$defs"])
    for path, kind in paths.items():
        content = {"application/json": {"schema": keys[kind, "validation"]}}
        described["paths"][path]["post"]["requestBody"] = {"required": kind is not ResetBody, "content": content}


def _unknown_model(model: ServedModel) -> ApiError:
    names = " or ".join(map(repr, model.names))
    return ApiError(404, f"no such model; {names} is served here", param="model", code="model_not_found")


def _add_errors(app: FastAPI) -> None:
    """Answer every error with OpenAI's error body."""

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
