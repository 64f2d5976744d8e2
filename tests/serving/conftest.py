"""The server that is shared by all tests that leave its state unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from server_case import FULL, KEY, OLD_KEY, SECRET, Server, serving

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with three tiers and the key `KEY`, which takes at most `FULL` requests. Some requests have already hit
    its cache."""
    folder = tmp_path_factory.mktemp("server")
    limits = ("--max-running", "2", "--max-queued", str(FULL - 2), "--max-body-bytes", "1MiB", "--chunk-tokens", "256")
    sizes = ("--device-tokens", "131072", "--host-bytes", "64MiB", "--disk-path", str(folder / "disk"))
    with serving(folder, *limits, *sizes, api_key=f"{OLD_KEY},{KEY}") as server:
        for _ in range(2):
            server.client(KEY).completions.create(model="random", prompt=f"{SECRET} " * 60, max_tokens=4)
        server.wait_for_at_least("hicache_admit_hit_tokens_total", 1)
        server.wait_idle()
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client(KEY)
