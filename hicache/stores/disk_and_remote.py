"""Combines a disk store and a remote store for look-ups and reads, for servers that support one tier below memory.

    look-up    both stores are asked concurrently; the remote store has to answer by a deadline
    read       the disk is read if it has the page, else the remote store; the disk then stores the page too

Each store has its own threads, breaker and measured rate. A page that is removed between look-up and read is a miss.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from hicache.metrics import Metrics
from hicache.storage.base import PageBuffer
from hicache.storage.process.client import wait_for_clients
from hicache.storage.process.jobs import FIND, FindDone, FindJob, QuestionDone, ReadDone, ReadJob, Stalled
from hicache.stores.tier import StoreTier
from hicache.tiers import DISK, REMOTE, Store

T = TypeVar("T")
_MAX_KNOWN_KEYS = 1 << 16
_FAILED_S = 10.0  # time for which the remote store is not asked again for a page after a failed read
# The remote store may take a quarter of the time of computing, less the time until the caller polls.
_ANSWER_SHARE, _MAX_ANSWER_S = 0.24, 1.0


def answer_limit_s(compute_s: float) -> float:
    """Return the seconds that the remote store may take to answer a look-up, for a prompt that takes `compute_s` to
    compute. If `compute_s` is infinite, because computing is never worthwhile, the time is unlimited."""
    return min(_ANSWER_SHARE * compute_s, _MAX_ANSWER_S) if compute_s < math.inf else math.inf


class Answer(NamedTuple):
    """The answer to a look-up or a read. `store`: the store that answered a read; without meaning for a look-up."""

    store: Store
    done: QuestionDone | Stalled


@dataclass(slots=True)
class _LookUp:
    """A look-up in progress. `asked`: for each store that has not answered yet, the keys in the question. `until_s`:
    the deadline of the remote store. `held`: for each store that has answered, the keys whose pages it has."""

    keys: tuple[bytes, ...]
    until_s: float
    asked: dict[Store, tuple[bytes, ...]] = field(default_factory=dict)
    held: dict[Store, set[bytes]] = field(default_factory=dict)

    def is_over(self, now_s: float) -> bool:
        """Return whether the look-up is complete. A look-up is complete if all stores have answered. If only the remote
        store has not answered, the look-up is complete if the disk has all keys or the deadline has passed."""
        return not self.asked or ([*self.asked] == [REMOTE] and (now_s >= self.until_s or not self.needs_remote))

    @property
    def needs_remote(self) -> bool:
        """Return whether the disk lacks a page of the look-up."""
        return len(self.held.get(DISK, ())) < len({*self.keys})


class Stores:
    """The disk, the remote store, or both. `tiers`: the client of each store, the disk first. One thread owns this
    object.

    `tier`: the client of the store to which pages are written. Pages are written to the disk if there is a disk,
    because the process of the disk store copies pages to the remote store.
    """

    def __init__(self, tiers: Mapping[Store, StoreTier]) -> None:
        self.tiers = tiers
        self._first = next(iter(tiers))
        self.tier = tiers[self._first]
        self.clock = self.tier.clock
        self._look_ups: dict[int, _LookUp] = {}
        # `_remote_keys`: keys that, by the last look-up, only the remote store has. `_failed`: keys whose read from the
        # remote store failed, each with the time from which the remote store may be asked again.
        self._remote_keys = OrderedDict[bytes, None]()
        self._failed = OrderedDict[bytes, float]()
        self._reading: dict[tuple[int, int], tuple[bytes, ...]] = {}  # keys of running reads of the remote store
        self._num_late = 0

    @property
    def num_readers(self) -> int:
        """The largest number of reading threads that one of the stores has."""
        return max(tier.num_readers for tier in self.tiers.values())

    def register(self, metrics: Metrics) -> None:
        """Register the metrics of the stores and the look-ups."""
        for tier in self.tiers.values():
            tier.register(metrics)
        if REMOTE in self.tiers:
            register_reads(metrics, lambda: self._num_late)

    def share(self, descriptor: int, memory: PageBuffer) -> None:
        """Share memory with the processes of the stores. See `StoreClient.share`."""
        for tier in self.tiers.values():
            tier.share(descriptor, memory)

    def used(self, keys: Sequence[bytes]) -> None:
        """Report that a request used these pages; any tier may have served them. `keys` are in the order of the
        prompt."""
        for tier in self.tiers.values():
            tier.used(keys)

    def close(self) -> bool:
        """Close the remote store, then the disk store, even if the remote store cannot be closed. See
        `StoreTier.close`."""
        closed = list[bool]()
        with contextlib.ExitStack() as ending:  # closes in reverse order
            for tier in self.tiers.values():
                ending.callback(lambda tier: closed.append(tier.close()), tier)
        return all(closed)

    def refuses(self) -> bool:
        """Return whether every store would refuse a look-up now."""
        return all(tier.reads.refuses() for tier in self.tiers.values())

    def find(self, job: FindJob, answer_s: float) -> bool:
        """Ask each store which pages of `job.others` it has. The remote store has `answer_s` seconds to answer. Returns
        False if no store can be asked. Otherwise a later `poll` returns one FindDone for the job."""
        look_up = _LookUp(job.others, self.clock() + answer_s)
        for store, tier in self.tiers.items():
            keys = self._not_failed(job.others) if store is REMOTE else job.others
            asked = FindJob(job.ticket, (), job.queue_class, keys)
            if keys and not tier.reads.refuses() and tier.reads.submit(asked):
                look_up.asked[store] = keys
        if look_up.asked:
            self._look_ups[job.ticket] = look_up
        return bool(look_up.asked)

    def store_of(self, key: bytes) -> Store:
        """Return the store from which a page is read, according to the last look-up of its key."""
        return REMOTE if key in self._remote_keys and REMOTE in self.tiers else self._first

    def end_of_part(self, keys: Sequence[bytes], start: int, max_keys: int) -> int:
        """Return the index after the last key of the next read job. The job begins at `start`, has at most `max_keys`
        keys, and reads from one store."""
        store, end = self.store_of(keys[start]), start + 1
        while end < min(len(keys), start + max_keys) and self.store_of(keys[end]) is store:
            end += 1
        return end

    def read(self, job: ReadJob) -> bool:
        """Submit a read. All keys must belong to one part, as `end_of_part` returns it. See `ClientQueue.submit`."""
        store = self.store_of(job.keys[0])
        is_submitted = self.tiers[store].reads.submit(job)
        if is_submitted and store is REMOTE:
            self._reading[job.ticket, job.batch] = job.keys
        return is_submitted

    def notify_cancelled(self) -> None:
        """See `ClientQueue.notify_cancelled`."""
        for tier in self.tiers.values():
            tier.reads.notify_cancelled()

    def poll(self) -> list[Answer]:
        """Return the answers that arrived since the last call. Never blocks. If a look-up stalls in one store, the
        answer of the other store is used."""
        answers = list[Answer]()
        for store, tier in self.tiers.items():
            for done in tier.reads.poll():
                if isinstance(done, FindDone) or (isinstance(done, Stalled) and done.batch <= FIND):
                    self._found(store, done)
                else:
                    self._note_read(store, done)
                    answers.append(Answer(store, done))
        return answers + [Answer(self._first, done) for done in self._take_look_ups()]

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until `poll` can receive an answer, or a look-up reaches its deadline. Another thread
        may submit jobs during this call."""
        now_s = self.clock()
        until_s = min((look_up.until_s for look_up in list(self._look_ups.values())), default=math.inf)
        seconds = max(0.0, min(seconds, until_s - now_s)) if until_s > now_s else seconds
        if len(self.tiers) == 1:
            self.tier.wait(seconds)
        else:
            wait_for_clients([*self.tiers.values()], seconds)

    def _found(self, store: Store, done: FindDone | Stalled) -> None:
        look_up = self._look_ups.get(done.ticket)
        if look_up is None or (keys := look_up.asked.pop(store, None)) is None:
            return  # the answer is late
        if isinstance(done, FindDone) and done.answered and done.others:
            look_up.held[store] = {key for key, is_held in zip(keys, done.others, strict=True) if is_held}

    def _take_look_ups(self) -> Iterable[FindDone]:
        """Remove the look-ups that need no further answer, and yield the result of each."""
        now_s = self.clock()
        ended = {ticket: look_up for ticket, look_up in self._look_ups.items() if look_up.is_over(now_s)}
        for ticket, look_up in ended.items():
            del self._look_ups[ticket]
            self._num_late += bool(look_up.asked) and look_up.needs_remote
            on_disk, on_remote = look_up.held.get(DISK, set()), look_up.held.get(REMOTE, set())
            for key in look_up.keys:
                if key in on_disk:
                    self._remote_keys.pop(key, None)
                elif key in on_remote:
                    _remember(self._remote_keys, key, None)
            held = tuple(key in on_disk or key in on_remote for key in look_up.keys)
            yield FindDone(ticket, 0, answered=bool(look_up.held), others=held)

    def _not_failed(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the keys that the remote store may be asked for: all except keys whose last read failed recently."""
        now_s = self.clock()
        while self._failed and next(iter(self._failed.values())) <= now_s:
            self._failed.popitem(last=False)
        return tuple(key for key in keys if key not in self._failed) if self._failed else keys

    def _note_read(self, store: Store, done: QuestionDone | Stalled) -> None:
        if store is not REMOTE or not isinstance(done, ReadDone):
            return
        keys = self._reading.pop((done.ticket, done.batch), ())
        for key, ok in zip(keys[: done.asked], done.ok, strict=False):
            if not ok:
                _remember(self._failed, key, self.clock() + _FAILED_S)


def register_reads(metrics: Metrics, num_late: Callable[[], float]) -> None:
    """Register the metrics of look-ups in `Stores`."""
    help = "look-ups that ended without the answer of the remote store, because the answer came too late"
    metrics.read_from({"remote.find_failures": ("counter", help)}, lambda: {"remote.find_failures": num_late()})


def _remember(known: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    """Add a key as the newest key. If there are more than `_MAX_KNOWN_KEYS`, remove the oldest key."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MAX_KNOWN_KEYS:
        known.popitem(last=False)
