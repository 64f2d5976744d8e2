"""Reads the figures of a running server: from `/metrics.json` of hicache's server, from `/metrics` of vLLM and
SGLang."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse

from hicache.errors import NoServer, NotOurServer
from hicache.monitoring.loopback import opener_for
from hicache.monitoring.readings import Reading
from hicache.monitoring.server_figures import server_figures

_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20
# routes that users may have copied with the URL
_ROUTES = ("/v1", "/metrics", "/metrics.json", "/dashboard", "/health")
_OURS = "requests.running"  # a metric that every hicache server exports


class MetricsClient:
    """Reads the figures of one server. `url`: the server's address with or without a scheme, or the URL of one of the
    server's routes."""

    def __init__(self, url: str) -> None:
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        route = next((route for route in _ROUTES if url.endswith(route)), "")
        self.server = url.removesuffix(route).rstrip("/")
        self._has_plug_in = False

    def read(self) -> Reading:
        """Read the figures. Raises NoServer if no server answers. Raises NotOurServer if the server is neither
        `hicache serve` nor vLLM nor SGLang."""
        if self._has_plug_in:
            return self._read_metrics()
        try:
            return self._read_own()
        except NotOurServer as error:
            try:
                reading = self._read_metrics()
            except (NoServer, NotOurServer):
                raise error from None
            self._has_plug_in = True
            return reading

    def _read_own(self) -> Reading:
        text = self._text("/metrics.json")
        try:
            answer = json.loads(text)
            found = {str(name): float(value) for name, value in answer["figures"].items()}
            about = {str(name): str(value) for name, value in answer.get("about", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise NotOurServer(self.server, "its /metrics.json is something else") from None
        if _OURS not in found:
            raise NotOurServer(self.server, "its /metrics.json has other figures")
        return Reading(time.monotonic(), found, about)

    def _read_metrics(self) -> Reading:
        found = server_figures(self._text("/metrics"))
        if found is None:
            raise NotOurServer(self.server, "its /metrics are not those of vLLM or SGLang")
        return Reading(time.monotonic(), *found)

    def _text(self, route: str) -> str:
        try:
            if urllib.parse.urlsplit(self.server).scheme not in ("http", "https"):
                raise ValueError("the address begins with neither http:// nor https://")
            with opener_for(self.server).open(f"{self.server}{route}", timeout=_TIMEOUT_S) as response:
                content: bytes = response.read(_MAX_BYTES)
            return content.decode(errors="replace")
        except urllib.error.HTTPError as error:
            error.close()
            raise NotOurServer(self.server, f"it answers {route} with status {error.code}") from None
        except urllib.error.URLError as error:
            raise NoServer(self.server, _reason(error.reason)) from None
        except (OSError, ValueError, http.client.InvalidURL) as error:
            raise NoServer(self.server, _reason(error)) from None
        except http.client.HTTPException:
            raise NotOurServer(self.server, "it does not speak HTTP") from None


def _reason(error: str | BaseException) -> str:
    """Return the reason of an error without the error number, like `Connection refused`."""
    return str((isinstance(error, OSError) and error.strerror) or error)
