"""Replays a trace through one simulated cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.pages.key import Tokens
from hicache.replay.cache import BlockHits, CacheSimulation, Copies
from hicache.replay.cost import TierCosts
from hicache.replay.hints import hints_of
from hicache.replay.optimal import optimal_hits
from hicache.replay.settings import ReplaySettings
from hicache.replay.trace import Trace

__all__ = ["BlockHits", "CacheSimulation", "Copies", "ReplayResult", "ReplaySettings", "one_tier", "optimal", "replay"]

Counts = npt.NDArray[np.int64]
Progress = Callable[[int], None]
_PROGRESS_STEP = 64  # requests between two progress reports


@dataclass(frozen=True)
class ReplayResult:
    """The result of one replay. Arrays are `[requests]`, without the requests of the warm-up.

    `name`: the policy, or `optimal`. `hit_blocks`: numbers of hit blocks by tier, "device" first. In numbers of tokens,
    a full block counts as `block_tokens`, and a partial last block as the tokens in it. `copies`: None for `optimal`,
    which has no tiers.
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
    copies: Copies | None = None

    @property
    def hit_rate(self) -> float:
        """Hit blocks divided by requested blocks."""
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
    def uncached_tokens(self) -> Counts:
        """The number of computed tokens of each request. It is at least 1, because the last token of a prompt is always
        computed."""
        return np.asarray(np.maximum(self.input_tokens - self.hit_tokens, 1), np.int64)

    @property
    def tokens_saved(self) -> int:
        """The number of prompt tokens, summed over all requests, that need not be computed."""
        return int(self.hit_tokens.sum())

    @cached_property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """The time to first token of each request by the cost model, in seconds; NaN without a cost model."""
        if self.costs is None:
            return np.full(len(self.time_s), np.nan)
        return self.costs.ttft_s(self.input_tokens, self.device_tokens, self.host_tokens, self.disk_tokens)

    @property
    def gpu_s(self) -> float:
        """The seconds that the GPU computes for all prompts together by the cost model; NaN without a cost model."""
        return (
            float("nan")
            if self.costs is None
            else float(self.costs.prefill_s(self.input_tokens, self.hit_tokens).sum())
        )

    @property
    def copied_bytes(self) -> dict[str, int]:
        """`copies` in bytes; empty if the bytes of a token are unknown."""
        token_bytes = 0 if self.costs is None else self.costs.bytes_of("host")
        if self.copies is None or not token_bytes:
            return {}
        return {name: int(blocks * self.block_tokens * token_bytes) for name, blocks in asdict(self.copies).items()}

    def to_json(self) -> dict[str, Any]:
        """Return settings and totals as plain values."""
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
            "uncached_tokens": _percentiles(self.uncached_tokens),
        }
        if self.copies is not None:
            totals |= {"copied_blocks": asdict(self.copies), "copied_bytes": self.copied_bytes}
        if self.costs is not None and self.costs.prefill_tokens_per_s is not None:
            totals["gpu_s"] = self.gpu_s
            totals["ttft_s"] = {"mean": float(self.ttft_s.mean()), **_percentiles(self.ttft_s)}
        return totals

    @cached_property
    def _tokens(self) -> dict[str, Counts]:
        """The numbers of hit tokens of each request, by tier. A prompt begins with its hits on the device, followed by
        its hits on the host and then on the disk."""
        ends = np.cumsum(list(self.hit_blocks.values()), axis=0) * self.block_tokens
        tokens = np.diff(np.minimum(ends, self.input_tokens), axis=0, prepend=0)
        return dict(zip(self.hit_blocks, tokens, strict=True))


def _percentiles(values: npt.NDArray[Any]) -> dict[str, float]:
    return dict(zip(("p50", "p90", "p99"), np.percentile(values, (50, 90, 99)).tolist(), strict=True))


def replay(
    trace: Trace, settings: ReplaySettings, on_progress: Progress | None = None, costs: TierCosts | None = None
) -> ReplayResult:
    """Simulate the requests of `trace` one after the other with one cache, and return the numbers of hits and copies.

    `on_progress` gets the number of served requests, every few requests and at the end. An exception that it raises
    ends the replay. `costs`: rates from which the result computes times. If it is None, all times are NaN.
    """
    return _replay(trace, trace.prefixes, settings, on_progress, costs)


def one_tier(
    trace: Trace, settings: ReplaySettings, on_progress: Progress | None = None, costs: TierCosts | None = None
) -> ReplayResult:
    """Replay `trace` with a single device tier as large as all tiers of `settings` together.

    A prompt is cut to the size of the device tier of `settings`. The result is an estimate of the hits of tiers that
    never store a block twice."""
    single = replace(settings, device_blocks=settings.total_blocks, host_blocks=0, disk_blocks=0)
    return _replay(trace, _cut(trace, settings), single, on_progress, costs)


def optimal(
    trace: Trace, settings: ReplaySettings, costs: TierCosts | None = None, name: str = "optimal"
) -> ReplayResult:
    """Return the hit rates of optimal eviction in a single tier as large as all tiers of `settings` together.

    All hits count as hits of the device. A prompt is cut to the size of the device tier of `settings`."""
    device = optimal_hits(_cut(trace, settings), settings.total_blocks)
    none = np.zeros_like(device)
    return _result_of(trace, settings, {"device": device, "host": none, "disk": none}, name, costs)


def _cut(trace: Trace, settings: ReplaySettings) -> list[Tokens]:
    """Cut each prompt to the size of the device tier."""
    return [ids[: settings.device_blocks] for ids in trace.prefixes]


def _replay(
    trace: Trace,
    prompts: Sequence[Tokens],
    settings: ReplaySettings,
    on_progress: Progress | None,
    costs: TierCosts | None,
) -> ReplayResult:
    blocks_per_s = trace.num_blocks / (trace.requests[-1].time_s or 1)
    cache = CacheSimulation(settings, blocks_per_s)
    hits = np.zeros((len(BlockHits._fields), len(prompts)), np.int64)
    hints = hints_of(trace, settings.hints)
    for at, blocks in enumerate(prompts):
        if on_progress is not None and at % _PROGRESS_STEP == 0:
            on_progress(at)
        if at == trace.num_warm_up:
            cache.reset_counts()
        hits[:, at] = cache.serve(blocks, hints[at], trace.requests[at].time_s)
    cache.check()
    if on_progress is not None:
        on_progress(len(prompts))
    by_tier = dict(zip(BlockHits._fields, hits, strict=True))
    return _result_of(trace, settings, by_tier, settings.policy, costs, cache.copies)


def _result_of(
    trace: Trace,
    settings: ReplaySettings,
    hit_blocks: Mapping[str, Counts],
    name: str,
    costs: TierCosts | None = None,
    copies: Copies | None = None,
) -> ReplayResult:
    """Build the result. Its arrays leave out the requests of the warm-up."""
    requests, first = trace.requests[trace.num_warm_up :], trace.num_warm_up
    return ReplayResult(
        settings,
        trace.name,
        trace.block_tokens,
        np.array([request.time_s for request in requests]),
        np.array([request.input_tokens for request in requests], np.int64),
        np.array([len(request.blocks) for request in requests], np.int64),
        {tier: hits[first:] for tier, hits in hit_blocks.items()},
        name,
        costs,
        copies,
    )
