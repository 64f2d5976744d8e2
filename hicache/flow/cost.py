"""Load a prefix or recompute it: the rates that serving measures, and the policy that compares them.

    read_s      store -> host     completed reads, and the number of parallel readers
    load_s      host -> device    completed loads
    prefill_s   computing         passes that the scheduler reports

`LoadPolicy` decides for loads from the host, for prefetches and for the gates of plug-ins.
docs/decisions/028-load-or-recompute.md gives the reasons, and the costs that the estimates leave out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hicache.flow.context import EngineContext
from hicache.metrics import Metrics
from hicache.tiers import DISK, Store

log = logging.getLogger(__name__)

_DECISIONS = {
    "accepted": "load, because this was estimated to cost all requests less time than recomputation",
    "declined": "recompute, because this was estimated to cost all requests less time than loading",
    "unmeasured": "load while the speed of loading or computing was unknown",
}
_DECAY = 0.9  # factor on the weight of all earlier observations at each new one
_STALE_S = 60.0
_HALF_LIFE_TOKENS = 1 << 17
_MIN_SPREAD = 0.01
# The prefill speed that is assumed while no speed is known. It is slower than any GPU that serves long contexts, so
# requests wait for reads.
_ASSUMED_TOKENS_PER_S = 1000.0
_GAUGED_TOKENS = 8192
_COSTLY_S = 1.0
_FAMILY = "transfer_bytes_per_second"


class TransferRate:
    """Bytes per second of recent operations, weighted by their bytes.

    The rate is unknown before the first operation, and when the last operation is older than `_STALE_S`. An old rate is
    not used, because requests avoid a slow tier, and then no operation shows that the tier has recovered.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_bytes = self._seconds = 0.0
        self._observed_s = -math.inf

    def observe(self, *moved: tuple[int, float]) -> None:
        """Record operations, each as (bytes, seconds)."""
        now_s = self._clock()
        for num_bytes, seconds in moved:
            if num_bytes:
                keep = _DECAY if now_s - self._observed_s <= _STALE_S else 0.0
                self._num_bytes = keep * self._num_bytes + num_bytes
                self._seconds = keep * self._seconds + seconds
                self._observed_s = now_s

    def seconds(self, num_bytes: float) -> float | None:
        """Return the seconds that an operation of `num_bytes` takes; None if the rate is unknown."""
        if self._clock() - self._observed_s > _STALE_S:
            return None
        return num_bytes * self._seconds / self._num_bytes

    def bytes_per_s(self) -> float:
        """The last known rate, 0 before the first operation."""
        return self._num_bytes / max(self._seconds, 1e-9)


