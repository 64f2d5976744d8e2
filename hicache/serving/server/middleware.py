"""Common handling of all HTTP requests: a request id, a log line, a check of the API key, and a limit on the size of
the body."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hicache.serving.server.connections import IS_CROWDED
from hicache.serving.server.prometheus import ServerMetrics
from hicache.serving.server.replies import CLOSE, crowded, internal_error, invalid, too_large, wrong_key

REQUEST_ID = "x-request-id"
_RECORD = "hicache.record"
_WITH_KEY = ("/v1/", "/tokenize", "/detokenize", "/reset_prefix_cache")
# routes for health checks and monitoring, which are requested frequently
_PROBES = ("/", "/health", "/ping", "/metrics", "/metrics.json", "/dashboard", "/version")
_FIRST_ERROR = 400
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = logging.getLogger(__name__)


@dataclass
class HttpRecord:
    """The data of a request's log line. `fields`: further fields, which the handler sets; they must not contain text
    from a client. `arrival_s`: time by `time.perf_counter` at which the request's head had arrived."""

    request_id: str
    arrival_s: float
    status: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


def record_of(scope: Scope) -> HttpRecord:
    record: HttpRecord = scope[_RECORD]
    return record


class RequestLog:
    """The outermost application: reads and sets `x-request-id`, writes one log line and counts each request.

    If the application raises an exception before the response has begun, the client gets status 500. The exception is
    logged without its message.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        record = HttpRecord(given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex, time.perf_counter())
        scope[_RECORD] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("a request failed", extra={"fields": {"request_id": record.request_id}})
            if not record.status:
                await internal_error().response()(scope, receive, send_with_id)
        finally:
            self._done(scope, record)

    def refused(self, status: int, client: tuple[str, int] | None) -> Response:
        """Return the response to an invalid HTTP request, or to a connection above the limit. This response is counted
        and logged like all other responses."""
        record = HttpRecord(uuid.uuid4().hex, time.perf_counter(), status, {"client": client and client[0]})
        answer = {400: invalid("this is no valid HTTP request", headers=CLOSE), 503: crowded()}[status].response()
        answer.headers[REQUEST_ID] = record.request_id
        self._done({"method": "unknown"}, record)
        return answer

    def _done(self, scope: Scope, record: HttpRecord) -> None:
        # The path of an unknown route is arbitrary text, so it is neither logged nor used as a label.
        route = getattr(scope.get("route"), "path", "unknown")
        self._metrics.http.labels(route, str(record.status)).inc()
        fields = {
            "request_id": record.request_id,
            "method": scope["method"],
            "route": route,
            "status": record.status,
            "seconds": round(time.perf_counter() - record.arrival_s, 6),
            **record.fields,
        }
        is_probe = route in _PROBES and record.status < _FIRST_ERROR
        log.log(logging.DEBUG if is_probe else logging.INFO, "request", extra={"fields": fields})


class Gate:
    """Refuses four kinds of requests: requests without a valid API key on routes that need one; requests other than
    probes if the server is crowded; requests with both Content-Length and Transfer-Encoding, or with two
    Content-Lengths, because a proxy and this server may disagree where such a request ends; and requests whose
    Content-Length exceeds `max_body_bytes`."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, refusal = Headers(scope=scope), None
        length = headers.get("content-length", "0")
        if self._keys and scope["path"].startswith(_WITH_KEY) and not self._has_key(headers):
            refusal = wrong_key()
        elif scope.get(IS_CROWDED) and scope["path"] not in _PROBES:
            refusal = crowded()
        elif "content-length" in headers and "transfer-encoding" in headers:
            refusal = invalid("a request has Content-Length or Transfer-Encoding, not both", headers=CLOSE)
        elif length.isdecimal() and int(length) > self._max_body_bytes:
            refusal = too_large(self._max_body_bytes)
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")
        # All keys are compared, so that the time of the check does not depend on the keys.
        equal = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(equal)
