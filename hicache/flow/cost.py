"""What it costs to bring pages and to compute tokens, by rates that are measured while serving.

    read_s      disk -> host      completed reads, and how many readers work side by side; remote tier -> host too
    load_s      host -> device    completed loads
    prefill_s   computing         passes that the scheduler reports

The rule that follows from them, `LoadEstimate`, is the same for the prefetch, the load gate and the plug-ins.
docs/decisions/028-prefetch-that-pays.md says why it is so, and what the estimates leave out.
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
    "accepted": "load, estimated to cost all requests less time than recomputation",
    "declined": "recompute, estimated to cost all requests less time than loading",
    "unmeasured": "load, while one of the two speeds was unknown",
}
_KEEP = 0.9  # what the operations so far weigh when another one ends
_STALE_S = 60.0
_HALF_LIFE_TOKENS = 1 << 17
_MIN_SPREAD = 0.01
# Below what serves long contexts on a GPU, so that an unknown speed makes requests wait rather than compute.
_ASSUMED_TOKENS_PER_S = 1000.0
_GAUGED_TOKENS = 8192
_FAMILY = "movement_bytes_per_second"


class TransferRate:
    """Bytes per second of recent operations, large ones counting by their bytes.

    Unknown before the first, and when the last is older than `_STALE_S`: a tier that was found slow is used no more, so
    nothing else would ever show that it has recovered.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_bytes = self._seconds = 0.0
        self._observed_s = -math.inf

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            keep = _KEEP if self._is_known() else 0.0
            self._num_bytes = keep * self._num_bytes + num_bytes
            self._seconds = keep * self._seconds + seconds
            self._observed_s = self._clock()

    def seconds(self, num_bytes: float) -> float | None:
        """How long `num_bytes` take; None where the rate is unknown."""
        return num_bytes * self._seconds / self._num_bytes if self._is_known() else None

    def bytes_per_s(self) -> float:
        """The last known rate, 0 before the first operation."""
        return self._num_bytes / max(self._seconds, 1e-9)

    def _is_known(self) -> bool:
        return self._clock() - self._observed_s <= _STALE_S


