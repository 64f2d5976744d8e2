"""Whether what the disk holds of a prompt is worth waiting for, by the speeds that this server and its disk have shown.

    looked up | answered and weighed, once | read, part by part | scheduled | computed | stored in the CPU tier
    <- declined: the disk says nothing  -> <- given up: slow  ->  <- the speed of prefill, a little too low -->

What is declined is "not here" for vLLM, which computes it. Imports nothing of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hicache.flow.cost import CostModel
from hicache.integrations.load_gate import ServerLoadDecisions
from hicache.metrics import Metrics

_PASS_TOKENS = 8192  # that are timed together: of less, one delayed copy would decide


@dataclass(slots=True)
class _Prompt:
    """Tokens [start, end) were computed since `begin_s`; whole chunks end at `until`."""

    begin_s: float
    until: int
    start: int = -1
    end: int = 0


class PrefillTimer:
    """The speed of prefill: a prompt's time is that from its first step until its last whole chunk is in the CPU tier.

    vLLM copies a chunk in the step after the one that computed it, so the time is a little too long, and computing
    looks a little slower than it is. Time in which another prompt ended counts for that one. Owned by the gate.
    """

    def __init__(self, cost: CostModel, clock: Callable[[], float]) -> None:
        self._cost, self._clock = cost, clock
        self._prompts: dict[str, _Prompt] = {}
        self._ended: list[_Prompt] = []  # in this step
        self._counted_s = -math.inf  # until when time has been counted
        self._tokens = self._positions = self._seconds = 0.0

    def begin(self, request: str, until: int) -> None:
        """It is in its first step. `until`: where the last whole chunk of its prompt ends."""
        self._prompts[request] = _Prompt(self._clock(), until)

    def computed(self, request: str, start: int, end: int) -> None:
        """Its tokens [start, end) have reached the CPU tier."""
        prompt = self._prompts.get(request)
        if prompt is None:
            return
        prompt.start, prompt.end = start if prompt.start < 0 else prompt.start, max(prompt.end, end)
        if prompt.end >= prompt.until:
            self._ended.append(self._prompts.pop(request))

    def forget(self, request: str) -> None:
        """It has finished, or was preempted."""
        self._prompts.pop(request, None)

    def step(self) -> None:
        """Count the prompts that have ended since the last call, together."""
        if not self._ended:
            return
        ended, self._ended, now_s = self._ended, [], self._clock()
        self._seconds += now_s - max(self._counted_s, min(prompt.begin_s for prompt in ended))
        self._counted_s = now_s
        for prompt in ended:
            num_tokens = prompt.end - prompt.start
            self._tokens += num_tokens
            self._positions += num_tokens * (prompt.start + prompt.end) / 2
        if self._tokens >= _PASS_TOKENS and self._seconds > 0:
            self._cost.observe_prefill(int(self._tokens), self._seconds, self._positions / self._tokens)
            self._tokens = self._positions = self._seconds = 0.0


@dataclass(slots=True)
class Candidate:
    """A load to be decided on: the tier was asked for tokens from `start` on of a prompt whose last whole chunk ends at
    `end`. `loads`: whether what the disk holds of them is to be loaded; None until that is weighed. `step`: in which
    this was tried last."""

    asked_s: float
    step: int
    start: int
    end: int
    loads: bool | None = None


class Queue(NamedTuple):
    """Loads that are under way: bytes that they still lack, and when the oldest was submitted; None: there are none."""

    num_bytes: int = 0
    since_s: float | None = None


class LoadGate(ServerLoadDecisions):
    """Owned by the tier, called under vLLM's lock. `clock`: seconds. `job_bytes`: what one reader of the disk takes at
    a time."""

    def __init__(self, cost: CostModel, clock: Callable[[], float], metrics: Metrics, *, job_bytes: int) -> None:
        super().__init__(metrics)
        self._cost, self._clock, self._job_bytes = cost, clock, job_bytes
        self._timer = PrefillTimer(cost, clock)
        self._candidates: dict[str, Candidate] = {}
        self._step = 0
        self._heard_s = -math.inf  # when the disk last brought anything
        # Of the loads that were accepted in this step: vLLM submits them at its end.
        self._accepted_bytes = 0

    def candidate(self, request: str) -> Candidate | None:
        """That of the request, if it has asked."""
        return self._candidates.get(request)

    def asked(self, request: str, start: int, end: int) -> Candidate:
        """The tier is asked for tokens from `start` on of a prompt whose last whole chunk ends at `end`."""
        candidate = self._candidates[request] = Candidate(self._clock(), self._step, start, end)
        return candidate

    def is_due(self, candidate: Candidate) -> bool:
        """Whether it is to be weighed: once a step, and not before all chunks of the prompt were asked for."""
        if candidate.loads is not None or candidate.step == self._step:
            return False
        candidate.step = self._step
        return True

    def wait(self, candidate: Candidate) -> None:
        """The disk has not answered yet: that may take as long as computing would."""
        if self._clock() - candidate.asked_s > self._cost.longest_wait_s(candidate.start, candidate.end):
            self.abandon()
            candidate.loads = False

    def weigh(self, candidate: Candidate, start: int, end: int, num_bytes: int, queued: Queue) -> None:
        """The disk holds tokens [start, end) of the prompt, in `num_bytes`."""
        load_s = self._read_s(queued.num_bytes + self._accepted_bytes + num_bytes)
        compute_s = self._cost.prefill_s(start, end)
        if compute_s is not None and queued.since_s is not None:
            silent_s = self._clock() - max(self._heard_s, queued.since_s)
            load_s = math.inf if silent_s > compute_s else load_s
        candidate.loads = self.decide(load_s, compute_s)
        self._accepted_bytes += num_bytes if candidate.loads else 0

    def gives_up(self, start: int, end: int, num_bytes: int, progress_s: float) -> bool:
        """Whether the rest of a load, tokens [start, end), is computed instead. `num_bytes`: of it and of all loads
        before it. `progress_s`: when the load was submitted, or the disk last brought a part of it."""
        compute_s = self._cost.longest_wait_s(start, end)
        load_s = self._read_s(num_bytes)
        if self._clock() - progress_s <= compute_s and (load_s is None or load_s <= compute_s):
            return False
        self.abandon()
        return True

    def read(self, num_bytes: int, seconds: float) -> None:
        """One reader of the disk has brought so much in that time."""
        self._heard_s = self._clock()
        self._cost.observe_read(num_bytes, seconds)

    def stored(self, request: str, start: int, end: int) -> None:
        """Tokens [start, end) of the request's prompt were computed and have reached the CPU tier."""
        self._timer.computed(request, start, end)

    def step(self, scheduled: Iterable[str], preempted: Iterable[str]) -> None:
        """A step of the scheduler ends, in which these requests were scheduled for the first time, or preempted."""
        self._step += 1
        self._accepted_bytes = 0
        for request in preempted:
            self._timer.forget(request)
        for request in scheduled:
            if request in self._candidates:
                self._timer.begin(request, self._candidates[request].end)
        self._timer.step()

    def forget(self, request: str) -> None:
        """It has finished."""
        self._candidates.pop(request, None)
        self._timer.forget(request)

    def _read_s(self, num_bytes: int) -> float | None:
        return self._cost.read_s(num_bytes, math.ceil(num_bytes / self._job_bytes))
