"""Fixtures of the tests of the tier under vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disk_case import Clock
from hicache.integrations import server_store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the disk's measurements, timeouts and retries."""
    clock = Clock()
    monkeypatch.setattr(server_store, "open_tier", functools.partial(server_store.open_tier, clock=clock))
    return clock


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start servers (`vllm_prompts_case`), and close them at the end."""
    from vllm_prompts_case import Server

    monkeypatch.chdir(tmp_path)  # vLLM starts programs with `-m`, which would find kernels/ of a checkout
    started: list[Server] = []

    def start(connector: str, **extra: Any) -> Server:
        started.append(Server(tmp_path, connector, **extra))
        return started[-1]

    yield start
    for server in started:
        server.engine.close()
