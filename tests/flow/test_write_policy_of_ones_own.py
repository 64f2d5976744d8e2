"""A custom write policy: a class in one file, an entry in the table of policies, and its name in the setting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import priority_write
from hicache import CacheEngine, build_engine
from hicache.flow.write_policy import POLICIES
from priority_write import PriorityWriteThrough
from toy_model import GEOMETRY, config, expected_kv, prompt, serve

NAME, PAGE = "write_through_priority", 8


@pytest.fixture(autouse=True)
def own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter the policy in the table of policies."""
    monkeypatch.setitem(POLICIES, NAME, lambda config: PriorityWriteThrough(minimum=1))


def use(engine: CacheEngine, name: str, tokens: np.ndarray, priority: int) -> None:
    """Serve one request of that priority, and wait for its copies."""
    serve(engine, name, tokens, priority=priority)
    engine.flush()
    engine.check()


def on_host(engine: CacheEngine) -> set[tuple[int, ...]]:
    """The prefixes whose last page the host holds. Compares the bytes of these pages with the computed ones."""
    context, found = engine.inspect.context, set[tuple[int, ...]]()
    for node in context.tree.nodes():
        tokens = np.concatenate([at.run.tokens for at in node.path()[::-1] if at.run is not None])
        keys = context.tree.keys_of(node)
        for number, key in enumerate(keys):
            if key not in context.full.pages:
                continue
            end = node.depth_tokens - (len(keys) - 1 - number) * PAGE
            pool_page = int(context.full.pages.pool_page[context.full.pages.table.row(key)])
            held = context.full.host.bytes_of[pool_page].view(torch.float32)  # [layer][k, v][token][head][dim]
            assert torch.equal(held, expected_kv(tokens[:end])[end - PAGE :].permute(1, 2, 0, 3, 4).flatten())
            found.add(tuple(tokens[:end].tolist()))
    return found


def prefixes(tokens: np.ndarray) -> set[tuple[int, ...]]:
    """Every prefix of complete pages."""
    return {tuple(tokens[:end].tolist()) for end in range(PAGE, len(tokens) + 1, PAGE)}


def test_a_write_policy_of_ones_own_is_one_file() -> None:
    """The file of a custom write policy imports only the types of rows and the enum of evictions."""
    names = {getattr(value, "__module__", None) for value in vars(priority_write).values()}
    assert {name for name in names if name is not None and name.startswith("hicache")} <= {
        "hicache.pages.table",
        "hicache.flow.write_policy",
    }


def test_it_decides_which_pages_reach_the_host(device: str) -> None:
    """When a request of high priority ends, its pages are on the host, and no page of another request is. Pages of a
    longer prompt are copied when a request of high priority uses them."""
    with build_engine(config(device=device, write_policy=NAME), GEOMETRY) as engine:
        high, low = prompt(1), prompt(2)
        longer = np.concatenate([high[:40], prompt(3, 21)])
        use(engine, "low", low, priority=0)
        assert on_host(engine) == set() and engine.stats()["backup.bytes"] == 0
        use(engine, "high", high, priority=1)
        use(engine, "continued", longer, priority=0)
        assert on_host(engine) == prefixes(high)
        use(engine, "again", longer, priority=1)
        assert on_host(engine) == prefixes(high) | prefixes(longer)
        page_bytes = engine.inspect.context.full.host.page_bytes
        assert engine.stats()["backup.bytes"] == len(prefixes(high) | prefixes(longer)) * page_bytes
