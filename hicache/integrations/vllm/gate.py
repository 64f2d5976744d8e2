"""Whether what the disk holds of a prompt is worth waiting for, by the speeds that this server and its disk have shown.

    looked up | answered and weighed | room in the CPU tier | read, part by part | scheduled | computed | stored
    <- no: the disk says nothing  -> <- retry, or a part -> <- the disk is silent ->           <- speed of prefill ->

A load takes the GPU from nobody, so it is made where it takes no longer than computing costs all requests together:
`W + l <= c (1 + n)`, of which `Queue` gives W and `LoadGate.num_delayed` n. Where the whole does not pay, the part is
loaded that does. What is declined is "not here" for vLLM, which computes it. Imports nothing of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hicache.flow.cost import CostModel, LoadEstimate
from hicache.integrations.load_gate import ServerLoadPolicy
from hicache.metrics import Metrics

# Tokens that are timed together. A step of fewer is mostly launches, and says little of a long prompt; a pass of many
# steps would hide at which positions they were.
_PASS_TOKENS = 2048
# A disk that works brings a part of a load, some chunks of a few MB, within a tenth of this even at 0.3 GB/s.
_SILENT_S = 1.0
# Below what serves long contexts on a GPU. Where the speed is unknown or loads always pay, waits for rows end too.
_LEAST_TOKENS_PER_S = 1000.0


@dataclass(slots=True)
class _Prompt:
    """Tokens [start, end) of it are computed, since `begin_s`."""

    begin_s: float
    start: int
    end: int


class PrefillTimer:
    """The speed of prefill: tokens of prompts, by the seconds of the steps that computed them. Owned by the gate.

    vLLM copies a chunk in the step after the one that computed it. So what has arrived when a step begins was computed
    before the last step began, at the latest:

        step begins | computed | step begins | copied | arrives | step begins: counted
        <----- counted ------->

    Time counts once, for what arrives first; time in which no prompt is computed does not.
    """

    def __init__(self, cost: CostModel, clock: Callable[[], float]) -> None:
        self._cost = cost
        self._clock = clock
        self._prompts: dict[str, _Prompt] = {}
        self._begin_s = math.inf  # of the earliest prompt of which something has arrived in this step
        self._step_s = self._counted_s = -math.inf  # when the last step began, until when time has been counted
        self._tokens = self._positions = self._seconds = 0.0

    def begin(self, request: str, start: int, end: int) -> None:
        """It is in its first step, and what is computed of its prompt are whole chunks within [start, end)."""
        self._prompts[request] = _Prompt(self._clock(), start, end)

    def computed(self, request: str, start: int, end: int) -> None:
        """Its tokens [start, end) have reached the CPU tier."""
        prompt = self._prompts.get(request)
        if prompt is None:
            return
        start, end = max(start, prompt.start), min(end, prompt.end)
        if start < end:
            self._begin_s = min(self._begin_s, prompt.begin_s)
            self._tokens += end - start
            self._positions += (end - start) * (start + end) / 2
            prompt.start = end
        if prompt.start >= prompt.end:
            del self._prompts[request]

    def forget(self, request: str) -> None:
        """It has finished, or was preempted."""
        self._prompts.pop(request, None)

    def step(self) -> None:
        """A step begins."""
        if self._begin_s < math.inf:
            self._seconds += max(0.0, self._step_s - max(self._counted_s, self._begin_s))
            self._counted_s = max(self._counted_s, self._step_s)
            self._begin_s = math.inf
        if self._tokens >= _PASS_TOKENS and self._seconds > 0:
            self._cost.observe_prefill(int(self._tokens), self._seconds, self._positions / self._tokens)
            self._tokens = self._positions = self._seconds = 0.0
        self._step_s = self._clock()


@dataclass(slots=True)
class Candidate:
    """A load to be decided on: the tier was asked for tokens from `start` on of a prompt whose last whole chunk ends at
    `end`. `loads`: whether what the disk holds of them, up to token `until`, is to be loaded; None until that is
    weighed. `step`: in which this was tried last; `waits_until_s`: how long it may wait for rows of the CPU tier, if it
    does; `num_delayed`: the others that computing would have delayed when it was weighed."""

    asked_s: float
    step: int
    start: int
    end: int
    loads: bool | None = None
    until: float = math.inf
    waits_until_s: float = -math.inf
    num_delayed: int = 0


class Queue(NamedTuple):
    """Loads that are under way: bytes that they still lack, and when the disk last brought a part of one; None: there
    are none. `gives_rows`: jobs of the disk are under way that give rows of the CPU tier free when they end."""

    num_bytes: int = 0
    progress_s: float | None = None
    gives_rows: bool = False


class Rows(NamedTuple):
    """Those that one request can have in the CPU tier, `num` at present, of `all`. `may_grow`: loads, stores or
    requests are under way that give rows free when they end."""

    num: int
    all: int
    may_grow: bool = False

    def are_few(self, num_chunks: int) -> bool:
        """Whether waiting could bring more of so many chunks. What never fits is content with half of the rows: others
        have some of them at any time."""
        return self.may_grow and self.num < (num_chunks if num_chunks <= self.all else self.all // 2)


UNKNOWN_ROWS = Rows(1 << 62, 1 << 62)  # more than there are


class _Part(NamedTuple):
    """The first chunks that the disk holds of a prompt: with them tokens [start, end) are not computed."""

    num_chunks: int
    start: int
    end: int


def _part_of(spans: Sequence[tuple[int, int]], num_chunks: int) -> _Part:
    """The first of chunks with these tokens [start, end), in the order of their ends. Where a gap follows, the CPU tier
    has the tokens in it."""
    ends = [spans[num_chunks - 1][1], *(start for start, _ in spans[num_chunks : num_chunks + 1])]
    return _Part(num_chunks, min(start for start, _ in spans), max(ends))


def _parts_of(spans: Sequence[tuple[int, int]]) -> list[_Part]:
    """What may be best to load: all, or up to a gap, whose tokens then come for nothing.

    To end elsewhere saves less than one of these: loading costs the same for each chunk, computing more for later ones.
    """
    gaps = [i for i, ((_, end), (start, _)) in enumerate(pairwise(spans), 1) if start > end]
    return [_part_of(spans, num_chunks) for num_chunks in [*gaps, len(spans)]]


def _saved_s(estimate: LoadEstimate) -> float:
    """What the load saves all requests together, in seconds of each; without end until both times are known."""
    load_s, compute_s, num_delayed = estimate
    if load_s is None or compute_s is None or compute_s == math.inf:
        return math.inf
    return compute_s * (1 + num_delayed) - load_s


class LoadGate(ServerLoadPolicy):
    """Owned by the tier, called under vLLM's lock. `clock`: seconds. `job_bytes`: what one reader of the disk takes at
    a time."""

    def __init__(self, cost: CostModel, clock: Callable[[], float], metrics: Metrics, *, job_bytes: int) -> None:
        super().__init__(cost, metrics)
        self._clock = clock
        self._job_bytes = job_bytes
        self._timer = PrefillTimer(cost, clock)
        self._candidates: dict[str, Candidate] = {}
        self._step = 0
        # Requests that have come and not finished, and those of them that wait for the disk, or for rows.
        self._live = set[str]()
        self._at_disk = set[str]()
        # Of the loads that were accepted in this step: vLLM submits them at its end.
        self._accepted_bytes = 0
        self.has_waiting = False  # for rows, since this step began: who comes later in it waits behind

    def came(self, request: str) -> None:
        """vLLM has a new request."""
        self._live.add(request)

    def candidate(self, request: str) -> Candidate | None:
        """That of the request, if it has asked."""
        return self._candidates.get(request)

    def asked(self, request: str, start: int, end: int) -> Candidate:
        """The tier is asked for tokens from `start` on of a prompt whose last whole chunk ends at `end`."""
        candidate = self._candidates[request] = Candidate(self._clock(), self._step, start, end)
        return candidate

    def asks_more(self, candidate: Candidate, start: int) -> bool:
        """Whether the tier is asked for tokens from `start` on where it was asked for fewer in an earlier step. Within
        one step vLLM may look up from the end."""
        if start >= candidate.start:
            return False
        if candidate.step < self._step:
            return True
        candidate.start = start
        return False

    def is_due(self, candidate: Candidate) -> bool:
        """Whether it is to be weighed: once a step, not before all chunks of the prompt were asked for, and not while
        it waits behind another for rows."""
        if candidate.loads is not None or candidate.step == self._step:
            return False
        if self.has_waiting and self._clock() < candidate.waits_until_s:
            return False
        candidate.step = self._step
        return True

    def num_delayed(self, request: str) -> int:
        """Others that computing for this request delays: those that run or wait for the GPU, not for the disk."""
        return len(self._live - self._at_disk - {request})

    def wait(self, request: str, candidate: Candidate) -> None:
        """The disk has not answered yet: that may take as long as computing costs all."""
        wait_s, num_delayed = self._clock() - candidate.asked_s, self.num_delayed(request)
        if not self.compare_wait(wait_s, candidate.start, candidate.end, num_delayed).is_worth_loading():
            self.abandon()
            candidate.loads = False

    def weigh(
        self,
        request: str,
        spans: Sequence[tuple[int, int]],
        chunk_bytes: int,
        queued: Queue,
        rows: Rows = UNKNOWN_ROWS,
    ) -> None:
        """The disk holds chunks of the prompt with these tokens [start, end), in the order of their ends."""
        candidate = self._candidates[request]
        candidate.num_delayed = num_delayed = self.num_delayed(request)
        estimates = {part: self._estimate(part, chunk_bytes, queued, num_delayed) for part in _parts_of(spans)}
        part = max(estimates, key=lambda part: (_saved_s(estimates[part]), part.num_chunks))
        if rows.num < part.num_chunks and estimates[part].is_worth_loading():
            if rows.are_few(part.num_chunks) and self._may_wait(candidate, part, estimates[part]):
                self.has_waiting = True
                self._at_disk.add(request)
                return
            if not rows.num:
                self._at_disk.discard(request)
                self.declined.value += 1
                candidate.loads = False
                return
            part = _part_of(spans, rows.num)
            estimates[part] = self._estimate(part, chunk_bytes, queued, num_delayed)
        self._at_disk.discard(request)
        candidate.loads = self.choose(estimates[part])
        candidate.until = part.end if part.num_chunks < len(spans) else math.inf
        if candidate.loads:
            self._at_disk.add(request)
            self._accepted_bytes += part.num_chunks * chunk_bytes

    def abandons(self, request: str, start: int, end: int, progress_s: float) -> bool:
        """Whether the rest of a load, tokens [start, end), is computed instead: the disk is stuck. `progress_s`: when
        it last brought a part of this load, or of one before it, or the load was submitted."""
        candidate = self._candidates.get(request)
        if not self._is_silent(progress_s, start, end, candidate.num_delayed if candidate else 0):
            return False
        self.abandon()
        return True

    def read(self, num_bytes: int, seconds: float) -> None:
        """One reader of the disk has brought so much in that time."""
        self.cost.observe_read(num_bytes, seconds)

    def loaded(self, request: str) -> None:
        """The disk brings nothing more for the request."""
        self._at_disk.discard(request)

    def stored(self, request: str, start: int, end: int) -> None:
        """Tokens [start, end) of the request's prompt were computed and have reached the CPU tier."""
        self._timer.computed(request, start, end)

    def step(self, scheduled: Iterable[str], preempted: Iterable[str]) -> None:
        """A step of the scheduler ends, in which these requests were scheduled for the first time, or preempted. Now
        the GPU computes it."""
        self._step += 1
        self._accepted_bytes = 0
        self.has_waiting = False
        for request in preempted:
            self._timer.forget(request)
        self._timer.step()
        for request in scheduled:
            self._at_disk.discard(request)
            if request in self._candidates:
                candidate = self._candidates[request]
                self._timer.begin(request, candidate.start, candidate.end)

    def forget(self, request: str) -> None:
        """It has finished."""
        self._candidates.pop(request, None)
        self._live.discard(request)
        self._at_disk.discard(request)
        self._timer.forget(request)

    def _estimate(self, part: _Part, chunk_bytes: int, queued: Queue, num_delayed: int) -> LoadEstimate:
        num_bytes = queued.num_bytes + self._accepted_bytes + part.num_chunks * chunk_bytes
        load_s = self.cost.read_s(num_bytes, math.ceil(num_bytes / self._job_bytes))
        if queued.progress_s is not None and self._is_silent(queued.progress_s, part.start, part.end, num_delayed):
            load_s = math.inf
        return self.compare(load_s, part.start, part.end, num_delayed)

    def _may_wait(self, candidate: Candidate, part: _Part, estimate: LoadEstimate) -> bool:
        """Whether to wait for rows, or go on with that: for as long as the load saves, at its first weighing."""
        if candidate.waits_until_s == -math.inf:
            load_s, compute_s, num_delayed = estimate
            if compute_s is None or compute_s == math.inf:
                compute_s = (part.end - part.start) / _LEAST_TOKENS_PER_S
            candidate.waits_until_s = self._clock() + _saved_s(LoadEstimate(load_s or 0.0, compute_s, num_delayed))
        return self._clock() < candidate.waits_until_s

    def _is_silent(self, progress_s: float, start: int, end: int, num_delayed: int) -> bool:
        """Whether the disk has brought nothing for so long that nothing is to be expected: longer than computing costs
        all, and than a disk that works. Who gave up sooner, as many wait for one stall, would all compute at once."""
        silent_s = self._clock() - progress_s
        return silent_s > _SILENT_S and not self.compare_wait(silent_s, start, end, num_delayed).is_worth_loading()
