"""Stores over real servers keep the contract. Every fault of a server causes a miss, or a page that is not stored.

Cases that only one store has are in the file of that store.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from hicache.bench.remote_servers import CREDENTIALS, MooncakeServer, S3Server, Server
from hicache.storage import StoreError
from hicache.storage.conformance import FORMATS, IDENTITY, MakeStore, StoreConformance, page
from hicache.storage.records import namespace_digest
from remote_case import PATIENCE, found_in, opened, opener, with_options

pytestmark = pytest.mark.remote


class Kind(NamedTuple):
    """A kind of store. `name`: returns the name of a value from namespace and key, as in docs/remote.md. `options`:
    with them, values are stored unchanged."""

    make: Callable[[], Server]
    missing: Callable[[], str]
    options: str
    name: str


KINDS = {
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


@each_kind
class TestConformance(StoreConformance):
    @pytest.fixture
    def make_store(self, server: Server, request: pytest.FixtureRequest) -> MakeStore:
        return opener(with_options(server.url, PATIENCE), test=request.node.name)

    @pytest.mark.smoke
    def test_histories_are_those_of_a_dict(self, make_store: MakeStore) -> None:
        super().test_histories_are_those_of_a_dict(make_store)


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
    """A value of another client, or of a store of another identity, is a miss and is counted. Other pages of the batch
    are found, and the key of the wrong value can be stored again."""
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
    """The error names the extra to install, which is one of the project's extras."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StoreError) as caught:
        opener(url)(IDENTITY, FORMATS)
    assert f"hicache[{extra}]" in str(caught.value)
    assert f"\n{extra} = [" in (Path(__file__).parents[2] / "pyproject.toml").read_text()
