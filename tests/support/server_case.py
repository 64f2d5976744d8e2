"""A `hicache serve` in a process of its own, and what its metrics say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai

_WAIT_S = _END_S = 60.0
# In every prompt of the tests: no log may have it.
SECRET = "Xylophon"
TINY = ("--host-page-size", "16", "--page-size", "4", "--chunk-tokens", "64", "--prefetch-mode", "wait_complete")


class Server:
    """A running server. `log`: what it wrote on stderr so far."""

    def __init__(self, process: subprocess.Popen[str], url: str, stderr: Path) -> None:
        self.process, self.url, self._stderr = process, url, stderr
        self.root = url.removesuffix("/v1")
        self.host, self.port = "127.0.0.1", int(self.root.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return self._stderr.read_text()

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines()]

    def wait_for_line(self, **fields: Any) -> dict[str, Any]:
        """The first line of the log with these fields; a request's is written when its response is complete."""
        end_s = time.monotonic() + _WAIT_S
        while time.monotonic() < end_s:
            for line in self.log.splitlines(keepends=True):
                if line.endswith("\n") and fields.items() <= (found := json.loads(line)).items():
                    return dict(found)
            time.sleep(0.05)
        raise AssertionError(f"no line with {fields}\n{self.log[-4000:]}")

    def client(self, api_key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=api_key, max_retries=0, timeout=_END_S)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.root + path, timeout=_END_S) as response:
            return str(response.read().decode())

    def status(self, path: str) -> int:
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        return 200

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def wait_for(self, name: str, value: float) -> None:
        """Until the metric has the value."""
        self._wait(name, lambda found: found == value)

    def wait_for_at_least(self, name: str, value: float) -> None:
        self._wait(name, lambda found: found >= value)

    def wait_idle(self) -> None:
        """Until no request runs or waits."""
        self.wait_for("hicache_requests_queued", 0)
        self.wait_for("hicache_requests_running", 0)

    def _wait(self, name: str, is_right: Callable[[float], bool]) -> None:
        end_s = time.monotonic() + _WAIT_S
        while not is_right(found := self.metric(name)):
            assert time.monotonic() < end_s, f"{name} is {found}\n{self.log[-4000:]}"
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(_END_S)


@contextlib.contextmanager
def serving(folder: Path, *flags: str, api_key: str = "") -> Iterator[Server]:
    """A server on a free port of the loopback. At the end it is told to stop, its check of the engine finds nothing,
    and no line of its log has a prompt's text or the key."""
    stderr = folder / "stderr"
    with stderr.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "hicache.cli", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "HICACHE_API_KEY": api_key},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " on http://" in line, stderr.read_text()
        server = Server(process, line.split(" on ")[1].strip(), stderr)
        yield server
        if process.poll() is None:
            assert server.end() == 0, server.log
        assert SECRET not in server.log and (not api_key or api_key not in server.log)
        assert all(server.log_lines)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
