"""Replay a trace through one cache, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.replay.cache import BlockHits, CacheSimulation, ReplaySettings
from hicache.replay.cost import TierCosts
from hicache.replay.optimal import optimal_hits
from hicache.replay.trace import Trace

__all__ = ["BlockHits", "CacheSimulation", "ReplayResult", "ReplaySettings", "optimal", "replay"]

Counts = npt.NDArray[np.int64]
_PROGRESS_STEP = 64  # requests between two reports


@dataclass(frozen=True)
class ReplayResult:
    """What one replay hit. Arrays are `[requests]`.

    `name`: the row, a policy or `optimal`. `hit_blocks`: by tier, "device" first. A block counts for its tokens, the
    last one of a prompt for those that it has.
    """

    settings: ReplaySettings
    trace_name: str
    block_tokens: int
    time_s: npt.NDArray[np.float64]
    input_tokens: Counts
    num_blocks: Counts
    hit_blocks: Mapping[str, Counts]
    name: str = ""
    costs: TierCosts | None = field(default=None, repr=False)

    @property
    def hit_rate(self) -> float:
        """Blocks hit over blocks asked for."""
        return sum(self.tier_hit_rates.values())

    @property
    def tier_hit_rates(self) -> dict[str, float]:
        num_blocks = max(1, int(self.num_blocks.sum()))
        return {tier: int(hits.sum()) / num_blocks for tier, hits in self.hit_blocks.items()}

    @property
    def device_tokens(self) -> Counts:
        return self._tokens["device"]

    @property
    def host_tokens(self) -> Counts:
        return self._tokens["host"]

    @property
    def disk_tokens(self) -> Counts:
        return self._tokens["disk"]

    @property
    def hit_tokens(self) -> Counts:
        return np.asarray(np.sum(list(self._tokens.values()), axis=0), np.int64)

    @property
    def tokens_saved(self) -> int:
        """Tokens that were not computed."""
        return int(self.hit_tokens.sum())

    @cached_property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """Time to first token by the cost model; NaN without one."""
        if self.costs is None:
            return np.full(len(self.time_s), np.nan)
        return self.costs.ttft_s(self.input_tokens, self.device_tokens, self.host_tokens, self.disk_tokens)

    def to_json(self) -> dict[str, Any]:
        """Settings and totals as plain values."""
        totals: dict[str, Any] = {
            "name": self.name,
            "trace": self.trace_name,
            "block_tokens": self.block_tokens,
            "settings": asdict(self.settings),
            "requests": len(self.time_s),
            "blocks": int(self.num_blocks.sum()),
            "input_tokens": int(self.input_tokens.sum()),
            "hit_rate": self.hit_rate,
            "tier_hit_rates": self.tier_hit_rates,
            "tokens_saved": self.tokens_saved,
        }
        if self.costs is not None:
            p50, p90, p99 = np.percentile(self.ttft_s, (50, 90, 99)).tolist()
            totals["ttft_s"] = {"mean": float(self.ttft_s.mean()), "p50": p50, "p90": p90, "p99": p99}
        return totals

    @cached_property
    def _tokens(self) -> dict[str, Counts]:
        """Tokens hit by tier; one tier's follow the other's in the prompt."""
        ends = np.cumsum(list(self.hit_blocks.values()), axis=0) * self.block_tokens
        tokens = np.diff(np.minimum(ends, self.input_tokens), axis=0, prepend=0)
        return dict(zip(self.hit_blocks, tokens, strict=True))


def replay(
    trace: Trace,
    settings: ReplaySettings,
    on_progress: Callable[[int], None] | None = None,
    costs: TierCosts | None = None,
) -> ReplayResult:
    """Send the requests of `trace` through a cache, one after the other.

    `on_progress` gets the number of requests done, every few requests and at the end; what it raises ends the replay.
    """
    cache = CacheSimulation(settings, trace.block_tokens)
    hits = np.zeros((len(BlockHits._fields), len(trace.requests)), np.int64)
    for at, blocks in enumerate(trace.prefixes):
        if on_progress is not None and at % _PROGRESS_STEP == 0:
            on_progress(at)
        hits[:, at] = cache.serve(blocks)
    cache.check()
    if on_progress is not None:
        on_progress(len(trace.requests))
    return _result_of(trace, settings, dict(zip(BlockHits._fields, hits, strict=True)), settings.policy, costs)


def optimal(
    trace: Trace, settings: ReplaySettings, costs: TierCosts | None = None, name: str = "optimal"
) -> ReplayResult:
    """The most that a cache of all blocks of `settings` together could hit, whatever its order; all on the device."""
    device = optimal_hits([request.blocks for request in trace.requests], settings.total_blocks)
    none = np.zeros_like(device)
    return _result_of(trace, settings, {"device": device, "host": none, "disk": none}, name, costs)


def _result_of(
    trace: Trace, settings: ReplaySettings, hit_blocks: Mapping[str, Counts], name: str, costs: TierCosts | None = None
) -> ReplayResult:
    """A result with what the trace says of its requests."""
    requests = trace.requests
    return ReplayResult(
        settings,
        trace.name,
        trace.block_tokens,
        np.array([request.time_s for request in requests]),
        np.array([request.input_tokens for request in requests], np.int64),
        np.array([len(request.blocks) for request in requests], np.int64),
        hit_blocks,
        name,
        costs,
    )
