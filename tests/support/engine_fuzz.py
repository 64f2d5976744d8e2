"""Random histories of one engine. Requests share prefixes, split nodes and are aborted at any moment. Copies are late,
fail or never end; the disk fails and stalls; forwards and calls of the engine raise. Rough histories end with Ctrl-C.

Every pass over a prompt compares the rows that it reads with the true values. `check` runs after every step, and every
page follows the rows of page_life.py. At the end the engine has released everything. The seed alone determines a
history without a disk.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from component_case import LATENT, MODELS, PACKABLE, POLICIES, WIDER, compute, config, verify
from disk_case import TroubledStore
from failing_calls import fails_at
from faults import Faults
from hicache import AdvancedConfig, CacheRequest, DiskConfig, Lease, Prefetch, build_engine
from hicache.errors import (
    ExchangePending,
    LeaseEnded,
    NotRunning,
    OutOfSlots,
    ResourceExhausted,
    TransferError,
)
from hicache.flow.page_transfer import settle
from hicache.pages import order
from hicache.storage import open_existing
from memory_store import MemoryPageStore
from page_life import PageLives
from toy_model import flush_error, settled
from waiting import eventually

_LONGEST, _LONGEST_PROMPT = 200, 84
KINDS = {**MODELS, "latent": LATENT}
HINTS = ({"session_end": True}, {"next_turn_within_s": 0.02}, {"next_turn_within_s": 600}, {})


@dataclass
class _Live:
    """A running request. KV of its tokens [0, done) is stored."""

    lease: Lease
    tokens: np.ndarray
    done: int


class EngineFuzz:
    """One engine under one history. With a `folder` the engine has a disk store in it and a remote tier. `packing`:
    bits of packed pages, of which some do not fit."""

    def __init__(
        self, kind: str, seed: int, folder: Path | None = None, device: str = "cpu", packing: str = "off"
    ) -> None:
        self.packing = packing
        self.model = (KINDS if packing == "off" else WIDER)[kind]
        self.kind, self.rng = kind, np.random.default_rng([seed, len(kind)])
        self.stems = [self.rng.integers(0, 4, 64) for _ in range(5)]
        self.stems += [np.concatenate([stem[:32], self.rng.integers(0, 4, 32)]) for stem in self.stems[:3]]
        self.prompts: list[tuple[np.ndarray, str]] = []  # the last prompts of requests, with their namespaces
        self.faults = Faults(self.rng)
        self.live: dict[str, _Live] = {}
        self.ended: list[Lease] = []
        self.waiting: dict[str, tuple[Prefetch, CacheRequest]] = {}
        self.device, self.asked = device, set[str]()
        self.names = (f"r{n}" for n in itertools.count())
        remote = TroubledStore(MemoryPageStore(1 << 20)) if folder else None
        self.faults.stores += [remote] if remote else []
        with self.faults.patched():
            settings, clock = self._settings(folder), self.faults.clock
            self.engine = build_engine(settings, self.model, remote=remote, clock=lambda: clock.now_s)
        self.faults.attach(self.engine, device)
        # On CUDA, examining the pages would wait for the copies, and these tests need late copies.
        self.lives = PageLives(self.engine) if device == "cpu" else None
        if (prefetcher := self.engine.inspect.prefetcher) is not None:
            prefetcher.least_overlap_pages = int(self.rng.choice([1, 4]))
        self.engine.start()

    def run(self, num_steps: int, *, is_rough: bool = False) -> None:
        """Run `num_steps` random steps. If `is_rough`, every second history ends with Ctrl-C."""
        actions = {
            self.admit: 8,
            self.serve: 8,
            self.arrive: 6,
            self.admit_waiting: 6,
            self.expect: 2,
            self.grow: 16,
            self.decode: 3,
            self.finish: 6,
            self.retract: 2,
            self.abort: 2,
            self.commit_late: 1,
            self.faults.move_one: 8,
            self.faults.move_all: 6,
            self.faults.break_link: 1,
            self.faults.trouble_disk: 2,
            self.poll: 5,
            self.flush: 2,
            self.forget: 4,
            self.reload: 8,
            self.read_beside: 3,
            self.measure: 1,
            self.raise_inside: 2,
            self.raise_in_forward: 1,
        }
        choices = [action for action, weight in actions.items() for _ in range(weight)]
        try:
            for _ in range(num_steps):
                choices[self.rng.integers(len(choices))]()
                self.engine.check()
            if is_rough and self.rng.random() < 0.5:
                self.interrupt()
            else:
                self.settle()
        finally:
            self.faults.heal()
            self.engine.close()

    # Requests

    def admit(self) -> None:
        self._acquire(self._request())

    def serve(self) -> None:
        """Admit a request, compute it as far as there are slots, and end it."""
        before = {*self.live}
        self.admit()
        for name in {*self.live} - before:
            while name in self.live and (at := self.live[name]).done < len(at.tokens):
                end = self.engine.next_stop(at.lease, at.done, min(len(at.tokens), at.done + 24))
                if not self._has_slots(at, end) or not self._compute(name, end):
                    break
            if name in self.live:
                self._end(name)

    def arrive(self) -> None:
        """Queue a new request: the request calls `expect` for its prefix and prefetches it from the disk."""
        request, mode = self._request(), str(self.rng.choice(["auto", "best_effort", "wait_complete", "timeout"]))
        overlaps = bool(self.rng.integers(2))
        handle = self.engine.prefetch(request.request_id, request.tokens, request.namespace, mode, overlaps=overlaps)  # type: ignore
        self.engine.expect(request.request_id, request.tokens, request.namespace)
        self.waiting[request.request_id] = (handle, request)

    def expect(self) -> None:
        """Let a waiting request look up its prefix again."""
        name = self._any(self.waiting)
        if name is not None:
            request = self.waiting[name][1]
            self.engine.expect(name, request.tokens, request.namespace)

    def admit_waiting(self) -> None:
        name = self._any(self.waiting)
        if name is None:
            return
        handle, request = self.waiting[name]
        if self.rng.random() < 0.2:
            del self.waiting[name]
            self.engine.cancel(name)
        elif handle.ready:
            del self.waiting[name]
            self._acquire(request)

    def grow(self) -> None:
        """Compute the next chunk of a prompt."""
        name = self._any(self.live)
        if name is None:
            return
        at = self.live[name]
        hit = self.engine.join(at.lease, at.done)
        assert not hit.tokens or at.lease.cached_len == at.done + hit.tokens
        at.done += hit.tokens
        end = min(len(at.tokens), at.done + int(self.rng.integers(1, 25)))
        end = self.engine.next_stop(at.lease, at.done, end)
        if end > at.done and self._has_slots(at, end):
            self._compute(name, end)

    def decode(self) -> None:
        name = self._any({name: at for name, at in self.live.items() if at.done == len(at.tokens) < _LONGEST})
        if name is None:
            return
        at = self.live[name]
        for _ in range(int(self.rng.integers(1, 20))):
            if not self._has_slots(at, at.done + 1):
                return
            at.tokens = np.append(at.tokens, self.rng.integers(0, 3))
            if not self._compute(name, at.done + 1, commit=False):
                return
            self.engine.track([at.lease])

    def finish(self) -> None:
        name = self._any(self.live)
        if name is None:
            return
        at = self.live[name]
        try:
            self._wait_for_loads(at.lease)
            verify(self.engine, at.lease, at.tokens, at.done, self.model)
            self.engine.commit(at.lease, at.tokens[: at.done])
        except TransferError:
            assert self.faults.broken
        self._end(name)

    def retract(self) -> None:
        """Retract a request to free its slots, after the copy of its committed pages to the host has begun."""
        name = self._any(self.live)
        if name is not None:
            self.engine.backup(self.live[name].lease)
            self._end(name)

    def abort(self) -> None:
        name = self._any(self.live)
        if name is not None:
            self._end(name, cancel=True)

    def commit_late(self) -> None:
        """Let the forward of an aborted request end after the abort."""
        if not self.ended:
            return
        lease = self.ended[self.rng.integers(len(self.ended))]
        for call in (
            lambda: self.engine.commit(lease, lease.tokens.tokens),
            lambda: self.engine.extend(lease, 1),
            lambda: self.engine.begin_forward([lease]),
            lambda: self.engine.track([lease]),
        ):
            with pytest.raises(LeaseEnded):
                call()
        self.engine.release(lease)

    def measure(self) -> None:
        """Report a prefill that makes computing faster, or slower, than every copy and read from now on."""
        self.engine.observe_prefill(10**7, float(self.rng.choice([1e-9, 1e6, 1e6])))

    # The engine

    def poll(self) -> None:
        self.faults.clock.now_s += 0.02
        self.engine.poll()

    def flush(self) -> None:
        self.faults.heal_disk()
        flush_error(self.engine)

    def forget(self) -> None:
        """Reset tiers, mostly the device, so that later requests load their prefixes. Before most resets, requests end
        and copies land."""
        if self.rng.random() < 0.8:
            for name in list(self.live):
                self._end(name)
            self.faults.heal()
            flush_error(self.engine)
        tiers = (["device"], ["device"], ["host"], ["device", "host"], ["device", "host"])[self.rng.integers(5)]
        self.engine.reset(tiers)  # type: ignore[arg-type]

    def reload(self) -> None:
        """Admit requests one after the other for pages that only the host has: pages of all components, or of
        components whose slots and states were evicted while full pages stayed. Some loads continue the load of a
        shorter prefix. The copies of loads may fail, and requests may be aborted."""
        self.serve()
        served, namespace = self.prompts[-1]
        for name in list(self.live)[int(self.rng.integers(2)) :]:
            self.engine.backup(self.live[name].lease)
            self._end(name)
        self.faults.move_all()
        self.poll()
        if self.rng.random() < 0.4:
            self.engine.reset(["device"])
        else:
            before = {*self.live}
            for _ in range(5):
                self._acquire(CacheRequest(next(self.names), self.rng.integers(4, 8, 12)))
            for name in [name for name in self.live if name not in before]:
                self._end(name)
        for end in np.sort(self.rng.integers(1, len(served) + 1, int(self.rng.integers(1, 6)))):
            is_prefix = self.rng.random() < 0.5
            self._acquire(self._request_for(served[:end], namespace) if is_prefix else self._request(known=1.0))
            if self.rng.random() < 0.3:
                self.faults.fail_load()
            if self.rng.random() < 0.2:
                self.abort()

    def read_beside(self) -> None:
        """Admit a request for pages that only stores have, and compute it while they are read, concurrently with other
        requests."""
        if not self.faults.stores:
            return
        for name in list(self.live):
            self._end(name)
        for name in list(self.waiting):
            del self.waiting[name]
            self.engine.cancel(name)
        self.faults.move_all()
        self.flush()
        self.engine.reset(["device", "host"])
        request = self._request(known=1.0)
        handle = self.engine.prefetch(request.request_id, request.tokens, request.namespace, "auto", overlaps=True)
        self.waiting[request.request_id] = (handle, request)
        for _ in range(int(self.rng.integers(2, 12))):
            self.poll()
            self.grow() if self.live else self.admit_waiting()
            time.sleep(0.0002)  # let the threads of the stores run

    # Unexpected errors

    def raise_inside(self) -> None:
        """Raise an error at a random call inside a call of the engine."""
        calls = (
            self.admit,
            self.arrive,
            self.admit_waiting,
            self.expect,
            self.grow,
            self.decode,
            self.finish,
            self.abort,
        )
        call, number = calls[self.rng.integers(len(calls))], int(self.rng.integers(150))
        if fails_at(call, number, anywhere=False):
            self.engine.check()
            self.live = {name: at for name, at in self.live.items() if not at.lease.released}
            for name in self.asked - {*self.live, *self.waiting}:  # the request of the failed call may have any state
                self.engine.cancel(name)

    def raise_in_forward(self) -> None:
        """Let a pass store some of its tokens and raise. No request uses these tokens, and the request starts again."""
        name = self._any({name: at for name, at in self.live.items() if at.done < at.lease.length})
        if name is not None:
            at = self.live[name]
            noise = np.full(at.lease.length, 999)
            noise[: at.done] = at.tokens[: at.done]
            try:
                self._wait_for_loads(at.lease)
                compute(self.engine, at.lease, noise, at.done, at.lease.length, self.model)
            except TransferError:
                assert self.faults.broken
            self._end(name, cancel=bool(self.rng.integers(2)))

    def interrupt(self) -> None:
        """Raise Ctrl-C anywhere in a call. Afterwards either the engine refuses further calls, or every account holds
        and requests read the true rows. The engine closes, and its store is intact."""
        self.heal()
        if self.lives is not None:
            self.lives.end()
        calls = (self.admit, self.grow, self.decode, self.finish, self.abort, self.poll, self.flush)
        call, number = calls[self.rng.integers(len(calls))], int(self.rng.integers(600))
        if fails_at(call, number, anywhere=True, error=KeyboardInterrupt):
            self.engine._settle = lambda: settle(self.engine._page_transfers, 0.5)  # type: ignore[method-assign]
        try:
            self.engine.poll()
        except NotRunning:
            return
        self.engine.check()
        for at in self.live.values():
            if not at.lease.released:
                self._wait_for_loads(at.lease)
                verify(self.engine, at.lease, at.tokens, at.done, self.model)

    def _is_flushed(self) -> bool:
        """Flush; whether no error was left. A writer that was stalled may return a little after `heal` releases it."""
        error = flush_error(self.engine)
        self.faults.clock.now_s += 3600
        self.engine.poll()
        return error is None

    def heal(self) -> None:
        """Stop all faults, and release requests whose loads have failed."""
        self.faults.heal()
        flush_error(self.engine)
        for name in [name for name, at in self.live.items() if self.engine.load_failed(at.lease)]:
            self._end(name, cancel=True)

    def settle(self) -> None:
        """End all requests and heal all faults. Afterwards no request or prefetch holds anything."""
        self.faults.heal()
        for name in list(self.live):
            self._end(name, cancel=True)
        for name in self.waiting:
            self.engine.cancel(name)
        eventually(self._is_flushed, self.engine.stats)
        settled(self.engine)
        stats = self.engine.stats()
        assert stats["admit.expected_requests"] == stats["evict.kept_tokens"] == 0
        if self.kind != "window":  # with windows, the free tokens are the smaller number of full and window slots
            assert stats["device.free_tokens"] + stats["device.evictable_tokens"] == 128

    # Inside

    def _settings(self, folder: Path | None) -> object:
        rng = self.rng
        disk = DiskConfig(path=str(folder / "store"), budget_bytes=1 << 20) if folder else None
        return config(
            disk=disk,
            advanced=AdvancedConfig(transfer_chunk_tokens=16, disk_reader_threads=2),
            device=self.device,
            kv_packing=self.packing,
            write_policy=str(rng.choice(POLICIES)),
            prefetch_host_share=float(rng.choice([0.1, 0.5, 1.0])),
            page_size=int(rng.choice([1, 2, 4, 8])),
            host_bytes=int(rng.choice([14, 24, 40])) * 8 * (256 if self.packing == "off" else 224),
            host_states=int(rng.choice([2, 6])),
            mamba_size=int(rng.choice([8, 14])),
            window_tokens=int(rng.choice([56, 96])),
            eviction_policy=str(rng.choice(["auto", "lru", "lfu", "fifo", "slru", "priority"])),
            **({} if self.packing == "off" else PACKABLE),
        )

    def _request(self, known: float = 0.7) -> CacheRequest:
        """A request whose prompt begins as other prompts do; most prompts continue an earlier prompt."""
        rng = self.rng
        stem, space = self.stems[rng.integers(len(self.stems))][: rng.integers(1, 65)], str(rng.choice(["", "tenant"]))
        if self.prompts and rng.random() < known:
            stem, space = self.prompts[rng.integers(len(self.prompts))]
        tokens = np.concatenate([stem, rng.integers(0, 3, rng.integers(0, 20))])[:_LONGEST_PROMPT]
        self.prompts = [*self.prompts[-5:], (tokens, space)]
        return self._request_for(tokens, space)

    def _request_for(self, tokens: np.ndarray, namespace: str) -> CacheRequest:
        name, reserve, priority = next(self.names), int(self.rng.choice([8, 16, 24])), int(self.rng.integers(0, 3))
        self.asked.add(name)
        hints = HINTS[min(int(self.rng.integers(6)), 3)]
        return CacheRequest(name, tokens, namespace, reserve, priority=priority, **hints)  # type: ignore[arg-type]

    def _acquire(self, request: CacheRequest) -> None:
        """Admit the request. In exclusive mode some requests may not wait for the exchange of pages; these requests are
        admitted later, or cancelled."""
        self.asked.add(request.request_id)
        if self.engine.inspect.context.exclusive is not None:
            request = replace(request, may_wait=bool(self.rng.random() < 0.4))
        try:
            lease = self.engine.acquire(request)
        except ExchangePending:
            handle = Prefetch(request.request_id, "best_effort")
            handle.ended = True
            self.waiting[request.request_id] = handle, request
            return
        except ResourceExhausted:
            self.engine.cancel(request.request_id)
            return
        assert all(load.error is None for load in lease.loads)
        self.live[request.request_id] = _Live(lease, np.asarray(request.tokens), lease.cached_len)

    def _has_slots(self, at: _Live, end: int) -> bool:
        try:
            if end > at.lease.length:
                self.engine.extend(at.lease, end - at.lease.length)
        except OutOfSlots:
            return False
        return True

    def _compute(self, name: str, end: int, *, commit: bool = True) -> bool:
        """Run a pass over [done, end). False if the prefix failed to load, or if the request was cancelled before its
        commit."""
        at = self.live[name]
        try:
            self._wait_for_loads(at.lease)
            compute(self.engine, at.lease, at.tokens, at.done, end, self.model)
            at.done = end
            if self.rng.random() < 0.1:
                self._end(name, cancel=True)  # cancelled between the forward and its commit
                return False
            if commit:
                self.engine.commit(at.lease, at.tokens[:end])
        except TransferError:
            assert self.faults.broken
            self._end(name)
            return False
        return True

    def _wait_for_loads(self, lease: Lease) -> None:
        """Wait for exactly the loads that a forward of the lease waits for. Other loads stay in flight."""
        for load in lease.loads if self.device == "cpu" else ():
            load.wait()

    def _end(self, name: str, *, cancel: bool = False) -> None:
        lease = self.live.pop(name).lease
        if cancel:
            self.engine.cancel(name)
        else:
            self.engine.release(lease)
        self.ended = [*self.ended[-5:], lease]

    def _any(self, names: dict[str, object]) -> str | None:
        return list(names)[self.rng.integers(len(names))] if names else None


def run(
    kind: str, seed: int, num_steps: int, device: str = "cpu", *, is_rough: bool = False, packing: str = "off"
) -> Counter[tuple[str, str, str]]:
    """Run one history. Odd seeds have a disk; in half of the histories tiers choose victims in batches, as large tiers
    do. Returns how often pages took each row of page_life.py."""
    batches = {"_SMALL": 0, "_LEAST_BATCH": 4} if seed % 4 > 1 else {"_SMALL": order._SMALL}
    with tempfile.TemporaryDirectory() as folder, patch.multiple(order, **batches):
        fuzz = EngineFuzz(kind, seed, Path(folder) if seed % 2 else None, device, packing)
        fuzz.run(num_steps, is_rough=is_rough)
        if seed % 2:
            eventually(lambda: all(tier.close() for tier in fuzz.engine.inspect.context.stores.values()))
            for path in Path(folder).iterdir():
                store = open_existing(path)
                store.check()
                store.close()
    return Counter() if fuzz.lives is None else fuzz.lives.seen
