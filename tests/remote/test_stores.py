"""Stores over real servers keep the contract, and whatever a server does is a miss or not stored.

What only one of them can do is in the file of that store.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hicache.bench.remote_servers import CREDENTIALS, MooncakeServer, RedisServer, S3Server, Server, free_port
from hicache.storage import StoreError
from hicache.storage.conformance import FORMATS, IDENTITY, MakeStore, StoreConformance, page
from hicache.storage.records import namespace_digest
from remote_case import PAGES, PATIENCE, found_in, opened, opener, with_options

pytestmark = pytest.mark.remote

ALL = [False] * len(PAGES), [True] * len(PAGES)
SECRET, ESCAPED = "s3cr3t/@:word", "s3cr3t%2F%40%3Aword"


class Kind(NamedTuple):
    """`name`: of a value, by namespace and key, as docs/remote.md has it. `options`: stored as they are."""

    make: Callable[[], Server]
    missing: Callable[[], str]
    options: str
    name: str


KINDS = {
    "redis": Kind(RedisServer, RedisServer.missing, f"{PATIENCE}&level=0", "hicache:{}:{}"),
    "s3": Kind(S3Server, S3Server.missing, f"{PATIENCE}&level=0", "some/prefix/hicache/{}/{}"),
    "mooncake": Kind(
        partial(MooncakeServer, 64 << 20, lease_ms=60_000), MooncakeServer.missing, PATIENCE, "hicache-{}-{}"
    ),
}


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def server(kind: Kind) -> Iterator[Server]:
    if reason := kind.missing():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch, kind.make() as server:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield server


each_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
which_restart = pytest.mark.parametrize("kind", ["redis", "s3"], indirect=True)


@each_kind
class TestConformance(StoreConformance):
    @pytest.fixture
    def make_store(self, server: Server, request: pytest.FixtureRequest) -> MakeStore:
        return opener(with_options(server.url, PATIENCE), test=request.node.name)

    @pytest.mark.smoke
    def test_histories_are_those_of_a_dict(self, make_store: MakeStore) -> None:
        super().test_histories_are_those_of_a_dict(make_store)


class TestRedisOverTheNetwork(StoreConformance):
    """By TLS, as a user with a password, in another database than the first, with pages that expire."""

    @pytest.fixture(scope="class")
    @classmethod
    def network(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, str]]:
        if reason := RedisServer.missing():
            pytest.skip(reason)
        folder = tmp_path_factory.mktemp("tls")
        key, certificate = folder / "key.pem", folder / "cert.pem"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        subprocess.run([*new, "-keyout", key, "-out", certificate, *subject], check=True, capture_output=True)
        port = free_port()
        tls = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        user = ["--user", "kv", "on", f">{SECRET}", "~*", "&*", "+@all"]
        with RedisServer("--bind", "127.0.0.1", *tls, "--tls-auth-clients", "no", *user) as server:
            options = f"{PATIENCE}&ca={certificate}&ttl=1000&level=0"
            yield server, f"rediss://kv:{ESCAPED}@127.0.0.1:{port}/3?{options}"

    @pytest.fixture
    def make_store(self, network: tuple[RedisServer, str]) -> MakeStore:
        network[0].ask("flushall")
        return opener(network[1])


@pytest.mark.smoke
@which_restart
def test_a_server_that_is_gone_is_a_miss_until_it_is_back(server: Server) -> None:
    """While the server is killed every call says that nothing is there or stored, counts, and raises nothing; once it
    runs again, the next call uses it."""
    absent, present = ALL
    with closing(opened(server)) as store:
        assert store.put(list(PAGES.items())) == present and found_in(store) == list(PAGES)
        server.kill()
        for _ in range(2):
            assert found_in(store) == [] and store.contains(list(PAGES)) == absent
        assert store.put(list(PAGES.items())) == absent and store.delete([b"1"]) == 0
        store.touch([b"1"])
        store.sync()
        stats = store.stats()
        assert store.thread_read_errors() == stats.read_errors >= 4 * 8 and stats.write_errors >= 8
        server.start()
        assert found_in(store) == [] and store.thread_read_errors() == stats.read_errors  # it lost them, and answers
        assert store.put(list(PAGES.items())) == present and found_in(store) == list(PAGES)


@pytest.mark.smoke
@which_restart
def test_a_frozen_server_is_a_miss(server: Server) -> None:
    """Calls end by their timeout, which counts, and by their deadline; a buffer is left alone from then on; a server
    that goes on is used."""
    absent, present = ALL
    hasty = opened(server, "timeout=0.3")
    with closing(opened(server)) as store:
        assert store.put(list(PAGES.items())) == present
        server.freeze()
        try:
            buffers = [np.zeros(len(content), np.uint8) for content in PAGES.values()]
            assert hasty.get_into(list(PAGES), buffers) == absent and hasty.contains(list(PAGES)) == absent
            assert hasty.put([(b"new", page(0))]) == [False]
            assert (hasty.stats().read_errors, hasty.stats().write_errors) == (16, 1)
            if isinstance(server, RedisServer):  # a request to S3 that has begun ends by its timeout alone
                patient, soon_s = opened(server, "timeout=1000000"), time.monotonic() + 0.1
                assert patient.get_into(list(PAGES), buffers, deadline_s=soon_s) == absent
                assert patient.contains(list(PAGES), deadline_s=time.monotonic() + 0.1) == absent
                assert patient.put([(b"new", page(0))], deadline_s=time.monotonic() + 0.1) == [False]
                patient.close()
            hasty.close()
        finally:
            server.thaw()
        assert found_in(store) == list(PAGES) and not any(buffer.any() for buffer in buffers)


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a byte of the header": lambda value, _: value[:9] + b"?" + value[10:],
    "a byte of the page": lambda value, _: value[:500] + bytes([value[500] ^ 1]) + value[501:],
    "cut off": lambda value, _: value[:-1],
    "a part of the header": lambda value, _: value[:20],
    "a byte more": lambda value, _: value + b"x",
    "longer than any value": lambda value, _: value + bytes(100_000),
    "zeros": lambda value, _: bytes(len(value)),
    "text": lambda *_: b"hello",
    "the value of another key": lambda _, other: other,
}


@pytest.mark.smoke
@each_kind
def test_values_that_do_not_verify_are_misses_and_go(kind: Kind, server: Server) -> None:
    """What another client wrote, or a store of another identity, is counted and hides no other page of the batch; its
    key can be stored again."""
    identity, another = {**IDENTITY, "model": "damaged"}, {**IDENTITY, "model": "another"}
    pages = {b"%d" % n: page(2 * n) for n in range(len(DAMAGE) + 3)}
    *bad, foreign, _, good = list(pages)

    def name_of(key: bytes, identity: dict[str, str | int]) -> str:
        text = base64.urlsafe_b64encode(key).rstrip(b"=").decode()
        return kind.name.format(namespace_digest(identity)[:8].hex(), text)

    with closing(opened(server, kind.options, identity)) as store:
        assert all(store.put(list(pages.items())))
        with closing(opened(server, kind.options, another)) as other:
            assert all(other.put([(foreign, pages[foreign])]))
        values = {key: server.read(name_of(key, identity)) for key in pages}
        for key, damage in zip(bad, DAMAGE.values(), strict=True):
            server.write(name_of(key, identity), damage(values[key], values[good]))
        server.write(name_of(foreign, identity), server.read(name_of(foreign, another)))
        healthy = [key for key in pages if key not in (*bad, foreign)]
        assert found_in(store, pages) == healthy
        assert store.stats().corrupt == len(DAMAGE) + 1 and store.stats().read_errors == 0
        assert store.contains(list(pages)) == [key in healthy for key in pages]
        assert all(store.put(list(pages.items()))) and found_in(store, pages) == list(pages)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("s3://bucket", "obstore", "s3"), ("mooncake://127.0.0.1:1", "mooncake.store", "mooncake")],
)
def test_without_its_package_a_store_says_what_to_install(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra, which is one of the project's."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StoreError) as caught:
        opener(url)(IDENTITY, FORMATS)
    assert f"hicache[{extra}]" in str(caught.value)
    assert f"\n{extra} = [" in (Path(__file__).parents[2] / "pyproject.toml").read_text()