class PrefillCost:
    """Seconds of prefill as `token_s * tokens + pair_s * tokens * mean position`, fitted to the passes observed.

    The first term is the cost of each token; the second is attention, whose cost grows with the position. Both terms
    are fitted by least squares over passes, whose weights decay with a half-life of `_HALF_LIFE_TOKENS` computed
    tokens. Short passes have little weight, because they are mostly overhead. If all passes have the same mean
    position, the first term gets the complete cost.
    """

    def __init__(self) -> None:
        # Sums over passes; x: tokens, y: tokens * mean position, t: seconds.
        self._xx = self._xy = self._yy = self._xt = self._yt = 0.0
        self._token_s = self._pair_s = 0.0

    @property
    def is_measured(self) -> bool:
        return self._xx > 0

    @property
    def is_known(self) -> bool:
        return max(self.terms) > 0

    @property
    def terms(self) -> tuple[float, float]:
        """Seconds per token, and seconds per token and position."""
        return self._token_s, self._pair_s

    def assume(self, token_s: float, pair_s: float) -> None:
        """Set the terms that are used until the first pass is observed."""
        if not self.is_measured:
            self._token_s, self._pair_s = token_s, pair_s

    def observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        keep, x, y = 0.5 ** (num_tokens / _HALF_LIFE_TOKENS), float(num_tokens), num_tokens * mean_position
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y
        self._yy, self._xt = keep * self._yy + y * y, keep * self._xt + x * seconds
        self._yt = keep * self._yt + y * seconds
        self._fit()

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds that computing positions [start, end) takes."""
        return (end - start) * (self._token_s + self._pair_s * (start + end) / 2)

    def _fit(self) -> None:
        determinant = self._xx * self._yy - self._xy**2
        self._token_s, self._pair_s = self._xt / self._xx, 0.0
        if determinant <= _MIN_SPREAD * self._xx * self._yy:
            return
        pair_s = (self._xx * self._yt - self._xy * self._xt) / determinant
        token_s = (self._yy * self._xt - self._xy * self._yt) / determinant
        if token_s < 0:
            self._token_s, self._pair_s = 0.0, self._yt / self._yy
        elif pair_s > 0:
            self._token_s, self._pair_s = token_s, pair_s


class CostModel:
    """The rates of one engine and the estimates that follow from them. Owned by the scheduler thread.

    `tokens_per_s`: "auto" measures the prefill speed; 0: loading is always chosen; any other value is used in place of
    a measured speed. `num_readers`: parallel reads, by store. `prefill`: the measured cost of computing.
    `num_observed`: the number of passes and loads that were observed.
    """

    @classmethod
    def of(cls, context: EngineContext) -> CostModel:
        """Return the cost model of one engine, with the clock of the engine's stores."""
        clock = next((tier.clock for tier in context.stores.values()), time.monotonic)
        num_readers = {store: tier.num_readers for store, tier in context.stores.items()}
        return cls(context.config.prefill_tokens_per_s, num_readers, context.metrics, clock)

    def __init__(
        self,
        tokens_per_s: float | Literal["auto"],
        num_readers: Mapping[Store, int],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._tokens_per_s, self._num_readers = tokens_per_s, num_readers
        self._loads, self.prefill = TransferRate(clock), PrefillCost()
        self._reads = {store: TransferRate(clock) for store in num_readers}
        self.num_observed = 0
        gauge = metrics.gauge
        for store, rate in self._reads.items():
            name, of = f"cost.{store.prefix}read_bytes_per_second", "disk" if store is DISK else "remote tier"
            labels = {"operation": "read", "direction": f"{store.name}_to_host"}
            gauge(name, f"measured rate of one thread that reads from the {of}", rate.bytes_per_s, _FAMILY, **labels)
        help, labels = (
            "measured rate of loads from host to device",
            {"operation": "load", "direction": "host_to_device"},
        )
        gauge("cost.load_bytes_per_second", help, self._loads.bytes_per_s, _FAMILY, **labels)
        help = (
            f"estimated prefill speed over the first {_GAUGED_TOKENS} tokens; 0: unknown, or prefill_tokens_per_s is 0"
        )
        gauge(
            "cost.prefill_tokens_per_second",
            help,
            lambda: _GAUGED_TOKENS / (self.prefill_s(0, _GAUGED_TOKENS) or math.inf),
        )

    def observe_reads(self, moved: Sequence[tuple[int, float]], store: Store = DISK) -> None:
        """Record reads from a store to the host, each as (bytes, seconds for which it occupied a reader thread)."""
        self._reads[store].observe(*moved)

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        self._loads.observe((num_bytes, seconds))
        self.num_observed += 1

    def observe_prefill(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        self.prefill.observe(num_tokens, seconds, mean_position)
        self.num_observed += 1

    def read_s(self, num_bytes: float, num_jobs: int, store: Store = DISK) -> float | None:
        """Return the seconds of reading `num_bytes` from a store in `num_jobs` jobs; None if the rate is unknown.

        The rate of one reader depends on the number of parallel readers. If a read occupies more readers than the
        measured reads, the estimated rate is too high, and the jobs of the read correct the rate as they end. A rate
        that is too low would never be corrected, because no request would wait for the store.
        """
        return self._reads[store].seconds(num_bytes / max(1, min(num_jobs, self._num_readers[store])))

    def parts(self, stores: Sequence[Store]) -> dict[Store, float]:
        """Return the share that each store reads of the pages that all `stores` have, in proportion to their rates;
        equal shares if no rate is known."""
        if len(stores) == 1:
            return {stores[0]: 1.0}
        times_s = {store: self.read_s(1, self._num_readers[store], store) for store in stores}
        rates = {store: 1 / time_s for store, time_s in times_s.items() if time_s} or dict.fromkeys(stores, 1.0)
        return {store: rate / sum(rates.values()) for store, rate in rates.items()}

    def load_s(self, num_bytes: int) -> float | None:
        """Return the seconds of loading `num_bytes` from the host to the device; None if the rate is unknown."""
        return self._loads.seconds(num_bytes)

    def prefill_s(self, start: int, end: int) -> float | None:
        """Return the seconds of computing positions [start, end) of a prompt; None if the speed is unknown."""
        if self._tokens_per_s != "auto":
            return (end - start) / self._tokens_per_s if self._tokens_per_s else math.inf
        return self.prefill.seconds(start, end) if self.prefill.is_known else None

    def is_costly(self, num_tokens: int) -> bool:
        """Return whether a prompt of `num_tokens` is known to take more than a second to compute. The pages of a prompt
        like this are worth a copy in the remote store before their second use."""
        return (self.prefill_s(0, num_tokens) or 0.0) > _COSTLY_S

    def longest_wait_s(self, start: int, end: int) -> float:
        """Return the longest wait for positions [start, end): the time of computing them, at an assumed low speed if no
        speed is known."""
        compute_s = self.prefill_s(start, end)
        return (end - start) / _ASSUMED_TOKENS_PER_S if compute_s is None else compute_s


class LoadEstimate(NamedTuple):
    """Seconds of a load, including the operations queued before it, and of computing the same tokens; None: unknown.

    `num_delayed`: other requests that run or wait for the GPU. Computing these tokens would delay them. A load takes
    almost none of the GPU's computing time: the link copies the bytes, and a short kernel unpacks packed pages. The
    slots that the load takes are not part of the estimate. Example: a load of 2 s is chosen if computing takes 1 s and
    delays two other requests, because 2 <= 1 x 3.
    `queued_s`: seconds in which the GPU will compute all other prompts that it has not begun, without the tokens that
    are loaded. A load that ends within this time and the time of computing is chosen, because the GPU has other work
    until then.
    """

    load_s: float | None
    compute_s: float | None
    num_delayed: int = 0
    queued_s: float = 0.0

    @property
    def delay_s(self) -> float:
        """The time of computing, multiplied by this request and the requests that it delays; infinite if the time is
        unknown."""
        return math.inf if self.compute_s is None else self.compute_s * (1 + self.num_delayed)

    @property
    def limit_s(self) -> float:
        """The longest worthwhile load; infinite if the time of computing is unknown."""
        return math.inf if self.compute_s is None else max(self.delay_s, self.queued_s + self.compute_s)

    def is_worth_loading(self, no_progress_s: float = 0.0, tolerance: float = 1.0) -> bool:
        """Return whether to load, or to continue a wait. True while one of the two times is unknown.

        `no_progress_s`: seconds without an arriving page, at most `delay_s`. `tolerance`: the factor by which the rest
        of a wait in progress may exceed the limit.
        """
        if self.compute_s is None:
            return True
        delay_s = self.compute_s * (1 + self.num_delayed)  # without a call, because each poll compares many waits
        limit_s = max(delay_s, self.queued_s + self.compute_s)
        return (self.load_s is None or self.load_s <= tolerance * limit_s) and no_progress_s <= delay_s


@dataclass(frozen=True)
class Requests:
    """The requests of one engine, by id: `running` requests have a lease, `expected` requests are queued, and `waiting`
    requests wait for a prefetch. The mappings belong to other objects and change with them. Scheduler thread only."""

    running: Mapping[str, object]
    expected: Mapping[str, object]
    waiting: set[str] = field(default_factory=set)

    def num_delayed(self, by: str | None = None) -> int:
        """Return the number of requests that computing delays: all requests that run or wait for the device, without
        requests that wait for a prefetch. `by`: a request that is computed and does not count."""
        num_delayed = len(self.running) + len(self.expected) - len(self.expected.keys() & self.waiting)
        return num_delayed if by is None else num_delayed - self.is_delayed(by)

    def is_delayed(self, request_id: str) -> bool:
        """Return whether `num_delayed` counts this request."""
        return request_id in self.running or (request_id in self.expected and request_id not in self.waiting)


class LoadPolicy:
    """Chooses between loading and recomputing by the rates of `cost`, and counts each choice. Used by one thread at a
    time.

    `prefix`: the first part of the counters' names. `source`: the tier that has the prefix, for the log.
    """

    def __init__(self, cost: CostModel, metrics: Metrics, prefix: str, source: str, family: str) -> None:
        self.cost, self._source = cost, source
        self.accepted, self.declined, self.unmeasured = (
            metrics.counter(f"{prefix}.{decision}_loads", f"decisions to {what}", family, decision=decision)
            for decision, what in _DECISIONS.items()
        )

    def compare(
        self, load_s: float | None, start: int, end: int, num_delayed: int, queued_s: float = 0.0
    ) -> LoadEstimate:
        """Compare a load of `load_s` seconds with computing positions [start, end)."""
        return LoadEstimate(load_s, self.cost.prefill_s(start, end), num_delayed, queued_s)

    def compare_wait(self, wait_s: float | None, start: int, end: int, num_delayed: int) -> LoadEstimate:
        """Compare a wait of `wait_s` seconds with computing positions [start, end). The wait is bounded even if no
        prefill speed is known."""
        return LoadEstimate(wait_s, self.cost.longest_wait_s(start, end), num_delayed)

    def choose(self, estimate: LoadEstimate) -> bool:
        """Return whether to load. Counts the choice, and logs the first load that is declined."""
        load_s, compute_s, num_delayed, _ = estimate
        is_worth_loading = estimate.is_worth_loading()
        if load_s is None or compute_s is None:
            self.unmeasured.value += 1
        elif is_worth_loading:
            self.accepted.value += 1
        else:
            if not self.declined.value:
                log.info(
                    "a prefix on the %s is computed again: loading it would take %.3g s, computing %.3g s, "
                    "in which %d other requests wait; prefill_tokens_per_s=0 loads it anyway",
                    self._source,
                    load_s,
                    compute_s,
                    num_delayed,
                )
            self.declined.value += 1
        return is_worth_loading
