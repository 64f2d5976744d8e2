"""A `hicache serve` in its own process, and readers of its log and metrics."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import programs
from hicache.monitoring.loopback import opener_for
from waiting import BOUND_S, eventually

if TYPE_CHECKING:
    import openai

# a word in every prompt of the tests; no log may contain it
SECRET = "Xylophon"
# Of the server that tests share: the two keys, and the number of prompts that may run or wait.
KEY, OLD_KEY, FULL = "sk-right-1", "sk-older-2", 6
HEADERS: Any = {"Authorization": f"Bearer {KEY}".encode(), "Content-Type": "application/json"}
TINY = ("--host-page-size", "16", "--page-size", "4", "--chunk-tokens", "64", "--prefetch-mode", "wait_complete")


class Server:
    """A running server. `log`: the lines that the server has written to stderr so far."""

    def __init__(self, process: programs.Program, url: str, stderr: Path) -> None:
        self.process, self.url, self._stderr = process, url, stderr
        self.root = url.removesuffix("/v1")
        self.host, self.port = "127.0.0.1", int(self.root.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return self._stderr.read_text()

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_line(self, **fields: Any) -> dict[str, Any]:
        """Wait for the first line of the log with these fields. A request's line is written when its response is
        complete."""
        found = eventually(
            lambda: [line for line in self.log_lines if fields.items() <= line.items()], lambda: self.log
        )
        return found[0]

    def client(self, api_key: str = "any") -> openai.OpenAI:
        import openai

        direct = openai.DefaultHttpxClient(trust_env=False)  # ignore the proxy settings of the environment
        return openai.OpenAI(base_url=self.url, api_key=api_key, max_retries=0, timeout=BOUND_S, http_client=direct)

    def get(self, path: str) -> str:
        with opener_for(self.root).open(self.root + path, timeout=BOUND_S) as response:
            return str(response.read().decode())

    def status(self, path: str) -> int:
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        return 200

    def metric(self, name: str) -> float:
        """The sum of a metric over all labels."""
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def wait_for(self, name: str, value: float) -> None:
        """Wait until the metric has the value."""
        eventually(lambda: self.metric(name) == value, lambda: (name, self.metric(name), self.log))

    def wait_for_at_least(self, name: str, value: float) -> None:
        eventually(lambda: self.metric(name) >= value, lambda: (name, self.metric(name), self.log))

    def wait_idle(self) -> None:
        """Wait until no request runs or waits."""
        self.wait_for("hicache_requests_queued", 0)
        self.wait_for("hicache_requests_running", 0)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(BOUND_S)


@contextlib.contextmanager
def serving(folder: Path, *flags: str, api_key: str = "") -> Iterator[Server]:
    """Run a server on a free port of the loopback, with the random model unless the flags name another one. At the end
    the server stops, its check of the engine must find nothing, and no line of its log may have a prompt's text or the
    key."""
    stderr, environment = folder / "stderr", {**os.environ, "HICACHE_API_KEY": api_key}
    with (
        stderr.open("w") as errors,
        programs.command(
            "serve", "--port", "0", "--model", "random", *flags, stderr=errors, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " on http://" in line, stderr.read_text()
        assert process.stdout.readline().endswith("/dashboard\n")
        server = Server(process, line.split(" on ")[1].strip(), stderr)
        yield server
        if process.poll() is None:
            assert server.end() == 0, server.log
        assert SECRET not in server.log and not any(key in server.log for key in api_key.split(",") if key)
        assert all(server.log_lines)


def ask(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Send a plain request with the right key; returns the status, JSON body and headers."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=BOUND_S)
    sent = {**HEADERS, **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, body, sent)
    response = connection.getresponse()
    answer = (response.status, json.loads(response.read()), {k.lower(): v for k, v in response.getheaders()})
    connection.close()
    return answer
