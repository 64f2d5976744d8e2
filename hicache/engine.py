"""The facade a scheduler talks to: match, prefetch, acquire, extend, commit, release.

The engine wires the flows together and is the only place where asynchronous results land, in `poll()`. Every method
belongs to one thread, the scheduler's. May import flow and everything below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy.typing as npt
import torch

from hicache.config import PrefetchMode
from hicache.device.base import KVCache
from hicache.device.req_to_token import ReqToTokenPool
from hicache.disk import DiskTier
from hicache.errors import DuplicateRequest, ForeignLease, LeaseEnded, NotRunning
from hicache.flow.admit import Admission
from hicache.flow.backup import Backup
from hicache.flow.base import CacheRequest, Flow, Hit, Lease, Parts
from hicache.flow.conservation import conservation
from hicache.flow.evict import Evictor
from hicache.flow.persist import Persist
from hicache.flow.prefetch import Prefetch, Prefetcher
from hicache.flow.restore import Restore
from hicache.flow.share import Sharing
from hicache.transfer.base import TransferBackend
from hicache.transfer.counter import LayerTransferCounter
from hicache.tree.node import Component, Tier, TreeNode
from hicache.validation import valid_count, valid_mode, valid_namespace, valid_request, valid_request_id, valid_tokens

__all__ = ["CacheEngine", "CacheRequest", "Held", "Hit", "Lease", "Prefetch"]


@dataclass(frozen=True)
class Held:
    """Tokens of a prompt that each tier would serve now: device first, then host, then disk, without a gap.

    `disk_known`: whether the store answered in time; else `disk` is 0, and it may hold more.
    """

    device: int
    host: int
    disk: int
    disk_known: bool = True


class Agreement(Protocol):
    """How ranks agree on what has finished: the same counts go in at the same place of every step on every rank."""

    def __call__(self, counts: Sequence[int]) -> Sequence[int]: ...


def one_rank(counts: Sequence[int]) -> Sequence[int]:
    """A single rank agrees with itself, at no cost."""
    return counts


_EXIT_S = 5.0


def _abandon(transfers: Sequence[TransferBackend], disk: DiskTier | None) -> None:
    """Stop the threads of an engine that was not closed: at the interpreter's exit, which would otherwise end them
    inside torch and abort the process, or when the engine is collected. Takes at most `_EXIT_S`."""
    deadline_s = time.monotonic() + _EXIT_S
    for transfer in transfers:
        transfer.abandon(deadline_s)
    if disk is not None:
        disk.close(max(0.0, deadline_s - time.monotonic()))


class CacheEngine:
    """One hierarchical cache. Build it with `hicache.factory.build_engine`; use it in a `with`, or `start` and
    `close` it.

    Every verb checks its arguments first, and a call that raises has changed nothing: `InvalidTokens` for tokens that
    are no run of ids, `InvalidArgument` for what else is of the wrong kind or out of range, `LeaseEnded` and
    `ForeignLease` for a lease that the engine does not hold, `NotRunning` before `start` and after `close`.
    """

    def __init__(self, parts: Parts, agree: Agreement = one_rank) -> None:
        self._parts, self._agree = parts, agree
        self._leases: dict[str, Lease] = {}
        self._evictor = Evictor(parts, self._save if parts.config.write_policy == "write_back" and parts.host else None)
        self._restore = Restore(parts)
        self._persist = Persist(parts, parts.disk) if parts.disk else None
        self._backup = Backup(parts, self._evictor.host_pages, self._on_host) if parts.host else None
        self._prefetcher = Prefetcher(parts, parts.disk, self._evictor.host_pages) if parts.disk else None
        self._admission = Admission(parts, self._restore, self._evictor, self._consider)
        self._sharing = Sharing(parts, self._restore, self._evictor.free_states, self._consider, self._used)
        flows: list[Flow | None] = [self._backup, self._restore, self._persist, self._prefetcher]
        self._flows: list[Flow] = [flow for flow in flows if flow is not None]
        self._running = self._closed = False
        self._finalizer: weakref.finalize[..., CacheEngine] | None = None
        self._add_gauges()

    # What a model runner needs

    @property
    def pool(self) -> KVCache:
        return self._parts.pool

    @property
    def req_to_token(self) -> ReqToTokenPool:
        return self._parts.req_to_token

    @property
    def counter(self) -> LayerTransferCounter:
        return self._parts.counter

    @property
    def has_windows(self) -> bool:
        """Whether slots are better taken chunk by chunk (`reserve_tokens`), for window layers have few."""
        return self._parts.windows is not None

    @property
    def page_size(self) -> int:
        """Tokens of a cache page: the unit of matching, backup and disk."""
        return self._parts.tree.page_size

    # Life

    def start(self) -> None:
        """Start the threads. Nothing moves before. Idempotent; NotRunning once the engine was closed."""
        if self._closed:
            raise NotRunning(closed=True)
        if not self._running:
            self._running = True
            transfers = [transfer for _, transfer in self._transfers()]
            self._finalizer = weakref.finalize(self, _abandon, transfers, self._parts.disk)
            for transfer in transfers:
                transfer.start()
            if self._parts.disk:
                self._parts.disk.start()

    def close(self) -> None:
        """Release every lease, finish what is under way, stop the threads, close the store.

        Waits for a disk that hangs no longer than twice its `hang_s`: what is left then, a later call finishes.
        """
        parts, finalizer = self._parts, self._finalizer
        was_closed = self._closed or (finalizer is not None and not finalizer.alive)
        self._closed = True
        if was_closed:
            if parts.disk is not None:
                parts.disk.close()
            return
        hosts = (parts.host, *(side.host for side in parts.sides))
        with contextlib.ExitStack() as ending:  # each part is closed, whatever becomes of those before it
            if finalizer is not None:
                ending.callback(finalizer.detach)
            for part in (*reversed(hosts), parts.disk, *(transfer for _, transfer in reversed(self._transfers()))):
                if part is not None:
                    ending.callback(part.close)
            for lease in list(self._leases.values()):
                self.release(lease)
            if self._running:
                self._settle()

    def __enter__(self) -> CacheEngine:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Before admission

    def lookup(self, tokens: npt.ArrayLike, namespace: str = "", disk_wait_s: float = 0.05) -> Held:
        """Tokens each tier holds of the prompt, of those that need not be computed. No side effect.

        Waits at most `disk_wait_s` for the store, which `Held.disk_known` tells of.
        """
        self._require_running()
        packed, namespace, tree = valid_tokens(tokens), valid_namespace(namespace), self._parts.tree
        match = tree.match(packed[:-1], namespace)
        usable = tree.usable_len(match, match.full_len, on_host=True)
        device, pages = min(usable, match.device_len), 0 if self._parts.disk is None else None
        if self._parts.disk:
            held = match.full_len
            whole = (len(packed) - 1) // tree.page_size * tree.page_size
            keys = tree.names.of_tokens(packed[:whole], namespace)[held // tree.page_size :]
            pages = self._parts.disk.contains(keys, disk_wait_s)
        return Held(device, usable - device, (pages or 0) * tree.page_size, disk_known=pages is not None)

    def prefetch(
        self, request_id: str, tokens: npt.ArrayLike, namespace: str = "", mode: PrefetchMode | None = None
    ) -> Prefetch:
        """Start bringing pages of the prompt from disk to the host; `.ready` says when admission need not wait.

        `mode` (default: the configuration's): best_effort never makes the request wait, wait_complete until the end,
        timeout for `prefetch_timeout_s`.
        """
        self._require_running()
        packed, namespace, config = valid_tokens(tokens), valid_namespace(namespace), self._parts.config
        mode = config.prefetch_mode if mode is None else valid_mode(mode)
        handle = Prefetch(valid_request_id(request_id), mode, time.monotonic() + config.prefetch_timeout_s)
        if self._prefetcher is None:
            handle.ended = True
        else:
            self._prefetcher.start(handle, packed[:-1], namespace)
        return handle

    def poll(self) -> None:
        """Land what has finished. Call it once a step; it never blocks."""
        self._require_running()
        self._land()

    def _land(self) -> None:
        counts = self._agree([flow.ready() for flow in self._flows])
        for flow, count in zip(self._flows, counts, strict=True):
            if count:
                flow.land(count)

    # A request's life

    def acquire(self, request: CacheRequest) -> Lease:
        """Admit a request: its held prefix is pinned, slots for the rest are taken, loads are submitted.

        Raises `OutOfSlots`, `OutOfRows`, `OutOfStates`, `TransferBusy` or `PrefetchPending` (all `TryLater`; nothing
        changed), `PromptTooLong` (never fits) and `DuplicateRequest`.
        """
        self._require_running()
        request = valid_request(request)
        if request.request_id in self._leases:
            raise DuplicateRequest(request.request_id)
        if self._prefetcher:
            self._prefetcher.settle(request.request_id)
        lease = self._admission.acquire(request)
        lease.on_exit = self.release
        self._leases[request.request_id] = lease
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> torch.Tensor:
        """Slots for `num_tokens` more tokens of the request, int64 on the pool's device.

        Raises `OutOfSlots`, and `PromptTooLong` beyond `max_context_len`.
        """
        self._require_held(lease)
        return self._admission.extend(lease, valid_count("num_tokens", num_tokens))

    def commit(self, lease: Lease, tokens: npt.ArrayLike) -> None:
        """KV of all `tokens`, the sequence so far, is stored (or queued to be): share its whole pages, start backups.

        Call it after every chunk of prefill and at the end. A recurrent state has consumed exactly `tokens`; it is kept
        where they are whole pages. Raises `TransferError` when the prefix failed to load, `TokensMismatch` where they
        do not begin with the lease's prompt, and `InvalidTokens` where there are more than it has slots for.
        """
        self._require_held(lease)
        self._sharing.commit(lease, valid_tokens(tokens, minimum=0, known_len=len(lease.tokens)))

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """Where a pass over the prompt from `start` should end, at most at `end`.

        Before it for hybrid models alone: at the last point below the prompt's end, and at the branching point of a
        cached prefix, where a state is worth keeping. Commit there.
        """
        self._require_held(lease)
        return self._sharing.next_stop(lease, start, end)

    def track(self, leases: Sequence[Lease]) -> None:
        """After each step of decoding, before the next `extend`: hybrid models keep a state every
        `mamba_track_interval` tokens, which the next commit shares. Others: nothing."""
        self._require_held(*leases)
        if self._parts.states is not None:
            self._sharing.track(list(leases))

    def begin_forward(self, leases: Sequence[Lease]) -> None:
        """The coming forward pass is for `leases`: its layers wait for their loads.

        Call it before each pass that reads, also between two of one lease, and read `lease.slots` behind it: `commit`
        may have put another request's slots in place of the lease's, and passes of others name other loads.
        """
        self._require_held(*leases)
        parts = self._parts
        counters = [(Component.FULL, parts.counter), *((side.component, side.counter) for side in parts.sides)]
        for component, counter in counters:
            counter.set_consumer({load_id for lease in leases for load_id in lease.load_ids_of(component)})

    def release(self, lease: Lease) -> None:
        """End the lease, finished or aborted: unpin the prefix, free the rest. Idempotent; works on a closed engine.

        Raises `ForeignLease`.
        """
        if lease.released:
            return
        if self._leases.get(lease.request_id) is not lease:
            raise ForeignLease(lease.request_id)
        self._sharing.release(lease)
        del self._leases[lease.request_id]

    def cancel(self, request_id: str) -> None:
        """The request is gone: end its prefetch and its lease, whichever there is."""
        if self._prefetcher:
            self._prefetcher.cancel(request_id)
        lease = self._leases.get(request_id)
        if lease is not None:
            self.release(lease)

    # Upkeep

    def flush(self) -> None:
        """Wait until everything under way has ended and landed: after it, what was committed is where it should be."""
        self._require_running()
        self._settle()

    def _settle(self) -> None:
        while True:
            if self._backup:
                self._backup.wait()
            self._restore.wait()
            self._land()
            waiting = (self._persist and self._persist.busy()) or (self._prefetcher and self._prefetcher.busy())
            if not waiting and not any(flow.ready() for flow in self._flows):
                return
            time.sleep(0.0005)

    def stats(self) -> dict[str, float]:
        """Counters and sizes by dotted name; those of the store under `disk.`."""
        values = self._parts.metrics.snapshot()
        for name, transfer in self._transfers():
            values.update({f"{name}.{figure}": value for figure, value in transfer.figures().items()})
        if self._parts.disk:
            store = dataclasses.asdict(self._parts.disk.store.stats())
            values.update({f"disk.{name}": float(value) for name, value in store.items()})
        return values

    def _transfers(self) -> list[tuple[str, TransferBackend]]:
        parts = self._parts
        named = [("transfer", parts.transfer)]
        named += [(f"transfer_{side.component.name.lower()}", side.transfer) for side in parts.sides]
        return [(name, transfer) for name, transfer in named if transfer is not None]

    def check(self) -> None:
        """Raise `InvariantError` with everything that is not as `docs/invariants.md` says. For idle moments and
        tests."""
        under_way = {at: self._backup.pages_under_way(at) if self._backup else 0 for at in Component}
        under_way[Component.FULL] += self._prefetcher.pages_under_way if self._prefetcher else 0
        conservation(self._parts, list(self._leases.values()), self._restore.under_way(), under_way)

    def _add_gauges(self) -> None:
        gauge, tree, allocator, host = (
            self._parts.metrics.gauge,
            self._parts.tree,
            self._parts.allocator,
            self._parts.host,
        )
        gauge("device.free_tokens", "slots nobody holds", allocator.available_size)
        gauge("device.evictable_tokens", "cached, needed by no request", lambda: tree.evictable(Tier.DEVICE))
        gauge("device.protected_tokens", "cached, needed by a request or a copy", lambda: tree.protected(Tier.DEVICE))
        gauge("tree.nodes", "nodes of the prefix tree", lambda: tree.num_nodes)
        gauge("engine.leases", "requests admitted and not released", lambda: len(self._leases))
        if host is not None:
            gauge("host.free_pages", "pages nobody holds", host.available)
            gauge("host.evictable_tokens", "on the host, needed by nobody", lambda: tree.evictable(Tier.HOST))

    # What every verb asks first

    def _require_running(self) -> None:
        if self._closed or not self._running:
            raise NotRunning(self._closed)

    def _require_held(self, *leases: Lease) -> None:
        self._require_running()
        for lease in leases:
            if lease.released:
                raise LeaseEnded(lease.request_id)
            if self._leases.get(lease.request_id) is not lease:
                raise ForeignLease(lease.request_id)

    # Between the flows

    def _consider(self, node: TreeNode) -> None:
        if self._backup:
            self._backup.consider(node)

    def _used(self, node: TreeNode) -> None:
        if self._persist:
            self._persist.used(node)

    def _save(self, node: TreeNode) -> None:
        assert self._backup is not None
        self._backup.save(node)

    def _on_host(self, nodes: list[TreeNode]) -> None:
        if self._persist:
            self._persist.store([node for node in nodes if node.holds(Tier.HOST)])
