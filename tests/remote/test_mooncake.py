"""Pages in Mooncake, against a real master and a machine that lends memory: shared, full, dead, hung, corrupt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from hicache.bench.mooncake_server import MooncakeServer, missing, running
from hicache.storage import PageFormat, PageStore, open_store
from hicache.storage.conformance import MakeStore, StoreConformance

REASON = missing()
pytestmark = [pytest.mark.remote, pytest.mark.skipif(bool(REASON), reason=REASON)]


class TestConformance(StoreConformance):
    @pytest.fixture(scope="class")
    def server(self) -> Iterator[MooncakeServer]:
        with running(64 << 20) as server:
            yield server

    @pytest.fixture(params=["level=0", "level=1"])
    def make_store(self, server: MooncakeServer, request: pytest.FixtureRequest) -> MakeStore:
        def make(identity: Mapping[str, str | int], formats: Sequence[PageFormat]) -> PageStore:
            own = {**identity, "test": request.node.name}
            return open_store(f"{server.url}?{request.param}", identity=own, formats=formats)

        return make
