"""The order of requests: ranks compared with a model, and schedulers with one row, which serve one request at a
time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import hicache.build.store_tiers
from costs import calls_of
from disk_case import Clock, Gate, TroubledStore
from hicache.engine import Prefetch
from hicache.flow.cost import PrefillCost
from hicache.serving import Chunk, Request, Scheduler
from hicache.serving.order import ServingOrder
from hicache.serving.request_queue import RequestQueue, ScheduledRequest
from hicache.serving.waiting_requests import WaitingRequests
from memory_store import MemoryPageStore
from serving_case import VOCAB, prompt, shared, tiny_engine, tiny_llama, tiny_runner
from waiting import eventually

_OVERTAKE_S = 0.2  # seconds: 4 times 50 remaining tokens at 1 ms, the speed assumed before any pass


@dataclass
class _Known:
    """A request in the reference model of the order."""

    submitted_s: float
    priority: int
    left: int

    def rank_s(self, overtake_s: float) -> float:
        return self.submitted_s - self.priority * 15.0 + min(overtake_s, 4 * self.left / 100)


@pytest.mark.parametrize("overtake_s", [0.0, 1.0, 15.0])
def test_queues_follow_the_model_and_bound_overtaking(overtake_s: float) -> None:
    """Over random arrivals, ends and hits the order equals that of the reference model. No request is served before one
    that was submitted earlier by more than the bound. Requests submitted together are ordered by priority first."""
    rng, known = np.random.default_rng(int(overtake_s)), dict[int, _Known]()
    speed = PrefillCost()
    speed.assume(0.01, 0.0)
    queue = RequestQueue(ServingOrder(overtake_s, speed).rank_s)
    requests, now_s = list[ScheduledRequest](), 0.0
    for arrival in range(400):
        now_s += float(rng.choice([0.0, 0.0, 0.3, 3.0]))
        length, priority = int(rng.integers(1, 900)), int(rng.choice([-1, 0, 0, 1]))
        request = Request(str(arrival), np.zeros(length, np.int64), 1, priority=priority)
        requests.append(ScheduledRequest(request, arrival, now_s, priority * 15.0))
        known[arrival] = _Known(now_s, priority, length)
        queue.add(requests[-1])
        for _ in range(2):
            hit = requests[rng.choice(list(known))]
            hit.expected_len = int(rng.integers(0, hit.length + 1))
            known[hit.arrival].left = hit.length - hit.expected_len
            queue.update(hit)
        if len(known) > 30 or rng.random() < 0.3:
            ended = requests[rng.choice(list(known))]
            queue.discard(ended)
            del known[ended.arrival]
        assert [req.arrival for req in queue] == sorted(known, key=lambda i: (known[i].rank_s(overtake_s), i))
        served = [known[req.arrival] for req in queue]
        for place, first in enumerate(served):
            for behind in served[place + 1 :]:
                later_s = first.submitted_s - behind.submitted_s
                assert first.priority != behind.priority or later_s <= overtake_s + 1e-9
                assert later_s or first.priority >= behind.priority


def test_waiting_requests_follow_their_prefetches_and_the_speed() -> None:
    """A request enters the queue when its prefetch is ready, and its prefix is looked up first. The rank of a request
    changes when it stops yielding, and the ranks of all requests change with a new speed of prefill."""
    speed = PrefillCost()
    speed.assume(0.01, 0.0)
    waiting = WaitingRequests(ServingOrder(10.0, speed))
    prompts = [Request(str(n), np.zeros(length, np.int64), 1) for n, length in enumerate((150, 140, 80))]
    requests = [ScheduledRequest(request, n, float(n)) for n, request in enumerate(prompts)]
    handles = [Prefetch(req.request_id, "auto") for req in requests]
    handles[2].stop_waiting()
    for req, handle in zip(requests, handles, strict=True):
        waiting.add(req, handle)

    def order() -> str:
        waiting.update()
        return "".join(req.request_id for req in waiting)

    assert order() == "2" and waiting.next_to_look_up(0) is None
    handles[0].stop_waiting(is_preemptible=True)
    assert order() == "20" and waiting.next_to_look_up(0) is requests[0]
    waiting.note_look_up(requests[0])
    handles[1].stop_waiting()
    assert order() == "210"  # 5.2 s, 6.6 s, 10 s
    handles[0].stop_waiting()
    assert order() == "201"  # 5.2 s, 6 s, 6.6 s
    speed.observe(1000, 1.0, 0.0)
    assert order() == "012"
    waiting.discard(requests[1])
    handles[1].end()
    assert order() == "02"


def _served(scheduler: Scheduler) -> str:
    """The names of all requests, in the order of their ends."""
    return "".join(output.request_id for output in scheduler.run())


@pytest.mark.parametrize(("overtake_s", "order"), [(0.0, "abcd"), (_OVERTAKE_S, "dcba")])
def test_what_is_hit_and_what_is_short_goes_first(overtake_s: float, order: str) -> None:
    """Four requests wait: a long, a middle and a short prompt, and the longest, of which the device holds all but a few
    tokens. The request with the fewest tokens to compute is served first."""
    model, cached = shared(tiny_llama), prompt(96, seed=0)
    with tiny_engine(model, max_requests=1) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), max_overtake_s=overtake_s, clock=Clock())
        scheduler.run([Request("warm", cached, 1)])
        prompts = (prompt(48, seed=1), prompt(40, seed=2), prompt(20, seed=3), np.append(cached, 1))
        for name, tokens in zip("abcd", prompts, strict=True):
            scheduler.submit(Request(name, tokens, 2))
        assert _served(scheduler) == order


def test_what_another_computes_meanwhile_counts() -> None:
    """The prompt with the most remaining tokens is served first when the running request has computed most of it."""
    model, common = shared(tiny_llama), prompt(64, seed=0)
    with tiny_engine(model, max_requests=1) as engine:
        scheduler = Scheduler(
            engine, tiny_runner(model, engine), chunk_tokens=16, max_overtake_s=_OVERTAKE_S, clock=Clock()
        )
        scheduler.submit(Request("a", common, 2))
        scheduler.step()
        scheduler.submit(Request("b", prompt(40, seed=1), 2))
        scheduler.submit(Request("c", np.append(common, 1), 2))
        assert _served(scheduler) == "acb"


def test_what_prompts_begin_with_alike_is_computed_once() -> None:
    """Of four requests with a common beginning one computes it, and the others compute their remaining tokens. A
    request of higher priority does not wait for a lower one that computes its prefix."""
    model, common = shared(tiny_llama), prompt(64, seed=0)
    with tiny_engine(model, max_requests=8) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), chunk_tokens=16, clock=Clock())
        alike = [np.append(common, [number, 7]) for number in range(1, 5)]
        outputs = scheduler.run([Request(str(number), tokens, 2) for number, tokens in enumerate(alike)])
        assert sorted(output.computed_tokens for output in outputs) == [2, 2, 2, 66]

        scheduler.submit(Request("low", prompt(64, seed=9), 2))
        scheduler.step()
        scheduler.submit(Request("high", np.append(prompt(64, seed=9), 1), 2, priority=1))
        assert _served(scheduler)[:4] == "high"


def test_a_prompt_holds_slots_when_it_comes_soon() -> None:
    """A prompt takes no slots while two passes of other requests are before its own, and a later short prompt overtakes
    it."""
    model = shared(tiny_llama)
    with tiny_engine(model, max_requests=8) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), chunk_tokens=16, clock=Clock())
        for name, length in (("a", 90), ("b", 90)):
            scheduler.submit(Request(name, prompt(length, seed=ord(name)), 2))
        scheduler.step()
        assert scheduler.num_running == 1
        scheduler.submit(Request("c", prompt(10, seed=3), 2))
        assert _served(scheduler) == "cab"


@pytest.mark.parametrize("pending", [False, True])
def test_a_step_costs_the_same_however_many_requests_wait(*, pending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request decodes, a step costs the same for 10 and for 1000 waiting requests, which are ready or wait
    for a store that does not answer. No rank is computed again."""
    store, model = TroubledStore(MemoryPageStore(1 << 20)), shared(tiny_llama)
    given = functools.partial(hicache.build.store_tiers.open_given, clock=Clock())
    monkeypatch.setattr(hicache.build.store_tiers, "open_given", given)
    calls = dict[int, list[int]]()
    for number in (10, 1000):
        with tiny_engine(model, store=store, host_bytes=1 << 20, device_tokens=2048) as engine:
            scheduler = Scheduler(engine, _TimedRunner(Clock()), max_running=1, clock=Clock())
            scheduler.submit(Request("runs", prompt(20, seed=0), 900))
            eventually(lambda: scheduler.step() or scheduler.num_running == 1)  # noqa: B023
            gate = store.trouble = Gate(*(["contains"] if pending else []))
            for n in range(number):
                scheduler.submit(Request(str(n), prompt(20, seed=n + 1), 1))
            still = number if pending else 0
            eventually(lambda: scheduler.step() or engine.stats()["prefetch.waiting_requests"] == still)  # noqa: B023
            for _ in range(number // 4 + 2):
                scheduler.step()  # looks up the prefixes of all requests that have become ready
            calls[number] = sorted(calls_of(scheduler.step) for _ in range(9))
            scheduler.abort_all()
            gate.open()
    assert calls[1000][4] <= calls[10][4] + 20, calls


class _TimedRunner:
    """A runner that computes nothing. On the runner's clock a pass takes 10 ms, and 0.5 ms a token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        self._clock.now_s += 0.01 + 5e-4 * sum(chunk.end - chunk.start for chunk in chunks)
        return torch.zeros(len(chunks), VOCAB)
