"""Pages through the Redis and the S3 store, beside the same bytes through the client of the field, in turns, against a
server on this machine.

    redis.put, .get, .contains   the ceiling is one pipeline of redis-py with hiredis, without checksum and copy
    redis.engines                prompts that an engine in another process computed, beside the store's get
    s3.put, .get                 the ceiling is obstore in as many threads, without checksum and copy

Pages are random, so they are stored uncompressed. Every page that was read is compared, outside the times. What is not
installed is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache.bench.common import BenchUnavailable, Case, Report, gb_per_s, percentile
from hicache.bench.remote_engines import measure_engines
from hicache.storage import PageBuffer, PageFormat, PageStore, open_store

TARGET = 0.9
_BUCKET = "pages-of-hicache"
_THREADS = 16  # what S3PageStore has by default
_START_S = 60


@dataclass(frozen=True)
class _Batch:
    """Pages to be stored, and memory to read them into."""

    pages: Sequence[PageBuffer]
    buffers: Sequence[PageBuffer]
    samples: int

    @classmethod
    def of(cls, num_pages: int, page_bytes: int, samples: int) -> _Batch:
        rng = np.random.default_rng(7)
        pages = [rng.integers(0, 256, page_bytes, dtype=np.uint8) for _ in range(num_pages)]
        return cls(pages, [np.zeros_like(page) for page in pages], samples)

    @property
    def keys(self) -> list[bytes]:
        return [b"page %d" % n for n in range(len(self.pages))]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pages))

    def open(self, url: str) -> PageStore:
        return open_store(url, identity={"model": "bench"}, formats=[PageFormat(len(self.pages[0]))])

    def compare(self) -> None:
        """The buffers hold the pages; they are cleared."""
        for page, buffer in zip(self.pages, self.buffers, strict=True):
            if not np.array_equal(page, buffer):
                raise AssertionError("a page came back with other bytes")
            buffer[:] = 0


def measure_redis(report: Report, num_pages: int, page_bytes: int, samples: int) -> None:
    """Raises `BenchUnavailable` where server or client is missing."""
    batch, client_package = _Batch.of(num_pages, page_bytes, samples), _optional("redis")
    if client_package is None or _optional("hiredis") is None or not shutil.which("redis-server"):
        raise BenchUnavailable("redis needs redis-server: apt-get install redis-server, pip install redis hiredis")
    with _redis_server() as port, contextlib.closing(batch.open(f"redis://127.0.0.1:{port}?level=0")) as store:
        client = client_package.Redis(port=port)
        names = [key.decode() for key in batch.keys]

        def pipeline(verb: str, *values: Any) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for arguments in zip(names, *values, strict=True):
                getattr(pipe, verb)(*arguments)
            return list(pipe.execute())

        contents = [page.data for page in batch.pages]
        put = {"store": lambda: _put(store, batch), "ceiling": lambda: pipeline("set", contents)}
        get = {"store": lambda: _get(store, batch), "ceiling": lambda: pipeline("get")}
        look = {"store": lambda: store.contains(batch.keys), "ceiling": lambda: pipeline("exists")}
        _case(report, "redis.put", _times(put, batch, before=client.flushdb), batch)
        _put(store, batch)  # beside what the ceiling put last
        _case(report, "redis.get", _times(get, batch, after=batch.compare), batch)
        looked = _times(look, batch)
        per_s = {name: [len(names) / s for s in seconds] for name, seconds in looked.items()}
        ceiling = percentile(per_s["ceiling"], 50)
        report.add(Case.of("redis.contains", per_s["store"], "keys/s", ceiling=ceiling, target=TARGET))
        client.flushdb()
        client.close()
        measure_engines(report, "redis", f"redis://127.0.0.1:{port}?level=0", samples)


def measure_s3(report: Report, num_pages: int, page_bytes: int, samples: int) -> None:
    """Raises `BenchUnavailable` where server or client is missing."""
    batch, obstore = _Batch.of(num_pages, page_bytes, samples), _optional("obstore")
    if obstore is None or _optional("moto.server") is None:
        raise BenchUnavailable("s3 needs a server: pip install obstore 'moto[server]'")
    with _s3_server() as (endpoint, reset), ThreadPoolExecutor(_THREADS) as pool:
        os_store = importlib.import_module("obstore.store").S3Store
        account = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}
        bucket = os_store(_BUCKET, endpoint=endpoint, client_options={"allow_http": True}, **account)
        names = [key.decode() for key in batch.keys]

        def put_one(name: str, page: PageBuffer) -> None:
            obstore.put(bucket, name, page, mode="create", use_multipart=False)

        def get_one(name: str) -> int:
            return len(obstore.get(bucket, name).bytes())

        url = f"s3://{_BUCKET}?endpoint={endpoint}&level=0"
        with _environment(account), contextlib.closing(batch.open(url)) as store:
            put = {"store": lambda: _put(store, batch), "ceiling": lambda: list(pool.map(put_one, names, batch.pages))}
            get = {"store": lambda: _get(store, batch), "ceiling": lambda: list(pool.map(get_one, names))}
            _case(report, "s3.put", _times(put, batch, before=reset), batch)
            _put(store, batch)  # beside what the ceiling put last
            _case(report, "s3.get", _times(get, batch, after=batch.compare), batch)


def _times(
    variants: Mapping[str, Callable[[], object]],
    batch: _Batch,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each variant, in turns, after a turn unmeasured; `before` runs before each, `after` after the store's,
    neither in the times."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-1, batch.samples):
        for name, variant in variants.items():
            before()
            start = time.perf_counter()
            variant()
            elapsed = time.perf_counter() - start
            if name == "store":
                after()
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


def _case(report: Report, name: str, seconds: Mapping[str, Sequence[float]], batch: _Batch) -> None:
    values, beside = (gb_per_s(batch.num_bytes, seconds[variant]) for variant in ("store", "ceiling"))
    note = f"{len(batch.pages)} pages of {len(batch.pages[0]) >> 10} KiB a call"
    report.add(Case.of(name, values, "GB/s", ceiling=percentile(beside, 50), target=TARGET, note=note))


def _put(store: PageStore, batch: _Batch) -> None:
    if not all(store.put(list(zip(batch.keys, batch.pages, strict=True)))):
        raise AssertionError("a page was not stored")


def _get(store: PageStore, batch: _Batch) -> None:
    if not all(store.get_into(batch.keys, batch.buffers)):
        raise AssertionError("a page is missing")


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def _running(command: Sequence[str], answers: Callable[[], bool]) -> Iterator[None]:
    """A server until it is left again."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + _START_S
        while not answers():
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise BenchUnavailable(f"{command[0]} does not start")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _redis_server() -> Iterator[int]:
    """A server that keeps nothing on a disk; its port."""
    port = _free_port()

    def answers() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    with tempfile.TemporaryDirectory() as folder:
        listen = ["--bind", "127.0.0.1", "--port", str(port), "--dir", folder]
        with _running(["redis-server", *listen, "--save", "", "--appendonly", "no"], answers):
            yield port


@contextlib.contextmanager
def _s3_server() -> Iterator[tuple[str, Callable[[], object]]]:
    """moto's endpoint, and what leaves it with nothing but an empty bucket."""
    endpoint = f"http://127.0.0.1:{_free_port()}"

    def ask(method: str, path: str) -> bool:
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"}
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint + path, None, headers, method=method)).close()
        except OSError:
            return False
        return True

    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", endpoint.rpartition(":")[2]]
    with _running(command, lambda: ask("PUT", f"/{_BUCKET}")):
        yield endpoint, lambda: ask("POST", "/moto-api/reset") and ask("PUT", f"/{_BUCKET}")


@contextlib.contextmanager
def _environment(account: Mapping[str, str]) -> Iterator[None]:
    """The environment has the account."""
    before = dict(os.environ)
    os.environ.update({f"AWS_{name.upper()}": value for name, value in account.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
