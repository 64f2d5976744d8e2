"""The gate before the disk of vLLM's tier, by a clock that the test sets and without vLLM."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from disk_case import Clock
from hicache.flow.cost import CostModel
from hicache.integrations.vllm.gate import Candidate, LoadGate, PrefillTimer, Queue
from hicache.metrics import Metrics
from hicache.tiers import DISK

JOB_BYTES = 8 << 20
PROMPT, TOKEN_BYTES = 16384, 1 << 17
PROMPT_BYTES = PROMPT * TOKEN_BYTES
IDLE = Queue()


class Case:
    """A gate over a disk with `num_readers`, and what it learns."""

    def __init__(self, tokens_per_s: Any = "auto", num_readers: int = 4) -> None:
        self.clock = Clock()
        self.cost = CostModel(tokens_per_s, {DISK: num_readers}, Metrics(), self.clock)
        self.gate = LoadGate(self.cost, self.clock, Metrics(), job_bytes=JOB_BYTES)
        self._num_requests = 0

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def candidate(self, num_tokens: int = PROMPT) -> Candidate:
        """Of a new request, in the step after it asked for the whole prompt."""
        self._num_requests += 1
        candidate = self.gate.asked(str(self._num_requests), 0, num_tokens)
        self.gate.step((), ())
        return candidate

    def loads(self, num_tokens: int = PROMPT, queue: Queue = IDLE) -> bool | None:
        """Whether a prompt that the disk holds is loaded."""
        candidate = self.candidate(num_tokens)
        assert self.gate.is_due(candidate)
        self.gate.weigh(candidate, 0, num_tokens, num_tokens * TOKEN_BYTES, queue)
        return candidate.loads

    def compute(self, seconds: float, num_tokens: int = PROMPT) -> None:
        """A prompt is scheduled, computed and stored, in two parts."""
        self.candidate(num_tokens)
        request, half = str(self._num_requests), num_tokens // 2
        self.gate.step([request], ())
        for start in (0, half):
            self.after(seconds / 2)
            self.gate.stored(request, start, start + half)
            self.gate.step((), ())
        self.gate.forget(request)

    def read(self, seconds: float) -> None:
        """All readers together bring a prompt in so much time."""
        for _ in range(4):
            self.gate.read(PROMPT_BYTES // 4, seconds)

    def counts(self) -> tuple[float, ...]:
        gate = self.gate
        return tuple(each.value for each in (gate.accepted, gate.declined, gate.unmeasured, gate.abandoned))


@pytest.mark.parametrize(("read_s", "loads"), [(0.49, True), (0.51, False)])
def test_a_load_is_made_where_it_is_faster_than_computing(read_s: float, loads: bool) -> None:
    """By what was measured: 16384 tokens were computed in half a second."""
    case = Case()
    case.compute(0.5)
    case.read(read_s)
    assert case.loads() is loads
    assert case.counts() == (int(loads), int(not loads), 0, 0)


def test_nothing_is_declined_before_both_speeds_are_known() -> None:
    case = Case()
    assert case.loads()
    case.read(3600)
    assert case.loads()
    other = Case()
    other.compute(1e-3)
    assert other.loads()
    assert case.counts() == (0, 0, 2, 0) and other.counts() == (0, 0, 1, 0)


@pytest.mark.parametrize(("tokens_per_s", "loads"), [(16384, True), (65536, False), (0, True)])
def test_a_speed_that_is_given_needs_no_measurement(tokens_per_s: float, loads: bool) -> None:
    """With 0 everything is loaded, whatever it takes."""
    case = Case(tokens_per_s)
    case.read(0.5 if tokens_per_s else 3600)
    assert case.loads() is loads
    case.compute(0.5)
    assert case.loads() is loads


def test_what_was_declined_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(1e9)
    case.read(1.0)
    with caplog.at_level(logging.INFO, "hicache"):
        assert [case.loads() for _ in range(3)] == [False] * 3
    assert caplog.text.count("prefill_tokens_per_s=0") == 1
    assert case.counts() == (0, 3, 0, 0)


def test_a_gate_that_declines_opens_again() -> None:
    """A disk that is not read shows nothing: after a minute its speed is unknown, one load is made, and its speed
    decides."""
    case = Case(PROMPT)
    case.read(10.0)
    assert not case.loads()
    case.after(59)
    assert not case.loads()
    case.after(2)
    assert case.loads()
    case.read(0.1)
    assert case.loads()
    assert case.counts() == (1, 2, 1, 0)


def test_loads_wait_for_those_before_them() -> None:
    """Those that are under way, and those that were accepted in the same step. A prompt is read in 0.4 s and computed
    in 1: the third would take longer than that."""
    case = Case(PROMPT)
    case.read(0.4)
    assert not case.loads(queue=Queue(2 * PROMPT_BYTES, case.clock()))
    candidates = [case.candidate() for _ in range(3)]
    for candidate in candidates:
        assert case.gate.is_due(candidate)
        case.gate.weigh(candidate, 0, PROMPT, PROMPT_BYTES, IDLE)
    assert [candidate.loads for candidate in candidates] == [True, True, False]
    assert case.loads()


def test_a_request_is_weighed_when_all_its_chunks_were_asked_for() -> None:
    """Once a step until it is decided, and not in the first."""
    case = Case(PROMPT)
    candidate = case.gate.asked("a", 0, 64)
    assert not case.gate.is_due(candidate)
    case.gate.step((), ())
    assert case.gate.candidate("a") is candidate
    assert case.gate.is_due(candidate) and not case.gate.is_due(candidate)
    case.gate.step((), ())
    assert case.gate.is_due(candidate)
    case.gate.weigh(candidate, 0, 64, 64, IDLE)
    case.gate.step((), ())
    assert candidate.loads and not case.gate.is_due(candidate)


def test_nobody_waits_for_an_answer_longer_than_computing_takes() -> None:
    """The disk does not say whether it holds the prompt, or has loads under way and brings nothing of them."""
    case = Case(PROMPT)
    candidate = case.candidate()
    case.after(0.9)
    case.gate.wait(candidate)
    assert candidate.loads is None
    case.after(0.2)
    case.gate.wait(candidate)
    assert candidate.loads is False
    case.read(0.1)
    under_way = Queue(JOB_BYTES, case.clock())
    assert case.loads(queue=under_way)
    case.after(1.1)
    assert not case.loads(queue=under_way)
    case.read(0.1)
    assert case.loads(queue=under_way)
    assert case.counts() == (2, 1, 0, 1)


def test_a_load_under_way_is_given_up_when_computing_would_overtake_it() -> None:
    """By the speed that the disk shows meanwhile, or when it brings nothing."""
    case = Case(PROMPT)
    case.read(0.1)
    half, half_bytes = (PROMPT // 2, PROMPT), PROMPT_BYTES // 2
    assert not case.gate.gives_up(*half, half_bytes, case.clock())
    assert case.gate.gives_up(*half, half_bytes, case.clock() - 0.6)
    for _ in range(50):
        case.read(3.0)
    assert case.gate.gives_up(*half, half_bytes, case.clock())
    assert case.counts() == (0, 0, 0, 2)


def test_with_unknown_speeds_a_load_is_given_up_after_a_bounded_time() -> None:
    case = Case()
    assert not case.gate.gives_up(0, 1000, 1 << 30, case.clock())
    assert case.gate.gives_up(0, 1000, 1 << 30, case.clock() - 1.1)
    assert not Case(0).gate.gives_up(0, 1000, 1 << 30, -math.inf)


class Timed:
    """A timer whose steps last 0.25 s."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cost = CostModel("auto", {DISK: 1}, Metrics(), self.clock)
        self.timer = PrefillTimer(self.cost, self.clock)

    def step(self, *stored: tuple[str, int, int]) -> None:
        self.clock.now_s += 0.25
        for request, start, end in stored:
            self.timer.computed(request, start, end)
        self.timer.step()

    def prefill_s(self) -> float | None:
        return self.cost.prefill_s(0, 8192)


