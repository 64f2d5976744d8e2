"""hicache's host and disk tiers directly under SGLang's tree of device pages, in place of a host tier of SGLang's.

    offload   device slots -> host pages, after the forward that fills them; then, in the background, to the disk
    lookup    which lengths of a prompt can be restored, from host and disk together
    load      pages on the disk -> host, while the request waits; then host -> device layer by layer, under the forward

SGLang calls everything from its scheduler thread, but `layer_done_counter.wait_until` from the forward. After the
constructor nothing raises into it: what fails is a miss, or an offload that is reported as failed, counted and logged.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch

from hicache.integrations.sglang.linker_copies import Loads, Offloads, Pinned, unpin
from hicache.integrations.sglang.linker_disk import LinkerDisk
from hicache.integrations.sglang.linker_host import host_tiers, parts_of
from hicache.integrations.sglang.linker_pools import (
    CacheInitParams,
    ComponentType,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    UnifiedCacheLinker,
    are_replicated,
    linked_pools,
)
from hicache.integrations.sglang.linker_settings import linker_config
from hicache.integrations.sglang.linker_store import Ranks, open_store
from hicache.storage.process.health import LIMITS

log = logging.getLogger(__name__)

_REPORT_S = 60.0

F = TypeVar("F", bound=Callable[..., Any])


def _never_raises(otherwise: Callable[[], object]) -> Callable[[F], F]:
    """A fault of ours is a miss of the cache, not the end of SGLang's scheduler. `otherwise`: what is returned then."""

    def guard(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: HiCacheLinker, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.stats["faults"] += 1
                log.exception("the linker failed; SGLang goes on without it")
                return otherwise()

        return cast(F, guarded)

    return guard


class HiCacheLinker(UnifiedCacheLinker):
    """One a rank, for `--unified-cache-external-linker-backend dynamic`; docs/integrations/sglang_linker.md.

    `pools`: the components that it serves. `tiers`: their host tiers, and `store` the disk, for tests and inspection.
    `stats`: counts since the start.
    """

    def __init__(
        self,
        server_args: Any,
        params: CacheInitParams,
        *,
        components: set[ComponentType],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`ConfigError`, `OutOfMemory` or `StoreError` for what cannot work, with the setting that would."""
        config = linker_config(extra_config)
        pools = linked_pools(params, components)
        self._ranks = Ranks.of(params)
        # Where all ranks hold the same rows, and read one store, one of them writes it.
        is_shared = config.is_served and are_replicated(params, components)
        store = open_store(config, server_args, params, self._ranks.named(shared=is_shared), pools)
        try:
            self.tiers = host_tiers(config, pools)
        except BaseException:
            store.tier.close()
            raise
        for tier in self.tiers.values():
            store.tier.share(tier.host.arena.descriptor, tier.host.bytes_of.view(-1).numpy())
        self.store = store
        writes = not is_shared or self._ranks.tp[0] == 0
        self._disk = LinkerDisk(store, config.lookup_wait_s, writes=writes)
        self._loads = Loads([*self.tiers.values()], self._disk, config.load_wait_s)
        self._offloads = Offloads(self._disk, self._behind_forward)
        self.forward_stream = forward_stream
        device = pools[0].device
        self._fence = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pools = {PoolName(pool.name): pool for pool in pools}
        self.layer_done_counter = self._loads.counter
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._reported_s, self._closed = time.monotonic(), False
        self.stats = dict.fromkeys(("lookups", "hits", "loads", "refused_loads", "failed_loads", "faults"), 0)
        self.stats |= dict.fromkeys(("offloads", "failed_offloads"), 0)
        sizes = ", ".join(f"{tier.host.num_pages} pages of {name}" for name, tier in self.tiers.items())
        log.info("hicache linker: %s on the host, disk %s", sizes, store.path)

    @_never_raises(list)
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The lengths, in pages of the prompt's tail, at which every component can be restored."""
        wanted = {PoolName(transfer.name).value: transfer for transfer in transfers}
        if not wanted.keys() <= self.tiers.keys() or "kv" not in wanted or not wanted["kv"].keys:
            return []
        windows = {  # in pages
            name: len(each.keys) for name, each in wanted.items() if each.hit_policy == PoolHitPolicy.TRAILING_PAGES
        }
        held = self._held({name: self.tiers[name].keys(wanted["kv"].keys) for name in ("kv", *windows)})
        chain = [*itertools.takewhile(bool, held["kv"])]
        ends = [
            end
            for end in range(1, len(chain) + 1)
            if all(all(held[name][max(0, end - pages) : end]) for name, pages in windows.items())
        ]
        self.stats["lookups"] += 1
        self.stats["hits"] += bool(ends)
        return ends

    def _held(self, keys: Mapping[str, list[bytes]]) -> dict[str, list[bool]]:
        """Of each component, whether host or disk hold each page."""
        indexes = {name: self.tiers[name].index for name in keys}
        for name, index in indexes.items():
            index.link(keys[name])
        absent = {name: [key for key in keys[name] if key not in index] for name, index in indexes.items()}
        others = [key for name in absent if name != "kv" for key in absent[name]]
        found = self._disk.find(absent["kv"], others)
        return {name: [key in index or key in found for key in keys[name]] for name, index in indexes.items()}

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Bring all pages to the host, waiting for those on the disk, and keep them there. False, on all ranks: some
        did not come, and the request computes its prompt."""
        pinned = self._pin(transfers)
        if not self._ranks.agree(pinned is not None):
            unpin(pinned or ())
            self.stats["refused_loads"] += 1
            return False
        self._loads.queue(rid, pinned or [])
        return True

    @_never_raises(lambda: None)
    def _pin(self, transfers: list[PoolTransfer]) -> list[Pinned] | None:
        parts = parts_of(transfers, self.tiers)
        return None if parts is None else self._loads.pin(parts)

    @_never_raises(lambda: -1)
    def start_layer_wise_loading(self) -> int:
        """Submit the queued loads; returns the index of their batch, -1 for none."""
        index = self._loads.start()
        self.stats["loads"] += index >= 0
        return index

    @_never_raises(bool)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch writes to the device no more; whether all of it arrived."""
        landed = self._loads.finish(counter_index)
        self.stats["failed_loads"] += not landed
        return landed

    @_never_raises(bool)
    def cancel_queued_load(self, rid: str) -> bool:
        """Whether a load was queued, and not started yet."""
        return self._loads.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Begin to copy pages to the host, all or none. Always True, for the ranks must agree: what cannot be taken
        completes as failed, and SGLang offers it again."""
        self._offloads.add(self._begin_offload(transfers))
        return True

    @_never_raises(lambda: None)
    def _begin_offload(self, transfers: list[PoolTransfer]) -> Any:
        parts = parts_of(transfers, self.tiers)
        return None if parts is None else self._offloads.begin(parts)

    @contextlib.contextmanager
    def _behind_forward(self) -> Iterator[None]:
        """Work queued within waits for all forwards before, on a stream of its own: SGLang's streams do not wait."""
        if self._fence is None:
            yield
            return
        for ready in self.record_offload_ready():
            self._fence.wait_event(ready)
        with torch.cuda.stream(self._fence):
            yield

    def num_completed_offloads(self) -> int:
        """Offloads whose outcome is known, in the order of their begin."""
        self._poll()
        return len(self._offloads.completed)

    def pop_completed_offload(self) -> bool:
        """Whether the oldest of them is on the host."""
        success = self._offloads.completed.popleft()
        self.stats["offloads" if success else "failed_offloads"] += 1
        return success

    @_never_raises(lambda: None)
    def _poll(self) -> None:
        """Take what ended: once a step of the scheduler."""
        self._offloads.poll()
        self._disk.poll()
        if time.monotonic() > self._reported_s + _REPORT_S:
            self._reported_s = time.monotonic()
            log.info("hicache linker: %s", self.describe())

    @_never_raises(lambda: None)
    def reset(self) -> None:
        """End all copies, write what is on the host to the disk, and forget the host pages, but for those that a disk
        which stalls is still to take. The disk keeps its own."""
        self._loads.end_all()
        self._offloads.end_all()
        self._disk.settle(LIMITS.close_s)
        for tier in self.tiers.values():
            tier.index.clear()

    @_never_raises(lambda: None)
    def close(self) -> None:
        """As `reset`, and give memory, threads and the store back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.reset()
        log.info("hicache linker closes: %s", self.describe())
        if self._disk.tier.close():
            for tier in self.tiers.values():
                tier.close()

    @property
    def is_idle(self) -> bool:
        """Whether no offload is under way, and the disk has all that it is to have."""
        return self._offloads.is_idle and self._disk.is_idle

    def describe(self) -> dict[str, int]:
        """Counts since the start, and pages on the host now."""
        pages = {f"host_{name}_pages": len(tier.index) for name, tier in self.tiers.items()}
        return {**self.stats, **self._disk.stats, **pages}

    def check(self) -> None:
        """Raise `InvariantError` unless every host page is free or has one owner."""
        for tier in self.tiers.values():
            holders = self._loads.locked(tier), self._offloads.locked(tier), self._disk.locked(tier)
            tier.index.check(Counter(itertools.chain.from_iterable(holders)))
