"""The real servers that tests of engines and of machines use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from hicache.bench.remote_servers import CREDENTIALS, MooncakeServer, S3Server, Server
from remote_case import with_options

MOONCAKE = partial(MooncakeServer, 64 << 20, lease_ms=60_000)
# By name: how to start the server, what this machine lacks for it, and the options of a store on it.
SERVERS: dict[str, tuple[Callable[[], Server], Callable[[], str], str]] = {
    "s3": (S3Server, S3Server.missing, "timeout=60"),
    "s3 for a second": (S3Server, S3Server.missing, "timeout=1"),
    "mooncake": (MOONCAKE, MooncakeServer.missing, "timeout=60&buffer=16MiB"),
}


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    make, missing, options = SERVERS[request.param]
    if reason := missing():
        pytest.skip(reason)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with make() as server:
        server.url = with_options(server.url, options)
        yield server