def test_prompts_that_are_computed_side_by_side_share_the_time() -> None:
    """Three of 8192 tokens in four steps of a quarter of a second: half a second for one, and then for two, of which
    the square counts."""
    timed = Timed()
    for request in "abc":
        timed.timer.begin(request, 8192)
    timed.step()
    timed.step(("a", 0, 8192))
    timed.step(("b", 0, 4096), ("c", 0, 2048))
    timed.step(("b", 4096, 8192), ("c", 2048, 8192))
    assert timed.prefill_s() == pytest.approx((0.5 * 1 + 0.5 * 2) / (1**2 + 2**2), rel=0.05)


def test_short_prompts_count_together_and_idle_time_does_not() -> None:
    """Eight prompts of 1024 tokens, 0.25 s each, a minute apart."""
    timed = Timed()
    for n in range(8):
        assert timed.prefill_s() is None
        timed.clock.now_s += 60
        timed.timer.begin(str(n), 1024)
        timed.step((str(n), 0, 1024))
    assert timed.prefill_s() == pytest.approx(8 * 0.25)


def test_a_prompt_that_was_preempted_is_not_timed() -> None:
    case = Case()
    case.candidate()
    case.gate.step(["1"], ())
    case.gate.step((), ["1"])
    case.after(60)
    case.gate.stored("1", 0, PROMPT)
    case.gate.step((), ())
    assert case.cost.prefill_s(0, PROMPT) is None


def test_what_says_nothing_of_prefill_does_not_count() -> None:
    """A prompt that has ended, the part that was loaded, and what was generated."""
    timed = Timed()
    for request in "ab":
        timed.timer.begin(request, 16384)
    timed.step(("a", 0, 8192), ("b", 8192, 16384))
    timed.timer.forget("a")
    timed.clock.now_s += 60
    timed.step(("a", 8192, 16384), ("b", 16384, 24576))
    assert timed.prefill_s() == pytest.approx(0.25)
