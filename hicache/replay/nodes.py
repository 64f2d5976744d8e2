"""Replay a trace through several nodes, each with its own cache, behind a router, with a remote tier that they share.

The router sends a request when it comes, before the next one. `docs/replay.md` states the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from hicache.config.settings import short_repr
from hicache.errors import ConfigError
from hicache.replay.cache import BlockHits, CacheSimulation, DiskOrder, ReplaySettings
from hicache.replay.cost import TierCosts
from hicache.replay.simulation import Counts, ReplayResult, optimal, result_of
from hicache.replay.trace import Trace, TraceRequest

_PROGRESS_STEP = 64  # requests between two reports
_MAX_NODES = 1024


@dataclass(frozen=True)
class NodeSettings:
    """Nodes that serve one trace. `remote_blocks`: of the tier that they share, None for unlimited, 0 for none.

    `load_window_s`: the load of a node is what it computed in so many seconds. ConfigError for what cannot be.
    """

    num_nodes: int = 1
    router: str = "round-robin"
    remote_blocks: int | None = 0
    load_window_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= _MAX_NODES:
            raise ConfigError(f"nodes={self.num_nodes}: give 1 to {_MAX_NODES}")
        if self.router not in ROUTERS:
            raise ConfigError(f"router={short_repr(self.router)} is unknown; use one of {', '.join(ROUTERS)}")
        if self.remote_blocks is not None and self.remote_blocks < 0:
            raise ConfigError(f"remote_blocks={self.remote_blocks} is negative; give at least 0")
        if not self.load_window_s > 0:
            raise ConfigError(f"load_window_s={self.load_window_s:g}: give more than 0")

    def require_host(self, settings: ReplaySettings) -> None:
        """ConfigError where nodes of these tiers could not read from the remote one."""
        if self.remote_blocks != 0 and settings.host_blocks == 0:
            raise ConfigError("the remote tier needs a host tier; give host_blocks")


class Router(Protocol):
    """Chooses the node of each request, in order of time, and hears what the node had to compute."""

    def choose(self, request: TraceRequest, caches: Sequence[CacheSimulation]) -> int: ...

    def served(self, request: TraceRequest, node: int, computed_tokens: int) -> None: ...


class RoundRobin:
    """Request i goes to node i mod N."""

    def __init__(self, settings: NodeSettings) -> None:
        self._num_nodes, self._next = settings.num_nodes, 0

    def choose(self, request: TraceRequest, caches: Sequence[CacheSimulation]) -> int:
        return self._next

    def served(self, request: TraceRequest, node: int, computed_tokens: int) -> None:
        self._next = (node + 1) % self._num_nodes


class PrefixAware:
    """The node that holds the longest prefix of the prompt, unless its load is far above the mean.

    The load of a node is the prompt tokens that it computed for requests of the last `load_window_s` seconds. Nodes
    with a load above 1.5 times the mean plus the tokens of this prompt are left out. Of the others that one is taken
    which holds the longest prefix on its device, host and disk, where less than a tenth of the prompt counts as none;
    of equals that of the least load, then the first.
    """

    # Without the tenth, a node that comes late gets no prompt: the others hold the head that all prompts share.
    _LEAST_SHARE = 0.1
    _MOST_LOAD = 1.5

    def __init__(self, settings: NodeSettings) -> None:
        self._window_s = settings.load_window_s
        self._recent: deque[tuple[float, int, int]] = deque()  # (time, node, tokens computed)
        self._loads = [0] * settings.num_nodes

    def choose(self, request: TraceRequest, caches: Sequence[CacheSimulation]) -> int:
        while self._recent and self._recent[0][0] <= request.time_s - self._window_s:
            _, node, tokens = self._recent.popleft()
            self._loads[node] -= tokens
        limit = self._MOST_LOAD * sum(self._loads) / len(self._loads) + request.input_tokens
        able = [node for node, load in enumerate(self._loads) if load <= limit]  # the least is at most the mean
        held = {node: caches[node].lookup(request.blocks) for node in able}
        least = self._LEAST_SHARE * len(request.blocks)
        return min(able, key=lambda node: (-held[node] if held[node] >= least else 0, self._loads[node], node))

    def served(self, request: TraceRequest, node: int, computed_tokens: int) -> None:
        self._recent.append((request.time_s, node, computed_tokens))
        self._loads[node] += computed_tokens


ROUTERS: dict[str, Callable[[NodeSettings], Router]] = {"round-robin": RoundRobin, "prefix": PrefixAware}


@dataclass(frozen=True)
class NodesResult(ReplayResult):
    """What the nodes hit together. `settings`: of each of them. `node`: which one served a request `[requests]`."""

    nodes: NodeSettings = field(default_factory=NodeSettings)
    node: Counts = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def node_tokens(self) -> Counts:
        """Prompt tokens that each node computed, int64 `[nodes]`."""
        computed = self.input_tokens - self.hit_tokens
        return np.bincount(self.node, computed, self.nodes.num_nodes).astype(np.int64)

    @property
    def imbalance(self) -> float:
        """The most that a node computed over the mean of all; 1 is even."""
        tokens = self.node_tokens
        return float(tokens.max() / tokens.mean()) if tokens.any() else 1.0

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "nodes": asdict(self.nodes), "node_tokens": self.node_tokens.tolist()}


def replay_nodes(
    trace: Trace,
    settings: ReplaySettings,
    nodes: NodeSettings,
    on_progress: Callable[[int], None] | None = None,
    costs: TierCosts | None = None,
) -> NodesResult:
    """Send the requests of `trace`, one after the other, each to the node that the router chooses.

    `settings`: of every node. `on_progress` gets the number of requests done, every few requests and at the end.
    """
    nodes.require_host(settings)
    remote = None if nodes.remote_blocks == 0 else DiskOrder(nodes.remote_blocks)
    caches = [CacheSimulation(settings, remote) for _ in range(nodes.num_nodes)]
    router = ROUTERS[nodes.router](nodes)
    chosen = np.zeros(len(trace.requests), np.int64)
    hits = np.zeros((len(BlockHits._fields), len(trace.requests)), np.int64)
    for at, request in enumerate(trace.requests):
        if on_progress is not None and at % _PROGRESS_STEP == 0:
            on_progress(at)
        chosen[at] = node = router.choose(request, caches)
        served = caches[node].serve(request.blocks)
        hits[:, at] = served
        router.served(request, node, max(0, request.input_tokens - sum(served) * trace.block_tokens))
    for cache in caches:
        cache.check()
    if on_progress is not None:
        on_progress(len(trace.requests))
    result = result_of(trace, settings, dict(zip(BlockHits._fields, hits, strict=True)), settings.policy, costs)
    return NodesResult(**vars(result), nodes=nodes, node=chosen)


def optimal_of_nodes(
    trace: Trace, settings: ReplaySettings, nodes: NodeSettings, costs: TierCosts | None = None
) -> ReplayResult:
    """The most that one cache of the blocks of all nodes and of the remote tier could hit."""
    own, remote = settings.total_blocks, nodes.remote_blocks
    pooled = None if own is None or remote is None else nodes.num_nodes * own + remote
    return replace(optimal(trace, ReplaySettings(pooled), costs), settings=settings)
