"""A program that moves pages at random between a small device tier and a small host tier, and knows every byte.

    complete  before every step: wait for a random number of the oldest loads and stores; check their results
    serve     load entries that only the host has; a forward reads each layer when it has arrived, and entries on the
              device, and writes a new entry, whose backup is submitted at once
    load      without a reader          demote     drop an idle entry from one of the tiers
    backup    an entry without a copy   audit      wait for all, compare every row and page of both tiers

Only the seed determines the operations and their order: the number of completed operations is drawn, independent of a
clock, and no other code asks whether a copy has ended. Slots and host pages are reused as soon as the operations that
used them have completed. On CUDA sleeping kernels delay the writes of a forward, and the poison before a load, so that
work that does not wait for them reads too early. A seed gives the same program on both devices.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.transfer import TransferOp
from hicache.transfer.counter import NUM_PRODUCERS
from packed_tier import PackedTier
from transfer_case import NUM_CONTENTS, ON_HOST, POISON, UNKNOWN, HostPages, Ids, Layout, Spot, Tier, Watch

LARGE = 17  # pages of a large entry, more than the smallest staging buffers hold
SIZES = (1, 1, 2, 3, 5, 7, 11, LARGE)
COMPLETES = 0.45  # probability that one more operation of a kind completes before a step


@dataclass(eq=False)
class Entry:
    """Pages that are written, moved and read together. `contents`: their numbers, int64 [n]. `blocks`, `pages`: for
    each tier, the device blocks and the host pages.

    `blocks` is None if the device has no copy, `pages` if the host has none. `writing`: host pages that a store still
    writes.
    """

    contents: Ids
    blocks: list[Ids] | None = None
    pages: list[HostPages] | None = None
    writing: list[HostPages] = field(default_factory=list)
    stores: list[TransferOp] = field(default_factory=list)
    loads: list[TransferOp] = field(default_factory=list)
    load_ids: list[int] = field(default_factory=list)
    was_read: bool = False  # a forward has read the entry without an error since its load

    @property
    def idle(self) -> bool:
        return not self.stores and not self.loads


class Program:
    """One random program. `counts`: how often each event happened. `tolerant`: copies may fail."""

    def __init__(
        self, layout: Layout, device: str, seed: int, *, staging_bytes: int = 1 << 16, tolerant: bool = False
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.tiers = [
            PackedTier(space, layout.host_page, staging_bytes, layout.build("cpu")[0])
            if layout.is_packed
            else Tier(space, 1 if space.name == "mamba" else layout.host_page, staging_bytes)
            for space in layout.build(device)
        ]
        # (layer id, tier, dense layer) in the order in which a forward passes them
        self.order = sorted(
            (i, t, n) for t, tier in enumerate(self.tiers) for n, i in enumerate(tier.space.layout.layers)
        )
        self.entries: list[Entry] = []
        self.lanes: dict[tuple[int, str], deque[TransferOp]] = {}
        self.flights: dict[str, deque[Entry]] = {"load": deque(), "store": deque()}  # operations in flight
        self.counts: Counter[str] = Counter()
        self.tolerant, self.on_cuda = tolerant, device == "cuda"
        self.watch = Watch(self.on_cuda)
        self.side = torch.cuda.Stream() if self.on_cuda else None
        self._next_content = 0
        for tier in self.tiers:
            tier.backend.start()
        if self.on_cuda:
            torch.cuda.synchronize()

    def run(self, steps: int) -> None:
        """Run `steps` random actions, each after some operations have completed; then an audit."""
        actions: list[tuple[float, Callable[[], None]]] = [
            (0.60, self.serve), (0.14, self.load_one), (0.16, self.demote), (0.07, self.backup_one), (0.03, self.audit),
        ]  # fmt: skip
        for step in range(steps):
            self.complete_some()
            chosen = self.rng.choice(len(actions), p=[weight for weight, _ in actions])
            try:
                actions[chosen][1]()
            except AssertionError as error:
                raise AssertionError(f"step {step}, after {dict(self.counts)}: {error}") from error
        self.audit()

    def close(self) -> None:
        """Finish all submitted operations, as the backends promise; then free the memory."""
        for tier in self.tiers:
            tier.backend.close()
        for tier in self.tiers:
            tier.host.close()

    # Actions

    def serve(self) -> None:
        requested = self._some(self._entries(resident=False, on_host=True), 3)
        read = [entry for entry in requested if self.load(entry, requested)]
        read += self._some([entry for entry in self._entries(resident=True) if entry not in read], 2)
        new = self._new_entry(read) if self.rng.random() < 0.8 else None
        self.rng.shuffle(read)  # type: ignore[arg-type]
        if self.forward(read, new) and new is not None:
            self.entries.append(new)
            if self.rng.random() < 0.9:
                self.backup(new, read)

    def load_one(self) -> None:
        for entry in self._some(self._entries(resident=False, on_host=True), 1):
            self.load(entry, [entry])

    def backup_one(self) -> None:
        for entry in self._some([e for e in self._entries(resident=True, on_host=False) if e.idle], 1):
            self.backup(entry, [])

    def demote(self) -> None:
        for entry in self._some([e for e in self._entries(resident=True, on_host=True) if e.idle], 2):
            if self.rng.random() < 0.8:
                self._leave_device(entry)
            else:
                self._leave_host(entry)

    def audit(self) -> None:
        """Wait for all operations, and compare all rows and pages."""
        for kind, entries in self.flights.items():
            while entries:
                self.complete(kind)
        self.watch.settle()
        if self.on_cuda:
            torch.cuda.synchronize()
        for t, tier in enumerate(self.tiers):
            tier.audit()
            held = sum(tier.num_pool_pages(e.contents) for e in self._entries(on_host=True))
            assert tier.host.available() == ON_HOST - held
            held = sum(len(e.blocks[t]) for e in self.entries if e.blocks is not None)
            assert tier.free.sum() == len(tier.free) - 1 - held
        self.counts["audits"] += 1

    # Transfers

    def load(self, entry: Entry, keep: Sequence[Entry]) -> bool:
        """Submit the load of an entry to poisoned slots. False if a tier has no free slots, or too many loads are in
        flight."""
        if len(self.flights["load"]) == NUM_PRODUCERS:
            self.counts["refused"] += 1
            return False
        assert all(tier.counter.can_begin() for tier in self.tiers), "a load that has completed keeps its producer"
        if not self._available_on_device(len(entry.contents), keep):
            return False
        assert entry.pages is not None
        entry.blocks = [tier.take(len(entry.contents), self.rng) for tier in self.tiers]
        with self._submitting(entry):
            for t, (tier, blocks, at) in enumerate(zip(self.tiers, entry.blocks, entry.pages, strict=True)):
                entry.load_ids.append(tier.counter.begin())
                op = tier.backend.load(at.pages, self._slots(tier, blocks), entry.load_ids[-1], at.rest)
                entry.loads.append(self._submitted(op, t, "load"))
        entry.was_read = False
        self.flights["load"].append(entry)
        return True

    def backup(self, entry: Entry, keep: Sequence[Entry]) -> None:
        """Submit the store of an entry on the stream that may still be writing it, if the host has free pages."""
        if not self._available_on_host(entry.contents, [entry, *keep]):
            return
        assert entry.blocks is not None
        for t, (tier, blocks) in enumerate(zip(self.tiers, entry.blocks, strict=True)):
            allocated = tier.host.alloc(tier.num_pool_pages(entry.contents))
            assert allocated is not None
            pool_pages = torch.tensor(self.rng.permutation(allocated) if self.rng.random() < 0.5 else allocated)
            tier.host.bytes_of[pool_pages] = tier.pages[POISON]
            tier.on_host[pool_pages.numpy()] = UNKNOWN
            at = tier.divide(pool_pages, entry.contents)
            op = tier.store(self._slots(tier, blocks), at)
            entry.stores.append(self._submitted(op, t, "store"))
            entry.writing.append(at)
        self.flights["store"].append(entry)

    def _slots(self, tier: Tier, blocks: Ids) -> torch.Tensor:
        """The slots of blocks: mostly in host memory, else on the device."""
        on_host = self.rng.random() < 0.7
        return tier.slots_on_host(blocks) if on_host else tier.spot(blocks, blocks).slots

    def forward(self, read: Sequence[Entry], new: Entry | None) -> bool:
        """Read entries, some of which may still be loading, and write `new`. False if the forward raised because a load
        had failed."""
        self._slow()
        self.counts["overlaps"] += any(entry.loads for entry in read)
        spots: list[list[Spot]] = []
        for t, tier in enumerate(self.tiers):
            tier.counter.set_consumer({entry.load_ids[t] for entry in read if entry.load_ids} or -1)
            blocks = [(e.blocks[t], e.contents) for e in (*read, *([new] if new else [])) if e.blocks is not None]
            spots.append([tier.spot(*at) for at in blocks])
        at_once = self.rng.random() < 0.2
        try:
            for tier in self.tiers if at_once else ():
                tier.counter.wait_all()
            for layer_id, t, layer in self.order:
                tier = self.tiers[t]
                if not at_once:
                    tier.counter.wait_until(layer)
                for entry, spot in zip(read, spots[t], strict=False):
                    self.watch.note(tier.differs(layer, spot), f"layer {layer_id} of contents {entry.contents}")
                if new:
                    tier.write(layer, spots[t][-1])
        except TransferError as error:
            self._refused(read, new, error)
            return False
        for entry in read:
            entry.was_read = True
        self.counts["forwards"] += 1
        return True

    def complete_some(self) -> None:
        """Complete a random number of the oldest loads, and of the oldest stores."""
        for kind, entries in self.flights.items():
            while entries and self.rng.random() < COMPLETES:
                self.complete(kind)

    def complete(self, kind: str) -> None:
        """Wait for the oldest load or store, and check the bytes that it wrote."""
        entry = self.flights[kind].popleft()
        for (t, other), ops in self.lanes.items():
            done = [op.done() for op in reversed(ops)]  # newest first: if an operation has ended, all older ones have
            assert done == sorted(done), f"{other}s of tier {t} ended out of order"
        for op in entry.loads if kind == "load" else entry.stores:
            if not op.done():
                op.wait()
            assert op.done()
        for t in range(len(self.tiers)):
            self.lanes[t, kind].popleft()
        if kind == "load":
            self._end_load(entry)
        else:
            self._end_store(entry)

    def _end_store(self, entry: Entry) -> None:
        ops, pages = entry.stores, entry.writing
        entry.stores, entry.writing = [], []
        for tier, op, at in zip(self.tiers, ops, pages, strict=True):
            if op.error is None:
                tier.stored(op, at, entry.contents)
                differs = tier.host_differs(at.held, torch.from_numpy(tier.on_host[at.held.numpy()])).any()
                assert not differs, f"a store of contents {entry.contents} to pages {at} left other bytes"
        if self._all_well(ops):
            entry.pages = pages
        else:
            for tier, at in zip(self.tiers, pages, strict=True):
                tier.host.free(at.held)

    def _end_load(self, entry: Entry) -> None:
        ops, entry.loads = entry.loads, []
        assert entry.blocks is not None and entry.pages is not None
        for tier, op, blocks in zip(self.tiers, ops, entry.blocks, strict=True):
            tier.segments(blocks, UNKNOWN if op.error else entry.contents)
        if not self._all_well(ops):
            assert not entry.was_read, "a forward was not told that a load it consumed had failed"
            for tier, load_id in zip(self.tiers, entry.load_ids, strict=True):
                tier.counter.forget(load_id)
            if self.side is not None:  # the poison may still be queued on the side stream
                torch.cuda.current_stream().wait_stream(self.side)
            self._leave_device(entry)

    # Entries and space

    def _entries(self, *, resident: bool | None = None, on_host: bool | None = None) -> list[Entry]:
        return [
            entry
            for entry in self.entries
            if resident in (None, entry.blocks is not None) and on_host in (None, entry.pages is not None)
        ]

    def _some(self, entries: list[Entry], most: int) -> list[Entry]:
        count = min(len(entries), int(self.rng.integers(1, most + 1)))
        return [entries[i] for i in self.rng.permutation(len(entries))[:count]]

    def _new_entry(self, keep: Sequence[Entry]) -> Entry | None:
        count = int(self.rng.choice(SIZES))
        if not self._available_on_device(count, keep):
            return None
        contents = (self._next_content + np.arange(count)) % (NUM_CONTENTS - 1) + 1
        self._next_content += count
        entry = Entry(contents, [tier.take(count, self.rng) for tier in self.tiers])
        for tier, blocks in zip(self.tiers, entry.blocks or [], strict=True):
            tier.segments(blocks, contents)
        return entry

    def _available_on_device(self, num_pages: int, keep: Sequence[Entry]) -> bool:
        """Evict idle entries, except `keep`, until `num_pages` pages are free. Returns whether that succeeded."""
        while any(tier.available() < num_pages for tier in self.tiers):
            victims = [e for e in self._entries(resident=True) if e.idle and e not in keep]
            if not victims:
                return False
            self._leave_device(self._some(victims, 1)[0])
        return True

    def _available_on_host(self, contents: Ids, keep: Sequence[Entry]) -> bool:
        while any(tier.host.available() < tier.num_pool_pages(contents) for tier in self.tiers):
            victims = [e for e in self._entries(on_host=True) if e.idle and e not in keep]
            if not victims:
                return False
            self._leave_host(self._some(victims, 1)[0])
        return True

    def _leave_device(self, entry: Entry) -> None:
        assert entry.blocks is not None and entry.idle
        for tier, blocks in zip(self.tiers, entry.blocks, strict=True):
            tier.free[blocks] = True
        entry.blocks, entry.load_ids = None, []
        self._forget_if_nowhere(entry)

    def _leave_host(self, entry: Entry) -> None:
        assert entry.pages is not None and entry.idle
        for tier, pages in zip(self.tiers, entry.pages, strict=True):
            tier.host.free(pages.held)
        entry.pages = None
        self._forget_if_nowhere(entry)

    def _forget_if_nowhere(self, entry: Entry) -> None:
        if entry.blocks is None and entry.pages is None:
            self.entries.remove(entry)

    def _poison(self, entry: Entry) -> None:
        """Write poison to the slots of a load, after a delay, just before the load."""
        self._slow()
        for tier, blocks in zip(self.tiers, entry.blocks or [], strict=True):
            spot = tier.spot(blocks, np.full(len(entry.contents), POISON))
            for layer in range(len(tier.rows)):
                tier.write(layer, spot)
            tier.segments(blocks, UNKNOWN)

    def _submitted(self, op: TransferOp, tier: int, kind: str) -> TransferOp:
        self.lanes.setdefault((tier, kind), deque()).append(op)
        self.counts[kind] += 1
        self.counts["most at once"] = max(self.counts["most at once"], sum(map(len, self.lanes.values())))
        return op

    def _all_well(self, ops: Sequence[TransferOp]) -> bool:
        errors = [op.error for op in ops if op.error is not None]
        assert self.tolerant or not errors, errors
        self.counts["failed"] += bool(errors)
        return not errors

    def _refused(self, read: Sequence[Entry], new: Entry | None, error: TransferError) -> None:
        """Handle the TransferError of a forward: assert that one of its loads failed, and drop the entry that the
        forward wrote."""
        for entry in read:
            for op in entry.loads:
                op.wait()
        assert any(op.error for entry in read for op in entry.loads), f"no load of it failed: {error}"
        for tier, blocks in zip(self.tiers, (new.blocks or []) if new else (), strict=False):
            tier.segments(blocks, UNKNOWN)
            tier.free[blocks] = True
        self.counts["told"] += 1

    def _slow(self) -> None:
        cycles = int(self.rng.integers(1000, 8_000_000))
        if self.on_cuda:
            torch.cuda._sleep(cycles)

    @contextlib.contextmanager
    def _submitting(self, entry: Entry) -> Iterator[None]:
        """Poison the slots of a load. Within this context the current stream is the one for the load: the stream of the
        forwards, or a stream that waits for it."""
        concurrent = self.rng.random() < 0.5
        if self.side is None or not concurrent:
            self._poison(entry)
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self._poison(entry)
            yield
