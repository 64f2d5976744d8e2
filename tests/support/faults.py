"""Random faults in every tier of one engine: copies are late or fail, and stores fail, stall and lose pages. The stores
use a clock that the test sets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import numpy as np

import hicache.build.store_tiers
import hicache.storage.process.stores
from disk_case import Clock, Gate, TroubledStore, failing
from hicache import CacheEngine
from hicache.storage import open_store
from stepped_transfer import SleepingTransfers, SteppedTransfers


class Faults:
    """Faults of one engine. Build the engine inside `patched()`, call `attach` with it, then start it. `broken`: a copy
    may have failed so far."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.clock = rng, Clock()
        self.stores, self.gates = list[TroubledStore](), list[Gate]()
        self.broken = False

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Within this context an engine opens a `TroubledStore`, and all its stores use the clock of these faults."""

        def store(url: str, **settings: object) -> TroubledStore:
            self.stores.append(TroubledStore(open_store(url, **settings)))  # type: ignore[arg-type]
            return self.stores[-1]

        tiers = hicache.build.store_tiers
        patches = (
            mock.patch.object(hicache.storage.process.stores, "open_store", store),
            mock.patch.object(tiers, "open_tier", functools.partial(tiers.open_tier, clock=self.clock)),
            mock.patch.object(tiers, "open_given", functools.partial(tiers.open_given, clock=self.clock)),
        )
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield

    def attach(self, engine: CacheEngine, device: str = "cpu") -> None:
        self.transfers = SteppedTransfers(engine) if device == "cpu" else SleepingTransfers(engine)

    def move_one(self) -> None:
        links = self.transfers.links
        if links:
            links[self.rng.integers(len(links))].step()

    def move_all(self) -> None:
        self.transfers.finish()

    def break_link(self, down: bool = True) -> None:
        """Make copies of one direction and component fail from now on, or end their failure. `down`: copies to the host
        may fail too."""
        links = [*self.transfers.up, *(self.transfers.down if down else ())]
        if not links:
            return
        link = links[self.rng.integers(len(links))]
        link.fails = None if link.fails or self.rng.random() < 0.3 else RuntimeError("the link is down")
        self.broken = self.broken or link.fails is not None

    def fail_load(self) -> None:
        """Make the next copy to the device fail, of a component that has copies in flight. Later copies succeed."""
        links = [link for link in self.transfers.up if len(link)]
        if links:
            link = links[self.rng.integers(len(links))]
            fails, link.fails = link.fails, RuntimeError("the link is down")
            link.step()
            link.fails, self.broken = fails, True

    def trouble_disk(self) -> None:
        if not self.stores:
            return
        store, draw = self.stores[self.rng.integers(len(self.stores))], self.rng.integers(5)
        if draw == 0:
            gate = Gate(*self.rng.choice(["get_into", "put", "contains"], 2, replace=False))
            self.gates.append(gate)
            store.trouble = gate
        elif draw == 1:
            store.trouble = failing(OSError(5, "I/O error"), str(self.rng.choice(["get_into", "put", "contains"])))
        elif draw == 2:
            self.clock.now_s += 11  # longer than the I/O timeout
        elif draw == 3:
            store.loses = lambda key, buffer: key[0] % 4 == 0
        else:
            self.heal_disk()

    def heal(self) -> None:
        for link in (*self.transfers.up, *self.transfers.down):
            link.fails = None
        self.heal_disk()

    def heal_disk(self) -> None:
        for store in self.stores:
            store.trouble = lambda verb: None
            store.loses = lambda key, buffer: False
        for gate in self.gates:
            gate.open()
        self.gates.clear()
        self.clock.now_s += 3600
