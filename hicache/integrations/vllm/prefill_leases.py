"""Leases of prefills in the remote store: one node computes a long prompt, and other nodes wait for the chunks of this
prompt.

    looked up: missing | this node gets the lease   | computed by this node
                       | another node has the lease | asked again until stored, or the lease ends | looked up again

A prompt has a lease for each chunk at a multiple of `STEP_TOKENS` tokens and for its last chunk, so prompts with a
common prefix have common leases. A lease ends at a recorded time, so no node waits longer for a node that has failed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from hicache.flow.cost import CostModel
from hicache.metrics import Counter
from hicache.storage.process.jobs import FindDone, FindJob, LeaseDone, LeaseJob
from hicache.stores.disk_and_remote import Stores, answer_limit_s
from hicache.tiers import REMOTE

STEP_TOKENS = 16_384
FIRST_TICKET = 1 << 40  # `Lookups` uses lower tickets
_LEASE_SHARE, _WAIT_SHARE = 1.5, 2.0  # length of a lease and longest wait, as multiples of the computing time
_MAX_LEASE_S = 120.0
_MAX_WAITS = 2  # maximum waits of one request
_ASK_S = 0.25  # time between two look-ups of chunks that another node computes


class Stage(Enum):
    """The stage of a long prompt."""

    ASKING = auto()  # The remote store has not reported who has the leases.
    WAITING = auto()  # Another node computes the prompt.
    ENDED = auto()  # This node loads the stored chunks, and computes the others.


@dataclass(slots=True)
class _Prefill:
    """A long prompt. `awaited`: for each chunk whose lease another node has, its key and the end of the lease in
    seconds since 1970. `until_s`: the end of the stage, on the clock of the stores. `max_wait_s`: the longest wait that
    is worthwhile."""

    stage: Stage
    until_s: float
    max_wait_s: float
    awaited: dict[bytes, float] = field(default_factory=dict)
    num_asked: int = 0
    asks_at_s: float = math.inf
    num_waits: int = 0

    @property
    def may_wait_again(self) -> bool:
        """Return whether another node has not stored its chunks in time, so that this node may request the leases
        again."""
        return self.stage is Stage.ENDED and bool(self.awaited) and self.num_waits < _MAX_WAITS


class PrefillLeases:
    """The leases of this node's long prompts. The tier owns this object; all calls hold vLLM's lock. `num_delayed`:
    returns the number of other requests that computing a request would delay. `waited`: counter of waits for another
    node. `wall_s`: returns seconds since 1970; the clocks of all nodes must agree."""

    def __init__(
        self,
        stores: Stores,
        cost: CostModel,
        num_delayed: Callable[[str], int],
        waited: Counter,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._stores = stores
        self._cost = cost
        self._num_delayed = num_delayed
        self.waited = waited
        self._wall_s = wall_s
        self._prefills: dict[str, _Prefill] = {}
        self._asked: dict[int, tuple[str, bytes]] = {}  # request and key of each lease job, by ticket
        self._found: dict[int, tuple[str, tuple[bytes, ...]]] = {}  # request and keys of each look-up, by ticket
        self._tickets = itertools.count(FIRST_TICKET)

    def is_waiting(self, request: str) -> bool:
        """Return whether the request waits for another node, or for the remote store's answer about the leases."""
        prefill = self._prefills.get(request)
        if prefill is None or prefill.stage is Stage.ENDED:
            return False
        if self._stores.clock() >= prefill.until_s:
            prefill.stage = Stage.ENDED
        elif prefill.stage is Stage.WAITING and self._stores.clock() >= prefill.asks_at_s:
            self._look_up(request, prefill)
        return prefill.stage is not Stage.ENDED

    def begin(self, request: str, steps: Sequence[tuple[int, bytes]], start: int, end: int) -> bool:
        """Request the leases of a prompt, because the stores lack its tokens [start, end). `steps`: end and key of each
        missing chunk that has a lease. Returns whether the request waits now. Does nothing if the leases of the request
        were already answered, or if the time of computing is unknown."""
        compute_s = self._cost.prefill_s(start, end)
        remote = self._stores.tiers.get(REMOTE)
        is_known = compute_s is not None and compute_s < math.inf
        before = self._prefills.get(request)
        is_first = before is None or before.may_wait_again
        if not is_first or remote is None or not is_known or end - start <= STEP_TOKENS or not steps:
            return False
        assert compute_s is not None
        max_wait_s = min(_WAIT_SHARE * compute_s * (1 + self._num_delayed(request)), _MAX_LEASE_S)
        prefill = _Prefill(Stage.ASKING, self._stores.clock() + answer_limit_s(compute_s), max_wait_s)
        prefill.num_waits = 0 if before is None else before.num_waits
        self._prefills[request] = prefill
        for step_end, key in steps:
            lease_s = min(_LEASE_SHARE * (self._cost.prefill_s(start, step_end) or compute_s), _MAX_LEASE_S)
            ticket = next(self._tickets)
            if not remote.reads.refuses() and remote.reads.submit(LeaseJob(ticket, key, self._wall_s() + lease_s)):
                self._asked[ticket] = request, key
                prefill.num_asked += 1
        if not prefill.num_asked:
            prefill.stage = Stage.ENDED
        return prefill.stage is not Stage.ENDED

    def answered(self, done: LeaseDone) -> None:
        """Record the answer to a lease job. After the last answer, the request waits for leases of other nodes if the
        wait is worthwhile."""
        request, key = self._asked.pop(done.ticket, ("", b""))
        prefill = self._prefills.get(request)
        if prefill is None:
            return
        prefill.num_asked -= 1
        if not done.has_begun and done.until_s > self._wall_s():
            prefill.awaited[key] = done.until_s
        if prefill.num_asked or prefill.stage is not Stage.ASKING:
            return
        wait_s = max(prefill.awaited.values(), default=0.0) - self._wall_s()
        if not 0 < wait_s <= prefill.max_wait_s:
            prefill.stage = Stage.ENDED
            return
        now_s = self._stores.clock()
        prefill.stage, prefill.until_s, prefill.asks_at_s = Stage.WAITING, now_s + wait_s, now_s + _ASK_S
        prefill.num_waits += 1
        self.waited.value += 1

    def found(self, done: FindDone) -> bool:
        """Record the answer to a look-up. Returns False if `Lookups` submitted this look-up. If all awaited chunks are
        stored, the wait ends."""
        if done.ticket not in self._found:
            return False
        request, keys = self._found.pop(done.ticket)
        prefill = self._prefills.get(request)
        if prefill is not None:
            prefill.asks_at_s = self._stores.clock() + _ASK_S
            for key, is_held in zip(keys, done.others, strict=False):
                if is_held:
                    prefill.awaited.pop(key, None)
            if not prefill.awaited:
                prefill.stage = Stage.ENDED
        return True

    def forget(self, request: str) -> None:
        """Forget a finished request."""
        self._prefills.pop(request, None)

    def _look_up(self, request: str, prefill: _Prefill) -> None:
        prefill.asks_at_s = math.inf
        ticket, keys = next(self._tickets), (*prefill.awaited,)
        if self._stores.find(FindJob(ticket, (), others=keys), prefill.until_s - self._stores.clock()):
            self._found[ticket] = request, keys
        else:
            prefill.asks_at_s = self._stores.clock() + _ASK_S
