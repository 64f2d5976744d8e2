"""An S3 server of one's own, moto's in a process: started, stopped, frozen and wiped by tests and benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from redis_server import PATIENCE_S, free_port

MISSING = " and ".join(
    f"{name} is not installed: pip install {package}"
    for name, package in (("moto", "'moto[server]'"), ("obstore", "obstore"))
    if importlib.util.find_spec(name) is None
)
BUCKET = "pages-of-hicache"
# Whom moto lets in.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}


class S3Server:
    """Keeps objects in memory; after a start the bucket is there, and empty."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/some/prefix?endpoint={self.endpoint}"

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up_s = time.monotonic() + PATIENCE_S
        while not self._makes_bucket():
            assert self._process.poll() is None and time.monotonic() < give_up_s, "moto does not start"
            time.sleep(0.05)

    def wipe(self) -> None:
        self._request("POST", "/moto-api/reset")
        assert self._makes_bucket()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    close = kill

    def read(self, name: str) -> bytes:
        return self._request("GET", f"/{BUCKET}/{name}")

    def write(self, name: str, value: bytes) -> None:
        self._request("PUT", f"/{BUCKET}/{name}", value)

    def _makes_bucket(self) -> bool:
        try:
            self._request("PUT", f"/{BUCKET}")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"}
        request = urllib.request.Request(self.endpoint + path, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())

    def _signal(self, number: int) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)


@contextlib.contextmanager
def running() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.close()
