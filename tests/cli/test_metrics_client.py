"""The figures of a server from outside: any address of it will do, and what is none of ours is named."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from hicache.errors import NoServer, NotOurServer
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.loopback import is_loopback

OURS = '{"time_s": 1.0, "figures": {"requests.running": 3, "requests.waiting": 4}}'


@contextlib.contextmanager
def http_server(status: int, text: str, kind: str = "text/plain", port: int = 0) -> Iterator[tuple[str, int]]:
    """Answers every path with this; yields host and port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield "127.0.0.1", server.server_port
        finally:
            server.shutdown()
            thread.join()


ANSWERS = [(404, "not here"), (500, OURS), (200, "<!DOCTYPE html><p>Welcome"), (200, '{"a": 1}'), (200, "[" * 100_000)]
ANSWERS += [(200, ""), (200, '{"figures": []}'), (200, '{"figures": {"a": 1}}')]


@pytest.mark.parametrize(("status", "text"), ANSWERS, ids=[f"{status}-{text[:9]}" for status, text in ANSWERS])
def test_another_server_is_named(status: int, text: str) -> None:
    """What answers, and is no hicache server, is an error that names it."""
    with (
        http_server(status, text) as (host, port),
        pytest.raises(NotOurServer, match=f"^http://{host}:{port} is no hicache server: "),
    ):
        MetricsClient(f"{host}:{port}").read()


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment, as behind that of a company, is asked for other machines alone."""
    with http_server(502, "a proxy") as (host, port), http_server(200, OURS) as (_, own):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{host}:{port}")
        for here in ("127.0.0.1", "localhost"):
            assert MetricsClient(f"{here}:{own}").read()["requests.running"] == 3
        with pytest.raises(NotOurServer, match="502"):
            MetricsClient("hicache.invalid:8000").read()
    hosts = ("127.8.9.1", "LOCALHOST", "localhost.", "a.localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0")
    assert all(is_loopback(f"http://{host}:80/v1") for host in hosts)
    others = ("http://10.0.0.1", "http://localhost.example", "http://[::2]", "no URL", "http://[")
    assert not any(map(is_loopback, others))


def test_an_address_where_no_server_speaks() -> None:
    """A port where nobody listens, and a server that speaks no HTTP: errors with the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(NotOurServer, match=url):
            MetricsClient(url).read()
        thread.join()
    with pytest.raises(NoServer, match=url):
        MetricsClient(url).read()


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "http://",
        "http://a b:1",
        "http://127.0.0.1:port",
        "\x1b",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(NoServer, match="give the address that 'hicache serve' prints"):
        MetricsClient(url).read()


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/metrics", "/dashboard"])
def test_every_address_of_a_server_will_do(path: str) -> None:
    """With or without a scheme or a route, the address leads to the figures."""
    with http_server(200, OURS) as (host, port):
        assert MetricsClient(f"{host}:{port}{path}").read() == {"requests.running": 3, "requests.waiting": 4}
