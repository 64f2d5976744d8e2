"""Several nodes behind a router: what they hit, against single nodes, an unlimited one and the rules as stated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.replay.cache import CacheSimulation, ReplaySettings
from hicache.replay.nodes import NodeSettings, replay_nodes
from hicache.replay.simulation import replay
from hicache.replay.trace import Trace
from replay_case import trace_of

TIERS = ("device", "host", "disk")
SETTINGS = [ReplaySettings(24), ReplaySettings(24, 48), ReplaySettings(24, 30, 60), ReplaySettings(24, 48, None, "lfu")]
ROUTERS = ("round-robin", "prefix")


def conversations(seed: int, num_requests: int = 240) -> Trace:
    """Prompts of up to 24 blocks that grow turn by turn behind two heads, some seconds apart, some at once."""
    rng = np.random.default_rng(seed)
    growing = {session: [session % 2, 2 + session % 2] for session in range(12)}
    prompts = []
    for at in range(num_requests):
        session = int(rng.integers(12))
        growing[session] += [100 + 10 * at + step for step in range(int(rng.integers(1, 4)))]
        prompts.append(list(growing[session]))
        if len(growing[session]) > 20:
            growing[session] = [session % 2, 2 + session % 2]
    trace = trace_of(*prompts)
    times = np.cumsum(rng.integers(0, 6, num_requests))
    requests = [replace(request, time_s=float(time)) for request, time in zip(trace.requests, times, strict=True)]
    return replace(trace, requests=tuple(requests))


PAIRS = list(zip(SETTINGS, itertools.cycle(ROUTERS)))


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize(("settings", "router"), PAIRS)
def test_a_node_hits_what_its_requests_alone_would(settings: ReplaySettings, router: str, num_nodes: int) -> None:
    """Without a remote tier a node's hits are those of a plain replay of the requests that it was sent."""
    trace = conversations(2)
    result = replay_nodes(trace, settings, NodeSettings(num_nodes, router))
    assert result.hit_rate > 0.1 and not result.hit_blocks["remote"].any()
    for node in range(num_nodes):
        (sent,) = np.nonzero(result.node == node)
        alone = replay(replace(trace, requests=tuple(trace.requests[at] for at in sent)), settings)
        assert all((result.hit_blocks[tier][sent] == alone.hit_blocks[tier]).all() for tier in TIERS)


@pytest.mark.parametrize(("settings", "router"), PAIRS[1:])
def test_an_unlimited_remote_tier_makes_nodes_one(settings: ReplaySettings, router: str) -> None:
    """Each request hits as much as on one unlimited node, where the host holds a whole prompt."""
    trace = conversations(3)
    unlimited = replay(trace, ReplaySettings(None))
    result = replay_nodes(trace, settings, NodeSettings(4, router, remote_blocks=None))
    assert (result.hit_tokens == unlimited.hit_tokens).all()
    assert result.hit_rate == pytest.approx(unlimited.hit_rate)
    assert result.hit_blocks["remote"].any()


def test_a_node_reads_what_another_computed() -> None:
    """By hand: two nodes in turn, tiers of one prompt of two blocks each, and a remote tier of two prompts."""
    a, b, c = [1, 2], [3, 4], [5, 6]
    prompts = [a, a, b, a, a, c, b]  # to nodes 0, 1, 0, 1, 0, 1, 0
    settings = ReplaySettings(2, 2, 0)
    result = replay_nodes(trace_of(*prompts), settings, NodeSettings(2, "round-robin", remote_blocks=4))
    assert result.node.tolist() == [0, 1, 0, 1, 0, 1, 0]
    # Node 1 reads a from afar and then has it; node 0 lost it to b. c puts b out of the remote tier.
    assert result.hit_blocks["remote"].tolist() == [0, 2, 0, 0, 2, 0, 0]
    assert result.hit_blocks["device"].tolist() == [0, 0, 0, 2, 0, 0, 0]
    assert result.hit_blocks["host"].tolist() == result.hit_blocks["disk"].tolist() == [0] * 7


def test_a_disk_is_read_before_the_remote_tier() -> None:
    """By hand: what a node's own disk holds counts for it, and only what follows for the remote tier; what was read
    from there is on the disk afterwards."""
    long, other = [1, 2, 3, 4], [5, 6, 7, 8]
    prompts = [long[:2], long, other, other, long, other, other, other, long]  # to nodes 0 and 1 in turn
    settings = ReplaySettings(4, 4, 100)
    result = replay_nodes(trace_of(*prompts), settings, NodeSettings(2, "round-robin", remote_blocks=None))
    assert result.hit_blocks["disk"].tolist() == [0, 0, 0, 0, 2, 0, 4, 0, 4]
    assert result.hit_blocks["remote"].tolist() == [0, 2, 0, 4, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("settings", SETTINGS[1:3])
def test_the_prefix_router_follows_its_rule(settings: ReplaySettings) -> None:
    """Each choice is the one of docs/replay.md, with loads summed anew from all requests before."""
    trace, num_nodes = conversations(5), 3
    result = replay_nodes(trace, settings, NodeSettings(num_nodes, "prefix", load_window_s=20))
    caches = [CacheSimulation(settings) for _ in range(num_nodes)]
    computed = result.input_tokens - result.hit_tokens
    was_left_out = 0
    for at, request in enumerate(trace.requests):
        recent = (result.time_s[:at] > request.time_s - 20) * computed[:at]
        loads = [int(recent[result.node[:at] == node].sum()) for node in range(num_nodes)]
        prefixes = [cache.lookup(request.blocks) for cache in caches]
        limit, least = 1.5 * sum(loads) / num_nodes + request.input_tokens, len(request.blocks) / 10
        pairs = zip(loads, prefixes, strict=True)
        ranks = [(load > limit, -held if held >= least else 0, load) for load, held in pairs]
        assert result.node[at] == ranks.index(min(ranks))
        was_left_out += ranks[prefixes.index(max(prefixes))][0]
        caches[result.node[at]].serve(request.blocks)
    assert was_left_out, "the trace does not load a node enough"


@pytest.mark.parametrize(
    ("setting", "value"), [("load_window_s", 0.0), ("load_window_s", float("nan")), ("remote_blocks", -1)]
)
def test_what_no_nodes_can_be_is_named(setting: str, value: float) -> None:
    """The error names the setting. What flags can give is in tests/cli/test_wrong_input.py."""
    with pytest.raises(ConfigError, match=setting):
        NodeSettings(**{setting: value})  # type: ignore[arg-type]
