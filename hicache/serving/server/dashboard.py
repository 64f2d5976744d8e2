"""The page at `/dashboard`, and the figures that it reads each second. Like `/metrics`, neither asks for the key."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse

from hicache.monitoring.figures import figures
from hicache.serving.server.prometheus import ServerMetrics

_PAGE = Path(__file__).with_name("dashboard.html")
# The page asks its own server only, and runs in no frame.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_dashboard(app: FastAPI, metrics: ServerMetrics) -> None:
    page = _PAGE.read_text(encoding="utf-8")

    @app.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})

    @app.get("/metrics.json")
    async def metrics_json() -> Response:
        """`figures`: those of hicache.monitoring.figures. `time_s`: when, on a clock that only grows."""
        found = figures(metrics.registry.collect())
        return JSONResponse({"time_s": time.monotonic(), "figures": found}, headers={"Cache-Control": "no-store"})