class PrefillCost:
    """Seconds of prefill as `token_s * tokens + pair_s * tokens * mean position`, fitted to the passes observed.

    The first term is what every token costs, the second attention, which grows with the position: the speed at 128k is
    not that at 1k. Least squares over passes, which fade with a half-life of `_HALF_LIFE_TOKENS` computed tokens; so
    short passes, which are mostly overhead, weigh little. Passes at one and the same position cannot tell the terms
    apart: then the first has it all.
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
        """Seconds of a token, and of a token and position."""
        return self._token_s, self._pair_s

    def assume(self, token_s: float, pair_s: float) -> None:
        """The terms until the first pass is observed."""
        if not self.is_measured:
            self._token_s, self._pair_s = token_s, pair_s

    def observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        keep, x, y = 0.5 ** (num_tokens / _HALF_LIFE_TOKENS), float(num_tokens), num_tokens * mean_position
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y
        self._yy, self._xt = keep * self._yy + y * y, keep * self._xt + x * seconds
        self._yt = keep * self._yt + y * seconds
        self._fit()

    def seconds(self, start: int, end: int) -> float:
        """Of computing positions [start, end)."""
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

    `tokens_per_s`: "auto" measures prefill; 0: computing is never worthwhile; else the speed, whatever is measured.
    `num_readers`: reads that go on side by side, by store. `prefill`: what was measured of it.
    """

    @classmethod
    def of(cls, context: EngineContext) -> CostModel:
        """The model of one engine, with the clock of its stores."""
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
        gauge = metrics.gauge
        for store, rate in self._reads.items():
            name, of = f"cost.{store.prefix}read_bytes_per_second", "disk" if store is DISK else "remote tier"
            labels = {"movement": "read", "direction": f"{store.name}_to_host"}
            gauge(name, f"measured rate of one reader of the {of}", rate.bytes_per_s, _FAMILY, **labels)
        help, labels = "measured rate of loads to the device", {"movement": "load", "direction": "host_to_device"}
        gauge("cost.load_bytes_per_second", help, self._loads.bytes_per_s, _FAMILY, **labels)
        help = f"estimated speed of prefill over the first {_GAUGED_TOKENS} tokens; 0: unknown, or unwanted"
        gauge(
            "cost.prefill_tokens_per_second",
            help,
            lambda: _GAUGED_TOKENS / (self.prefill_s(0, _GAUGED_TOKENS) or math.inf),
        )

    def observe_read(self, num_bytes: int, seconds: float, store: Store = DISK) -> None:
        """One reader brought `num_bytes` from a store to the host in `seconds`, beside others or not."""
        self._reads[store].observe(num_bytes, seconds)

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        self._loads.observe(num_bytes, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        self.prefill.observe(num_tokens, seconds, mean_position)

    def read_s(self, num_bytes: float, num_jobs: int, store: Store = DISK) -> float | None:
        """Reading `num_bytes` from a store in `num_jobs` jobs; None where the rate is unknown.

        A reader's rate was measured beside as many others as there were. Of a read that occupies more it is too high:
        its own jobs correct that as they end. An estimate that is too low would never be corrected: nobody would wait.
        """
        return self._reads[store].seconds(num_bytes / max(1, min(num_jobs, self._num_readers[store])))

    def parts(self, stores: Sequence[Store]) -> dict[Store, float]:
        """Of what each of `stores` has, the parts that these bring by their rates; alike where none is known."""
        times_s = {store: self.read_s(1, self._num_readers[store], store) for store in stores}
        rates = {store: 1 / time_s for store, time_s in times_s.items() if time_s} or dict.fromkeys(stores, 1.0)
        return {store: rate / sum(rates.values()) for store, rate in rates.items()}

    def load_s(self, num_bytes: int) -> float | None:
        """Loading `num_bytes` from the host to the device; None where the rate is unknown."""
        return self._loads.seconds(num_bytes)

    def prefill_s(self, start: int, end: int) -> float | None:
        """Computing positions [start, end) of a prompt; None where the speed is unknown."""
        if self._tokens_per_s != "auto":
            return (end - start) / self._tokens_per_s if self._tokens_per_s else math.inf
        return self.prefill.seconds(start, end) if self.prefill.is_known else None

    def longest_wait_s(self, start: int, end: int) -> float:
        """What a wait for positions [start, end) may take at most: as long as computing them, at an assumed low speed
        while none was measured."""
        compute_s = self.prefill_s(start, end)
        return (end - start) / _ASSUMED_TOKENS_PER_S if compute_s is None else compute_s


class LoadEstimate(NamedTuple):
    """Seconds to load, those of what is queued before it included, and to compute the same tokens; None: not known yet.

    `num_delayed`: other requests that wait while these tokens are computed: those that run, and those that wait for the
    GPU. A load takes the GPU from nobody, so it may take as long as computing costs all of them together.
    """

    load_s: float | None
    compute_s: float | None
    num_delayed: int = 0

    @property
    def limit_s(self) -> float:
        """How long a load may take: as long as computing costs this request and all that it delays; without an end
        where that is not known."""
        return math.inf if self.compute_s is None else self.compute_s * (1 + self.num_delayed)

    @property
    def pays(self) -> bool:
        """Whether to load. Yes, until both are known."""
        return self.load_s is None or self.load_s <= self.limit_s


@dataclass(frozen=True)
class Requests:
    """Of one engine, by id: those that hold a lease and so are `running`, those that are queued and so `expected`, and
    those `waiting` for a prefetch. Views of what their owners keep; scheduler thread."""

    running: Mapping[str, object]
    expected: Mapping[str, object]
    waiting: set[str] = field(default_factory=set)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Of each kind."""
        return len(self.running), len(self.expected), len(self.waiting)

    @property
    def num_delayed(self) -> int:
        """How many computing for another one delays: all that run or wait for the device. Not those that wait for a
        prefetch."""
        return len(self.running) + len(self.expected) - len(self.expected.keys() & self.waiting)

    def is_delayed(self, request_id: str) -> bool:
        """Whether `num_delayed` counts this request."""
        return request_id in self.running or (request_id in self.expected and request_id not in self.waiting)

    def num_delayed_by(self, request_id: str) -> int:
        """How many other requests computing for this one delays."""
        return self.num_delayed - self.is_delayed(request_id)


class LoadDecisions:
    """Whether loads pay, counted decision by decision; the first one that does not is logged. One thread at a time.

    `movement`: whose decisions these are, the first part of the counters' names. `source`: where the prefix lies.
    """

    def __init__(self, metrics: Metrics, movement: str, source: str, family: str) -> None:
        self._source = source
        self.accepted, self.declined, self.unmeasured = (
            metrics.counter(f"{movement}.{decision}_loads", f"decisions to {what}", family, decision=decision)
            for decision, what in _DECISIONS.items()
        )

    def decide(self, load_s: float | None, compute_s: float | None, num_delayed: int = 0) -> bool:
        """Whether to load what takes so long to load and to compute, as `LoadEstimate` says. Counts it."""
        pays = LoadEstimate(load_s, compute_s, num_delayed).pays
        if load_s is None or compute_s is None:
            self.unmeasured.value += 1
        elif pays:
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
        return pays
