"""A write policy of one's own: a class in one file, an entry in the table of policies, and its name in the setting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import priority_write
from hicache import CacheEngine, CacheRequest, Lease, build_engine
from hicache.flow.write_policy import POLICIES
from hicache.tree import FULL, HOST
from priority_write import PriorityWriteThrough
from toy_model import GEOMETRY, compute, config, expected_kv, read

NAME, PAGE = "write_through_priority", 8


@pytest.fixture(autouse=True)
def own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the policy takes beside its file: one entry in the table."""
    monkeypatch.setitem(POLICIES, NAME, lambda config: PriorityWriteThrough(minimum=1))


def prompt(seed: int, length: int = 61) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length)


def serve(engine: CacheEngine, name: str, tokens: np.ndarray, priority: int) -> Lease:
    """One request of that priority; what it reuses is compared with what was computed."""
    with engine.acquire(CacheRequest(name, tokens, priority=priority)) as lease:
        assert torch.equal(read(engine, lease, lease.cached_len), expected_kv(tokens[: lease.cached_len]))
        compute(engine, lease, tokens, lease.cached_len, len(tokens))
        engine.commit(lease, tokens)
    engine.flush()
    engine.check()
    return lease


def on_host(engine: CacheEngine) -> set[tuple[int, ...]]:
    """The prefixes whose last page the host holds, after comparing the bytes of that page with what was computed."""
    context, found = engine.inspect.context, set[tuple[int, ...]]()
    for node in context.tree.nodes():
        if not node.holds(FULL, HOST):
            continue
        tokens = np.concatenate([at.run.tokens for at in node.path()[::-1] if at.run is not None])
        pages = node.held(FULL, HOST)
        for index, page in enumerate(pages.tolist()):
            end = node.depth_tokens - (len(pages) - 1 - index) * PAGE
            held = context.full.host.bytes_of[page].view(torch.float32)  # [layer][k, v][token][head][dim]
            assert torch.equal(held, expected_kv(tokens[:end])[end - PAGE :].permute(1, 2, 0, 3, 4).flatten())
            found.add(tuple(tokens[:end].tolist()))
    return found


def prefixes(tokens: np.ndarray) -> set[tuple[int, ...]]:
    """Every prefix of whole pages."""
    return {tuple(tokens[:end].tolist()) for end in range(PAGE, len(tokens) + 1, PAGE)}


def test_a_write_policy_of_ones_own_is_one_file() -> None:
    """Its file imports what a node is, and nothing else of the project."""
    names = {getattr(value, "__module__", None) for value in vars(priority_write).values()}
    assert {name for name in names if name is not None and name.startswith("hicache")} == {"hicache.tree.node"}


def test_it_decides_which_pages_reach_the_host(device: str) -> None:
    """The pages of a request of high priority are on the host when it ends, and no page of another; those of a prompt
    that continues it are copied when a request of high priority uses them."""
    with build_engine(config(device=device, write_policy=NAME), GEOMETRY) as engine:
        high, low = prompt(1), prompt(2)
        longer = np.concatenate([high[:40], prompt(3, 21)])
        serve(engine, "low", low, priority=0)
        assert on_host(engine) == set() and engine.stats()["backup.bytes"] == 0
        serve(engine, "high", high, priority=1)
        serve(engine, "continued", longer, priority=0)
        assert on_host(engine) == prefixes(high)
        serve(engine, "again", longer, priority=1)
        assert on_host(engine) == prefixes(high) | prefixes(longer)
        page_bytes = engine.inspect.context.full.host.page_bytes
        assert engine.stats()["backup.bytes"] == len(prefixes(high) | prefixes(longer)) * page_bytes


def test_what_it_wanted_outlives_the_device(device: str) -> None:
    """Once others took the device, the prompt of high priority comes back from the host with its values, and that of
    low priority is computed again."""
    with build_engine(config(device=device, write_policy=NAME), GEOMETRY) as engine:
        serve(engine, "high", prompt(1), priority=1)
        serve(engine, "low", prompt(2), priority=0)
        for seed in range(3, 6):  # the device holds two prompts
            serve(engine, f"r{seed}", prompt(seed), priority=0)
        assert serve(engine, "high again", prompt(1), priority=1).hit.host == 56
        assert serve(engine, "low again", prompt(2), priority=0).cached_len == 0
