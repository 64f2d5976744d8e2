"""Servers of vLLM on simulated nodes over S3 and Mooncake. One store process on each node owns the disk and the remote
store. vLLM is in another environment, and only knows the socket of that process."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from full_pool import full_pool
from hicache.bench.remote_servers import CREDENTIALS, MooncakeServer, S3Server, Server
from hicache.bench.slow_link import SlowLink
from vllm_nodes import CACHED, CHUNK_TOKENS, Node, environment_of, repeated, write_model
from waiting import eventually

VLLM = environment_of("vllm-0.32")

pytestmark = [
    pytest.mark.remote,
    pytest.mark.timeout(2400),  # a start of vLLM takes minutes on a busy machine
    pytest.mark.skipif(VLLM is None, reason="the environment of vLLM is not made"),
]
SERVERS: dict[str, tuple[Callable[[], Server], Callable[[], str]]] = {
    "s3": (S3Server, S3Server.missing),
    "mooncake": (partial(MooncakeServer, 256 << 20, lease_ms=60_000), MooncakeServer.missing),
}
_SERVE = "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    make, missing = SERVERS[request.param]
    if reason := missing():
        pytest.skip(reason)
    with make() as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert VLLM is not None
    return write_model(VLLM, tmp_path_factory.mktemp("nodes") / "models" / "x")


@contextlib.contextmanager
def node(folder: Path, url: str) -> Iterator[str]:
    """Start the store process of a node; yields its socket, which is the `path` of a plug-in."""
    socket = folder / "hicache.sock"
    folder.mkdir()
    where = (f"lmdb://{folder / 'disk'}?budget=256MB", "--socket", str(socket), "--remote", url, "--backup", "all")
    command = [sys.executable, "-c", _SERVE, "store", "serve", *where]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **CREDENTIALS})
    try:
        eventually(socket.is_socket)
        yield f"unix:{socket}"
    finally:
        process.terminate()
        process.wait()


def run(path: str, model: Path, *steps: str, is_patient: bool = False) -> Node:
    assert VLLM is not None
    return Node(VLLM, model, {"path": path}, list(steps), is_patient=is_patient)


@pytest.mark.smoke
@pytest.mark.parametrize("server", ["s3", "mooncake"], indirect=True)
def test_a_prompt_of_one_node_is_loaded_on_another(server: Server, model: Path, tmp_path: Path) -> None:
    """A prompt that one node computed is loaded on another, with the same output tokens. Each server is a new
    process."""
    with node(tmp_path / "a", server.url) as path:
        first = run(path, model, "run each").result()
    with node(tmp_path / "b", server.url) as path:
        second = run(path, model, "run each", is_patient=True).result()
    assert first.cached == [[0, 0]] and second.cached == [[CACHED, CACHED]] and second.outputs == first.outputs
    assert len(second.given) == 2 * CACHED // CHUNK_TOKENS
    assert all({*sums} <= {*first.stored[key]} for key, sums in second.given.items())


def _killed(server: Server) -> None:
    server.kill()
    server.start()


def _stopped(server: Server) -> None:
    server.freeze()
    server.thaw()


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        ("s3", _killed),
        ("mooncake", _killed),
        ("s3", _stopped),
        ("mooncake", _stopped),
    ],
    indirect=["server"],
)
def test_faults_of_the_server_change_no_token(
    server: Server, fault: Callable[[Server], object], model: Path, tmp_path: Path
) -> None:
    """While two nodes store and load, the server ends or stops. No output token changes."""
    with node(tmp_path / "a", server.url) as path:
        first = run(path, model, "run each").result()
    steps = ["run each", *itertools.chain(*[("reset", "run each")] * 3)]
    with (
        node(tmp_path / "b", server.url) as b,
        node(tmp_path / "c", server.url) as c,
        repeated(partial(fault, server), 0.3),
    ):
        nodes = [run(path, model, *steps) for path in (b, c)]
        results = [each.result() for each in nodes]
    assert all(result.outputs == first.outputs for result in results)


@pytest.mark.skipif(bool(MooncakeServer.missing()), reason=MooncakeServer.missing())
def test_a_full_pool_changes_no_token(model: Path, tmp_path: Path) -> None:
    """While the shared store has no memory, a node loads pages from its own disk, and other nodes compute. Once it has
    memory, nodes share pages again."""
    with full_pool() as (server, other, keys):
        with node(tmp_path / "a", server.url) as path:
            first = run(path, model, "run each", "reset", "run each", is_patient=True).result()
        with node(tmp_path / "b", server.url) as path:
            second = run(path, model, "run each", is_patient=True).result()
        assert first.cached == [[0, 0], [CACHED, CACHED]]
        assert second.cached == [[0, 0]] and second.outputs == first.outputs
        assert other.delete(keys) > 0
        with node(tmp_path / "c", server.url) as path:
            run(path, model, "run each").result()
        with node(tmp_path / "d", server.url) as path:
            last = run(path, model, "run each", is_patient=True).result()
        assert last.cached == [[CACHED, CACHED]] and last.outputs == first.outputs


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_a_slow_link_changes_no_token(server: S3Server, model: Path, tmp_path: Path) -> None:
    """A link of 1 MB/s changes no output token."""
    with node(tmp_path / "a", server.url) as path:
        first = run(path, model, "run each").result()
    port = int(server.endpoint.rpartition(":")[2])
    with SlowLink(port, 1 << 20) as link:
        slow = server.url.replace(server.endpoint, f"http://127.0.0.1:{link.port}")
        with node(tmp_path / "b", slow) as path:
            second = run(path, model, "run each", "reset", "run each").result()
    assert second.outputs == first.outputs
