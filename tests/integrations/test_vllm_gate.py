"""The gate before the disk of vLLM's tier, with a clock that the test sets and without vLLM."""

from __future__ import annotations

import math
from typing import Any

import pytest

from disk_case import Clock
from hicache.flow.cost import CostModel
from hicache.integrations.vllm.gate import Candidate, LoadGate, PrefillTimer, Queue, Rows
from hicache.metrics import Metrics
from hicache.tiers import DISK

JOB_BYTES = 8 << 20
PROMPT, TOKEN_BYTES, CHUNK = 16384, 1 << 17, 512
CHUNK_BYTES, PROMPT_BYTES = CHUNK * TOKEN_BYTES, PROMPT * TOKEN_BYTES
IDLE = Queue()


def spans_of(num_tokens: int) -> list[tuple[int, int]]:
    """The spans of consecutive chunks."""
    return [(first, first + CHUNK) for first in range(0, num_tokens, CHUNK)]


class Case:
    """A gate over a disk with `num_readers` reader threads, and the cost model of both."""

    def __init__(self, tokens_per_s: Any = "auto", num_readers: int = 4) -> None:
        self.clock = Clock()
        self.cost = CostModel(tokens_per_s, {DISK: num_readers}, Metrics(), self.clock)
        self.gate = LoadGate(self.cost, self.clock, Metrics(), job_bytes=JOB_BYTES)
        self._num_requests = 0

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def add_request(self, *chunk_ends: int) -> str:
        """Add a new request. Without `chunk_ends`, vLLM has not reported the chunks of its prompt."""
        self._num_requests += 1
        request = str(self._num_requests)
        self.gate.add_request(request, dict(enumerate(chunk_ends)))
        return request

    def add_candidate(self, num_tokens: int = PROMPT) -> tuple[str, Candidate]:
        """Add a new request that asks for the complete prompt."""
        request = self.add_request()
        return request, self.gate.add_candidate(request, 0, num_tokens)

    def decide(self, request: str, candidate: Candidate, queue: Queue = IDLE, **given: Any) -> bool | None:
        assert self.gate.is_due(candidate)
        self.gate.decide(request, spans_of(candidate.end), CHUNK_BYTES, queue, **given)
        return candidate.loads

    def loads(self, num_tokens: int = PROMPT, queue: Queue = IDLE) -> bool | None:
        """Whether the gate loads a prompt that the disk holds, for a request without others."""
        request, candidate = self.add_candidate(num_tokens)
        self.gate.on_step(())
        loads = self.decide(request, candidate, queue)
        self.gate.forget(request)
        return loads

    def compute(self, seconds: float, num_tokens: int = PROMPT) -> None:
        """Schedule a prompt and compute it in two steps."""
        request, _ = self.add_candidate(num_tokens)
        half = num_tokens // 2
        for scheduled, span in (([request], (0, half)), ([], (half, num_tokens))):
            self.gate.on_step(scheduled)
            self.after(seconds / 2)
            self.gate.on_computed([span])
        self.gate.on_step(())
        self.gate.forget(request)

    def read(self, seconds: float) -> None:
        """Make all readers together read a prompt in `seconds`."""
        for _ in range(4):
            self.gate.on_read(PROMPT_BYTES // 4, seconds)

    def counts(self) -> tuple[float, ...]:
        gate = self.gate
        return tuple(each.value for each in (gate.accepted, gate.declined, gate.unmeasured, gate.abandoned))


def test_loads_wait_for_those_before_them() -> None:
    """A load waits for loads in flight, and for those accepted in the same step. A prompt is read in 0.4 s and computed
    in 1 s, so the third load would take longer than computing."""
    case = Case(PROMPT)
    case.read(0.4)
    assert not case.loads(queue=Queue(2 * PROMPT_BYTES, case.clock()))
    add_candidate = [case.add_candidate() for _ in range(3)]
    case.gate.on_step(())
    assert [case.decide(*each) for each in add_candidate] == [True, True, False]
    case.gate.on_step(())
    for request, _ in add_candidate:
        case.gate.forget(request)
    assert case.loads()


def test_a_load_may_take_as_long_as_computing_costs_all_that_it_delays() -> None:
    """A prompt is computed in 1 s and read in 2.5 s. Computing would delay two other requests that run or wait for the
    GPU, so the load pays. Requests that wait for the disk, or have finished, do not count."""
    case = Case(PROMPT)
    case.read(2.5)
    assert not case.loads()
    (running, _), _ = case.add_candidate(), case.add_candidate()
    case.gate.on_step([running])
    assert case.loads()
    case.gate.forget(running)
    assert not case.loads()
    (at_disk, candidate), (other, _) = case.add_candidate(), case.add_candidate()
    case.gate.on_step(())
    assert case.decide(at_disk, candidate)
    case.gate.on_step(())
    assert case.loads()
    case.gate.forget(other)
    assert not case.loads()
    case.gate.on_loaded(at_disk)  # the request at the disk waits for the GPU now
    assert case.loads()
    assert case.counts() == (4, 3, 0, 0)


def test_a_load_may_take_as_long_as_the_gpu_has_other_work() -> None:
    """A prompt is computed in 1 s and read in 2.5 s. Two other requests wait for the disk, and the GPU will compute
    another 2 s of their prompts after the loads, so the gate chooses the load."""
    case = Case(PROMPT)
    case.read(0.5)
    first, second = (case.add_request(PROMPT, 2 * PROMPT) for _ in range(2))
    for request in (first, second):
        candidate = case.gate.add_candidate(request, 0, 2 * PROMPT)
        case.gate.on_step(())
        case.gate.decide(request, spans_of(PROMPT), CHUNK_BYTES, IDLE)
        assert candidate.loads
    case.after(61)  # the rate of the disk is forgotten
    case.read(2.5)
    assert (case.gate.num_delayed("other"), case.gate.queued_s("other"), case.gate.queued_s(first)) == (0, 2, 1)
    assert case.loads()
    request, candidate = case.add_candidate()
    case.gate.on_step(())
    spans = [span for span in spans_of(PROMPT) if span[0] not in range(4 * CHUNK, 8 * CHUNK)]
    case.gate.decide(request, spans, CHUNK_BYTES, IDLE)
    assert candidate.loads and candidate.until == math.inf  # not only the chunks before the gap
    case.gate.forget(request)
    case.gate.forget(second)
    assert not case.loads()


def test_other_work_of_the_gpu_is_what_it_has_not_begun_and_no_load_delivers() -> None:
    """Prompts of 1 s. Tokens that the GPU has, and tokens that are loaded, do not count. A prompt whose request waits
    for rows, that the GPU has begun, or whose chunks are unknown does not count at all."""
    case = Case(PROMPT)
    case.read(0.4)
    request = case.add_request(PROMPT // 2, PROMPT)
    assert (case.gate.queued_s("other"), case.gate.queued_s(request)) == (1, 0)
    case.gate.add_candidate(request, PROMPT - CHUNK, PROMPT)
    assert case.gate.queued_s("other") == CHUNK / PROMPT
    case.gate.forget_candidate(request)
    candidate = case.gate.add_candidate(request, 0, PROMPT)
    case.gate.on_step(())
    assert case.decide(request, candidate, rows=Rows(8, 64, may_grow=True)) is None
    assert case.gate.queued_s("other") == 0
    case.after(1)
    case.gate.on_step(())
    assert case.decide(request, candidate, rows=Rows(8, 64, may_grow=True))
    assert case.gate.queued_s("other") == 1 - 8 * CHUNK / PROMPT
    case.gate.on_step([request])
    assert case.gate.queued_s("other") == 0
    case.add_request()
    assert case.gate.queued_s("other") == 0


def test_of_requests_that_all_wait_for_the_disk_some_are_computed() -> None:
    """Six prompts of 1 s arrive while the GPU has no other work. The disk reads a prompt in 0.9 s, so the prompts take
    3 s if the disk reads half of them, and 5.4 s if it reads them all."""
    case = Case(PROMPT)
    case.read(0.9)
    requests = [case.add_request(PROMPT) for _ in range(6)]
    candidates = [case.gate.add_candidate(request, 0, PROMPT) for request in requests]
    case.gate.on_step(())
    few = Rows(0, 64, may_grow=True)
    assert {case.decide(*each, rows=few) for each in zip(requests, candidates, strict=True)} == {None}
    case.gate.on_step(())
    loads = [case.decide(*each) for each in zip(requests, candidates, strict=True)]
    assert loads.count(True) == 3


def test_a_load_waits_for_rows_as_long_as_that_pays() -> None:
    """A prompt of 32 chunks is computed in 1 s and read in 0.4 s, so it may wait for rows for 0.6 s. Then the chunks
    that fit are loaded, if that pays."""
    case = Case(PROMPT)
    case.read(0.4)
    few = Rows(8, 64, may_grow=True)
    for ends, loads in ((few, True), (Rows(0, 64, may_grow=True), False)):
        request, candidate = case.add_candidate()
        for _ in range(6):
            case.gate.on_step(())
            assert case.decide(request, candidate, rows=few) is None
            case.after(0.09)
        case.after(0.1)
        case.gate.on_step(())
        assert case.decide(request, candidate, rows=ends) is loads
        assert candidate.until == (8 * CHUNK if loads else math.inf)
        case.gate.forget(request)
    assert case.counts() == (1, 1, 0, 0)


def test_nobody_waits_for_an_answer_longer_than_computing_costs() -> None:
    """A request waits at most 1 s for the answer of the disk, and at most 2 s if computing delays another request."""
    case = Case(PROMPT)
    for others in (0, 1):
        for _ in range(others):
            case.add_candidate()
        request, candidate = case.add_candidate()
        case.after(0.9 * (1 + others))
        case.gate.end_late_wait(request, candidate)
        assert candidate.loads is None
        case.after(0.2 * (1 + others))
        case.gate.end_late_wait(request, candidate)
        assert candidate.loads is False
        case.gate.forget(request)
    assert case.counts() == (0, 0, 0, 2)


def test_a_load_under_way_is_given_up_when_the_disk_is_stuck() -> None:
    """A load in flight is abandoned if it makes no progress for a second, and for longer than computing would have cost
    all requests when the load was decided. A load is not abandoned because the disk has become slow, or because other
    requests now wait for the disk."""
    case = Case(PROMPT)
    case.read(0.1)
    alone, delayed = (case.add_candidate() for _ in range(2))
    for request, candidate in (delayed, alone):  # computing the first request would delay the second
        case.gate.on_step(())
        assert case.decide(request, candidate)
    for _ in range(50):
        case.read(30.0)
    for request, num_tokens, no_progress_s in (
        (alone[0], PROMPT // 2, 1.0),
        (alone[0], 4 * PROMPT, 4.0),
        (delayed[0], 4 * PROMPT, 8.0),
    ):
        assert not case.gate.abandon_if_stalled(request, 0, num_tokens, case.clock() - 0.9 * no_progress_s)
        assert case.gate.abandon_if_stalled(request, 0, num_tokens, case.clock() - 1.1 * no_progress_s)
    assert case.counts() == (2, 0, 0, 3)


def test_with_unknown_speeds_a_load_is_given_up_after_a_bounded_time() -> None:
    case = Case()
    assert not case.gate.abandon_if_stalled("1", 0, 4000, case.clock() - 3.9)
    assert case.gate.abandon_if_stalled("1", 0, 4000, case.clock() - 4.1)
    assert not Case(0).gate.abandon_if_stalled("1", 0, 4000, case.clock() - 1e9)


class Timed:
    """A timer, and steps of one scheduler."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cost = CostModel("auto", {DISK: 1}, Metrics(), self.clock)
        self.timer = PrefillTimer(self.cost, self.clock)

    def step(self, *spans: tuple[int, int], seconds: float = 0.25) -> None:
        """Schedule a step that computes these tokens of prompts in `seconds`."""
        self.timer.on_scheduled()
        self.end(*spans, seconds=seconds)

    def end(self, *spans: tuple[int, int], seconds: float = 0.25) -> None:
        self.clock.now_s += seconds
        self.timer.on_computed(spans)

    def prefill_s(self, start: int = 0, end: int = 8192) -> float | None:
        self.timer.on_scheduled()  # a later step
        self.timer.on_computed(())
        return self.cost.prefill_s(start, end)


def test_a_prompt_in_parts_is_timed_part_by_part() -> None:
    """The parts of a long prompt are timed separately. Later parts take longer, and decoding after them does not
    count."""
    timed, parts = Timed(), [0.2, 0.3, 0.4, 0.5]
    for n, seconds in enumerate(parts):
        timed.step((8192 * n, 8192 * (n + 1)), seconds=seconds)
    for _ in range(100):
        timed.step()
    for n, seconds in enumerate(parts):
        assert timed.prefill_s(8192 * n, 8192 * (n + 1)) == pytest.approx(seconds)


def test_idle_time_and_decoding_between_prompts_do_not_count() -> None:
    """Eight prompts of 1024 tokens take 0.25 s each, a minute apart. The time between them does not count."""
    timed = Timed()
    for _ in range(8):
        timed.clock.now_s += 60
        timed.step((0, 1024))
        timed.step(seconds=0.01)
    assert timed.prefill_s() == pytest.approx(8 * 0.25)


def test_a_step_that_was_scheduled_during_another_step_begins_after_it() -> None:
    """vLLM schedules each step while it computes the previous step. A step of 4096 tokens takes 0.25 s, a decoding step
    0.01 s."""
    timed = Timed()
    timed.timer.on_scheduled()
    for n in range(4):
        timed.timer.on_scheduled()
        timed.end((4096 * n, 4096 * (n + 1)))
        timed.timer.on_scheduled()
        timed.end(seconds=0.01)
    timed.end(seconds=0.01)
    assert timed.prefill_s() == pytest.approx(2 * 0.25)


def test_an_end_without_a_beginning_does_not_count() -> None:
    """vLLM reports the end of a step that was scheduled before the tier existed."""
    timed = Timed()
    timed.end((0, 8192), seconds=60)
    timed.step((0, 8192))
    assert timed.prefill_s() == pytest.approx(0.25)
