"""Decides whether the chunks of a prompt that are on the disk are loaded or computed, by the measured speeds of disk
and server.

    looked up | answered and decided | rows in the CPU tier | read, part by part | scheduled | computed
    <- miss if the answer is late --> <- retry, or a part -> <- abandoned if stalled ->       <- speed is measured ->

A load takes almost none of the GPU's computing time. The gate chooses a load if it takes no longer than the delay that
computing would cause for all requests together: `W + l <= c (1 + n)`. W is the time for the pending loads in `Queue`, l
the time of the load, c the time of computing, and n the result of `LoadGate.num_delayed`. The gate also chooses a load
if the GPU has other work until the load ends: `W + l <= Q + c`. Q is the result of `LoadGate.queued_s`. If loading all
chunks is too slow, the gate may still choose to load the first chunks. A declined chunk is a miss for vLLM, which
computes it. This module imports nothing of vLLM.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hicache.flow.cost import CostModel, LoadEstimate
from hicache.integrations.load_gate import ServerLoadPolicy
from hicache.metrics import Metrics
from hicache.stores.disk_and_remote import answer_limit_s
from hicache.tiers import DISK, REMOTE, Store

# Number of tokens in one measurement. The time of fewer tokens is mostly kernel launches, and says little about long
# prompts. The time of more tokens would average over very different positions in the prompt.
_PASS_TOKENS = 2048
_MAX_STEPS = 4  # vLLM has at most two steps in flight without pipeline parallelism
# Time without progress after which a disk counts as stalled. Even at 0.3 GB/s, a working disk completes one part of a
# load, some chunks of a few MB, within a tenth of this time.
_STALL_S = 1.0
# A lower bound of practical prefill speeds. This bound limits waits for rows if the prefill speed is unknown, or if
# loads are always chosen.
_MIN_TOKENS_PER_S = 1000.0


class PrefillTimer:
    """Measures the prefill speed: tokens of prompts, divided by the time of the steps that computed these tokens. The
    gate owns this object.

    vLLM may schedule a step while it computes the previous step. The time of a step begins when the step is scheduled
    or when the previous step ends, whichever is later:

        scheduled 1 | scheduled 2 |   end 1 | scheduled 3 |   end 2
        <------------- step 1 ------------> <----- step 2 ------->

    Steps that compute no tokens of prompts do not count.
    """

    def __init__(self, cost: CostModel, clock: Callable[[], float]) -> None:
        self._cost = cost
        self._clock = clock
        self._scheduled_s = deque[float](maxlen=_MAX_STEPS)  # times at which the steps that have not ended began
        self._end_s = -math.inf  # end of the last step
        self._tokens = self._positions = self._seconds = 0.0

    def on_scheduled(self) -> None:
        """Record that a step is scheduled. Passes the tokens and times of ended steps to the cost model."""
        if self._tokens >= _PASS_TOKENS and self._seconds > 0:
            self._cost.observe_prefill(int(self._tokens), self._seconds, self._positions / self._tokens)
            self._tokens = self._positions = self._seconds = 0.0
        self._scheduled_s.append(self._clock())

    def on_computed(self, spans: Sequence[tuple[int, int]]) -> None:
        """Record that a step has ended; steps end in the order in which they are scheduled. `spans`: tokens [start,
        end) of each prompt that the step computed."""
        now_s = self._clock()
        last_s, self._end_s = self._end_s, now_s
        if not self._scheduled_s:
            return  # the step was scheduled before the tier existed
        begin_s = max(last_s, self._scheduled_s.popleft())
        for start, end in spans:
            self._tokens += end - start
            self._positions += (end - start) * (start + end) / 2
        if spans:
            self._seconds += now_s - begin_s


@dataclass(slots=True)
class Candidate:
    """A possible load of a prompt. vLLM asked the tier for the tokens from `start` on; the last complete chunk of the
    prompt ends at `end`.

    `loads`: whether to load the chunks that are on the disk, up to token `until`; None until decided. `computed_from`:
    first token that the GPU computes, as far as the gate knows. `step`: the last step in which the gate tried to
    decide. `waits_until_s`: end of the wait for rows of the CPU tier; -inf without a wait. `num_delayed`: number of
    other requests that computing would delay, at the time of the decision. `lacks_rows`: chunks are not loaded because
    the CPU tier has too few free rows.
    """

    looked_up_s: float
    step: int
    start: int
    end: int
    loads: bool | None = None
    until: float = math.inf
    waits_until_s: float = -math.inf
    num_delayed: int = 0
    lacks_rows: bool = False
    computed_from: int = 0

    @property
    def waits_for_rows(self) -> bool:
        return self.loads is None and self.waits_until_s > -math.inf


class Queue(NamedTuple):
    """Pending loads from the disk and from the remote store. `num_bytes`: bytes that loads in flight still have to read
    from the disk. `progress_s`: time at which one of these loads last made progress; None without loads.
    `remote_bytes`, `remote_progress_s`: the same for the remote store. `releases_rows`: jobs are in flight that release
    rows of the CPU tier when they end."""

    num_bytes: int = 0
    progress_s: float | None = None
    releases_rows: bool = False
    remote_bytes: int = 0
    remote_progress_s: float | None = None

    def of(self, store: Store) -> tuple[int, float | None]:
        """Return the pending bytes of a store, and the time at which its loads last made progress."""
        return (self.num_bytes, self.progress_s) if store is DISK else (self.remote_bytes, self.remote_progress_s)


class Rows(NamedTuple):
    """Rows that one request can get in the CPU tier: `num` rows now, and at most `all` rows. `may_grow`: loads, stores
    or requests are in progress that release rows when they end."""

    num: int
    all: int
    may_grow: bool = False

    def are_few(self, num_chunks: int) -> bool:
        """Return whether to wait for more rows for `num_chunks` chunks. If the CPU tier can never have rows for all
        chunks, half of its rows are enough, because other requests use some rows at any time."""
        return self.may_grow and self.num < (num_chunks if num_chunks <= self.all else self.all // 2)


UNKNOWN_ROWS = Rows(1 << 62, 1 << 62)  # no limit


class _Part(NamedTuple):
    """The first `num_chunks` stored chunks of a prompt; `num_remote` of these chunks are in the remote store. If these
    chunks are loaded, tokens [start, end) need no computing."""

    num_chunks: int
    start: int
    end: int
    num_remote: int = 0


def _part_of(spans: Sequence[tuple[int, int]], num_chunks: int, is_remote: Sequence[bool] = ()) -> _Part:
    """Return the part with the first `num_chunks` chunks. `spans`: tokens [start, end) of each chunk, ordered by end.
    If a gap between spans follows the part, the tokens in the gap are in the CPU tier, so the part includes these
    tokens."""
    ends = [spans[num_chunks - 1][1], *(start for start, _ in spans[num_chunks : num_chunks + 1])]
    return _Part(num_chunks, min(start for start, _ in spans), max(ends), sum(is_remote[:num_chunks]))


def _parts_of(spans: Sequence[tuple[int, int]], is_remote: Sequence[bool]) -> list[_Part]:
    """Return the parts that may be best to load: all chunks; the chunks before a gap, because then the tokens in the
    gap need no computing; and the chunks before a change of the store.

    A part with another end saves less time: loading takes the same time for each chunk of a store, but computing takes
    longer for a later chunk.
    """
    gaps = {i for i, ((_, end), (start, _)) in enumerate(pairwise(spans), 1) if start > end}
    changes = {i for i, (before, after) in enumerate(pairwise(is_remote), 1) if before != after}
    return [_part_of(spans, num_chunks, is_remote) for num_chunks in sorted({*gaps, *changes, len(spans)})]


def _saved_s(estimate: LoadEstimate) -> float:
    """Return the seconds that the load saves for all requests together; inf until the times of loading and computing
    are known. While the GPU has other prompts to compute, waiting for the load costs no time."""
    load_s, compute_s, _, queued_s = estimate
    if load_s is None or compute_s is None or compute_s == math.inf:
        return math.inf
    return estimate.delay_s - max(0.0, load_s - queued_s)


class LoadGate(ServerLoadPolicy):
    """Decides on loads. The tier owns the gate and calls it under vLLM's lock. `clock`: returns seconds. `job_bytes`:
    bytes that one job of a reading thread has."""

    def __init__(self, cost: CostModel, clock: Callable[[], float], metrics: Metrics, *, job_bytes: int) -> None:
        super().__init__(cost, metrics)
        self._clock = clock
        self._job_bytes = job_bytes
        self._timer = PrefillTimer(cost, clock)
        self._candidates: dict[str, Candidate] = {}
        self._step = 0
        # `_live`: requests that have arrived and not finished. `_at_disk`: live requests that wait for the disk or for
        # rows.
        self._live = set[str]()
        self._at_disk = set[str]()
        # Live requests that were never scheduled: the last token of each of their chunks, and the last of these tokens.
        self._queued: dict[str, Mapping[Hashable, int]] = {}
        self._ends: dict[str, int] = {}
        # Bytes of the loads that were accepted in this step. vLLM submits these loads at the end of the step.
        self._accepted_bytes = Counter[Store]()
        self.has_waiting = False  # a request waits for rows in this step, so later requests wait too

    def add_request(self, request: str, chunk_ends: Mapping[Hashable, int]) -> None:
        """Record a new request of vLLM. `chunk_ends`: for each chunk of its prompt, the number of tokens up to the
        chunk's end. vLLM may fill the mapping later."""
        self._live.add(request)
        self._queued[request] = chunk_ends

    def candidate(self, request: str) -> Candidate | None:
        """Return the candidate of the request; None if vLLM has not looked up chunks for the request yet."""
        return self._candidates.get(request)

    def add_candidate(self, request: str, start: int, end: int) -> Candidate:
        """Create a candidate for the tokens from `start` on of a prompt. The last complete chunk of the prompt ends at
        `end`."""
        candidate = Candidate(self._clock(), self._step, start, end, computed_from=start)
        self._candidates[request] = candidate
        return candidate

    def needs_earlier_tokens(self, candidate: Candidate, start: int) -> bool:
        """Return whether vLLM asks for earlier tokens now than in an earlier step. `start`: the first
        token that vLLM asks for now. Within one step, vLLM may look up chunks from the end of the prompt to its
        start."""
        if start >= candidate.start:
            return False
        if candidate.step < self._step:
            return True
        candidate.start = candidate.computed_from = start
        return False

    def is_due(self, candidate: Candidate) -> bool:
        """Return whether to decide on the candidate now. The gate decides at most once per step, only after all chunks
        of the prompt were looked up, and not while another request that waits for rows is served first."""
        if candidate.loads is not None or candidate.step == self._step:
            return False
        if self.has_waiting and self._clock() < candidate.waits_until_s:
            return False
        candidate.step = self._step
        return True

    def num_delayed(self, request: str) -> int:
        """Return the number of other requests that computing this request would delay: requests that run or wait for
        the GPU, without requests that wait for the disk."""
        return len(self._live - self._at_disk - {request})

    def queued_s(self, request: str) -> float:
        """Return the seconds in which the GPU will compute the prompts of all other requests that it has not begun.
        Tokens that are loaded do not count, and tokens that the GPU has do not count once vLLM has looked up the
        prompt. A prompt does not count while its request waits for rows, because the GPU may have no work until then,
        nor until vLLM has reported its chunks."""
        return sum(self._prompt_s(other) for other in self._queued if other != request)

    def _prompt_s(self, request: str) -> float:
        candidate = self._candidates.get(request)
        if not self._queued[request] or (candidate is not None and candidate.waits_for_rows):
            return 0.0
        if request not in self._ends:
            self._ends[request] = max(self._queued[request].values())
        end = self._ends[request]
        return self.cost.prefill_s(min(candidate.computed_from, end) if candidate else 0, end) or 0.0

    def end_late_wait(self, request: str, candidate: Candidate) -> None:
        """End the wait for the disk's answer if the wait has taken as long as computing would delay all requests
        together."""
        wait_s, num_delayed = self._clock() - candidate.looked_up_s, self.num_delayed(request)
        if not self.compare_wait(wait_s, candidate.start, candidate.end, num_delayed).is_worth_loading():
            self.abandon()
            candidate.loads = False

    def decide(
        self,
        request: str,
        spans: Sequence[tuple[int, int]],
        chunk_bytes: int,
        queued: Queue,
        rows: Rows = UNKNOWN_ROWS,
        is_remote: Sequence[bool] = (),
    ) -> None:
        """Decide on the candidate of a request. `spans`: tokens [start, end) of each chunk that a store holds, ordered
        by end. `is_remote`: for each chunk, whether it is read from the remote store; () if no chunk is."""
        candidate = self._candidates[request]
        candidate.num_delayed = num_delayed = self.num_delayed(request)
        others = (num_delayed, self.queued_s(request))
        estimates = {part: self._estimate(part, chunk_bytes, queued, *others) for part in _parts_of(spans, is_remote)}
        part = max(estimates, key=lambda part: (_saved_s(estimates[part]), part.num_chunks))
        if rows.num < part.num_chunks and estimates[part].is_worth_loading():
            if rows.are_few(part.num_chunks) and self._may_wait(candidate, part, estimates[part]):
                self.has_waiting = True
                self._at_disk.add(request)
                return
            candidate.lacks_rows = True
            if not rows.num:
                self._at_disk.discard(request)
                self.declined.value += 1
                candidate.loads = False
                return
            part = _part_of(spans, rows.num, is_remote)
            estimates[part] = self._estimate(part, chunk_bytes, queued, *others)
        self._at_disk.discard(request)
        candidate.loads = self.choose(estimates[part])
        candidate.until = part.end if part.num_chunks < len(spans) else math.inf
        if candidate.loads:
            candidate.computed_from = part.end
            self._at_disk.add(request)
            self._accepted_bytes[DISK] += (part.num_chunks - part.num_remote) * chunk_bytes
            self._accepted_bytes[REMOTE] += part.num_remote * chunk_bytes

    def abandon_if_stalled(self, request: str, start: int, end: int, progress_s: float, store: Store = DISK) -> bool:
        """Return whether to abandon the rest of a load because a store is stalled, so that vLLM computes tokens [start,
        end). `progress_s`: time at which this load or an earlier load last made progress, or at which this load was
        submitted."""
        candidate = self._candidates.get(request)
        if not self._is_stalled(progress_s, start, end, candidate.num_delayed if candidate else 0, store):
            return False
        self.abandon()
        if candidate:
            candidate.computed_from = min(candidate.computed_from, start)
        return True

    def on_read(self, num_bytes: int, seconds: float, store: Store = DISK) -> None:
        """Record that one reading thread of a store has read `num_bytes` in `seconds`."""
        self.cost.observe_reads([(num_bytes, seconds)], store)

    def on_loaded(self, request: str) -> None:
        """Record that the request has no more loads in flight."""
        self._at_disk.discard(request)

    def on_computed(self, spans: Sequence[tuple[int, int]]) -> None:
        """Record that the GPU has computed a step. `spans`: tokens [start, end) of each prompt that the step
        computed."""
        self._timer.on_computed(spans)

    def on_step(self, scheduled: Iterable[str]) -> None:
        """Record the end of a scheduler step, after which the GPU computes the step. `scheduled`: requests that the
        step scheduled for the first time."""
        self._step += 1
        self._accepted_bytes.clear()
        self.has_waiting = False
        self._timer.on_scheduled()
        for request in scheduled:
            self._at_disk.discard(request)
            self._begin(request)

    def forget_candidate(self, request: str) -> None:
        """Remove the decision on a request, because its chunks are looked up again."""
        self._candidates.pop(request, None)

    def forget(self, request: str) -> None:
        """Forget a finished request."""
        self._candidates.pop(request, None)
        self._live.discard(request)
        self._at_disk.discard(request)
        self._begin(request)

    def _begin(self, request: str) -> None:
        """Record that the request does not wait for its first step."""
        self._queued.pop(request, None)
        self._ends.pop(request, None)

    def _estimate(
        self, part: _Part, chunk_bytes: int, queued: Queue, num_delayed: int, queued_s: float
    ) -> LoadEstimate:
        """Estimate the time of loading a part. Both stores are read concurrently, so the slower store decides."""
        loads_s = list[float | None]()
        for store, num_chunks in ((DISK, part.num_chunks - part.num_remote), (REMOTE, part.num_remote)):
            if num_chunks:
                queued_bytes, progress_s = queued.of(store)
                num_bytes = queued_bytes + self._accepted_bytes[store] + num_chunks * chunk_bytes
                load_s = self.cost.read_s(num_bytes, math.ceil(num_bytes / self._job_bytes), store)
                if progress_s is not None and self._is_stalled(progress_s, part.start, part.end, num_delayed, store):
                    load_s = math.inf
                loads_s.append(load_s)
        known_s = [load_s for load_s in loads_s if load_s is not None]
        slowest_s = max(known_s) if len(known_s) == len(loads_s) or math.inf in known_s else None
        return self.compare(slowest_s, part.start, part.end, num_delayed, queued_s)

    def _may_wait(self, candidate: Candidate, part: _Part, estimate: LoadEstimate) -> bool:
        """Return whether to wait for rows, or to continue a wait. After the longest wait, the load would take too long,
        as estimated at the first decision."""
        if candidate.waits_until_s == -math.inf:
            if estimate.compute_s is None or estimate.compute_s == math.inf:
                estimate = estimate._replace(compute_s=(part.end - part.start) / _MIN_TOKENS_PER_S)
            candidate.waits_until_s = self._clock() + estimate.limit_s - (estimate.load_s or 0.0)
        return self._clock() < candidate.waits_until_s

    def _is_stalled(self, progress_s: float, start: int, end: int, num_delayed: int, store: Store) -> bool:
        """Return whether a store has made no progress for so long that the load counts as stalled.

        For the disk, the limit is the delay that computing would cause for all requests, but at least the longest time
        that a working disk needs. With a shorter limit, all requests that wait during one stall would be computed at
        the same time. For the remote store, the limit is the time that it may take to answer a look-up, because the
        network or a server may fail at any time.
        """
        no_progress_s = self._clock() - progress_s
        if store is REMOTE:
            return no_progress_s > answer_limit_s(self.cost.longest_wait_s(start, end))
        return (
            no_progress_s > _STALL_S
            and not self.compare_wait(no_progress_s, start, end, num_delayed).is_worth_loading()
        )
