"""How a request of the scheduler is served and ends: streams of tokens, priorities, deadlines, aborts at any moment."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from disk_case import Clock
from hicache import ConfigError, InvalidTokens, TransferError
from hicache.kernels.page_copy import PageMover
from hicache.serving import Request, RequestOutput, SamplingParams, Scheduler
from hicache.serving.request import FinishReason, TokenLogprobs
from hybrid_case import tiny_qwen3_next
from serving_case import (
    assert_released,
    plain_greedy,
    plain_logits,
    prompt,
    shared,
    tiny_engine,
    tiny_llama,
    tiny_runner,
    token_bytes,
)


def _drain(scheduler: Scheduler) -> dict[str, RequestOutput]:
    """Run the scheduler to the end. Returns outputs by request id, in the order in which requests ended."""
    return {output.request_id: output for output in scheduler.run()}


@pytest.mark.parametrize(("level_s", "order"), [(15.0, "baedc"), (1e9, "beadc"), (0.0, "abcde")])
def test_a_level_of_priority_is_worth_some_seconds(level_s: float, order: str) -> None:
    """With one row, requests are served by arrival time minus the seconds that their priority is worth. So no request
    starves, and none that has waited is preempted. With 0 seconds a level, priority is ignored."""
    model, clock = shared(tiny_llama), Clock()
    with tiny_engine(model, max_requests=1) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), priority_level_s=level_s, clock=clock)
        for name, priority, wait_s in (("a", 0, 10), ("b", 5, 0), ("c", -1, 5), ("d", 0, 10), ("e", 1, 0)):
            scheduler.submit(Request(name, prompt(20, seed=ord(name)), 3, priority=priority))
            clock.now_s += wait_s
        assert "".join(_drain(scheduler)) == order


def test_priority_does_not_reach_the_cache() -> None:
    """The scheduler's priority is no priority of the cache: under the eviction policy "priority", prompts of a high
    priority are evicted like others."""
    model = shared(tiny_llama)
    with tiny_engine(model, device_tokens=128, host_bytes=0, eviction_policy="priority") as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        for seed in range(4):
            scheduler.run([Request(f"r{seed}", prompt(48, seed=seed), 1, priority=9 - seed)])
        assert [engine.lookup(prompt(48, seed=seed)).device > 0 for seed in (0, 3)] == [False, True]


def test_the_prompt_of_a_session_that_ends_leaves_first() -> None:
    """The prompt of a session with an end hint is evicted before an older prompt. The request was preempted once, and
    the session did not end then."""
    model = shared(tiny_llama)
    with tiny_engine(model, device_tokens=160, host_bytes=0, eviction_policy="auto", max_requests=1) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        scheduler.run([Request("goes on", prompt(48, seed=0), 1)])
        scheduler.submit(Request("ends", prompt(48, seed=1), 4, session_end=True))
        scheduler.step()
        scheduler.submit(Request("high", prompt(17, seed=2), 1, priority=1))
        outputs = _drain(scheduler)
        assert outputs["ends"].preemptions == 1
        scheduler.run([Request("new", prompt(88, seed=3), 1)])
        assert [engine.lookup(prompt(48, seed=seed)).device for seed in (0, 1)] == [44, 8]


@pytest.mark.parametrize("limit", ["max_requests", "max_running", "device_tokens"])
def test_a_higher_priority_takes_the_place_of_a_lower(limit: str) -> None:
    """If a request finds no row, no capacity in the batch or no slots, it preempts a request of lower priority, but
    none of its own priority. The preempted request continues with the same tokens."""
    model = shared(tiny_llama)
    settings = {"max_requests": 1} if limit == "max_requests" else {}
    settings |= {"device_tokens": 128} if limit == "device_tokens" else {}
    with tiny_engine(model, **settings) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), max_running=1 if limit == "max_running" else 8)
        scheduler.submit(Request("low", prompt(60, seed=1), 20))
        for _ in range(5):
            assert not scheduler.step()
        for name, seed in (("high", 2), ("equal", 3)):
            scheduler.submit(Request(name, prompt(70, seed=seed), 30, priority=1))
        outputs = _drain(scheduler)
        assert_released(engine)
    assert list(outputs) == ["high", "equal", "low"]
    assert [output.preemptions for output in outputs.values()] == [0, 0, 1]
    assert outputs["low"].tokens == plain_greedy(model, prompt(60, seed=1), 20)


class Rising:
    """A constraint under which each token is the next number, up to an end."""

    def __init__(self, end: int, outcome: FinishReason) -> None:
        self.next, self._end, self._outcome = 0, end, outcome

    @property
    def outcome(self) -> FinishReason | None:
        return self._outcome if self.next == self._end else None

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.arange(self._end + 1) == self.next  # the constraint forbids tokens that it does not know

    def take(self, token: int) -> None:
        assert token == self.next
        self.next += 1


@pytest.mark.parametrize("outcome", ["stop", "error"])
def test_a_constraint_chooses_and_ends(outcome: FinishReason) -> None:
    """A request gets only tokens that its constraint allows, greedy or sampled, also after a preemption. A request ends
    with the outcome of its constraint. Other requests of the batch are not affected."""
    model = shared(tiny_llama)
    with tiny_engine(model, device_tokens=176) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        drawn = SamplingParams(1.0, presence_penalty=1.0)
        for name, params in (("greedy", SamplingParams()), ("drawn", drawn)):
            scheduler.submit(Request(name, prompt(20, seed=1), 60, params, constraint=Rising(30, outcome)))
        for _ in range(10):
            assert not scheduler.step()
        scheduler.submit(Request("high", prompt(100, seed=2), 20, priority=1))
        outputs = _drain(scheduler)
        assert_released(engine)
    for name in ("greedy", "drawn"):
        assert (outputs[name].tokens, outputs[name].finish_reason) == (tuple(range(30)), outcome)
    assert outputs["greedy"].preemptions + outputs["drawn"].preemptions > 0
    assert outputs["high"].tokens == plain_greedy(model, prompt(100, seed=2), 20)


@pytest.mark.parametrize("host_tokens", [0, 272])
def test_what_queued_requests_need_is_evicted_last(host_tokens: int) -> None:
    """The device, or device and host together, cannot hold all prompts. A long request runs before the queued ones, and
    evicts prefixes that no queued request needs, although they are younger. So the queued requests hit."""
    model = shared(tiny_llama)
    needed, others = [prompt(64, seed=i) for i in range(2)], [prompt(64, seed=10 + i) for i in range(2)]
    settings = {"device_tokens": 128 if host_tokens else 368, "host_bytes": host_tokens * token_bytes(model)}
    with tiny_engine(model, **settings) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), max_running=1)
        for i, tokens in enumerate([*needed, *others]):
            scheduler.run([Request(f"warm {i}", tokens, 1)])
            engine.flush()
        scheduler.submit(Request("long", prompt(100, seed=20), 24 if host_tokens else 120))
        for i, tokens in enumerate(needed):
            scheduler.submit(Request(f"needed {i}", np.concatenate([tokens, prompt(5, seed=30 + i)]), 3))
        outputs = _drain(scheduler)
        assert_released(engine)
        assert engine.stats()["admit.expected_requests"] == 0
    for i in range(2):
        assert outputs[f"needed {i}"].cached_len == 64, outputs[f"needed {i}"]


@pytest.mark.parametrize(
    ("write_policy", "params"),
    [("write_through", SamplingParams()), ("write_back", SamplingParams(1.0, top_k=30, seed=5, frequency_penalty=1.0))],
)
def test_a_preempted_request_resumes_from_the_host(write_policy: str, params: SamplingParams) -> None:
    """A request is preempted in the middle of its answer, and another request takes its slots. The preempted request
    loads its pages from the host and continues with the tokens of a run without preemption."""
    model = shared(tiny_llama)
    low = Request("low", prompt(60, seed=1), 60, params)
    settings = {"device_tokens": 208, "host_bytes": 512 * token_bytes(model), "write_policy": write_policy}
    with tiny_engine(model, **settings) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        expected = scheduler.run([low])[0].tokens
    with tiny_engine(model, **settings) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        scheduler.submit(low)
        for _ in range(30):
            scheduler.step()
        scheduler.submit(Request("high", prompt(150, seed=2), 40, priority=1))
        before = engine.stats()
        outputs = _drain(scheduler)
        assert_released(engine)
        after = engine.stats()
        resumed = (after["restore.bytes"] - before["restore.bytes"]) / token_bytes(model)
    assert outputs["low"].preemptions == 1 and list(outputs) == ["high", "low"]
    assert resumed >= 64, "pages beyond the prompt came from the host"
    assert (after["admit.prompt_tokens"], after["admit.hit_ratio"]) == (60 + 150, 0), "they are its own, and no hit"
    assert (after["admit.requests"], after["admit.uncounted_requests"]) == (2, 1)
    assert 60 < outputs["low"].computed_tokens <= 60 + 16, "at most a page is computed again"
    assert outputs["low"].tokens == expected


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3_next], ids=["full", "hybrid"])
def test_log_probabilities_are_those_of_a_whole_pass(build: Callable[[], Any]) -> None:
    """Each token of answer and prompt has its log probability once, in order. The prompt is cached, runs in chunks
    together with other requests, and is preempted by a request that caches the rest of it."""
    model = shared(build)
    scored = Request("scored", prompt(90, seed=1), 6, num_logprobs=3, scores_prompt=True)
    high = Request("high", np.concatenate([scored.tokens[:70], prompt(9, seed=2)]), 3, priority=1, num_logprobs=1)
    found: dict[str, list[TokenLogprobs]] = {"scored": [], "high": []}
    with tiny_engine(model, max_requests=2, mamba_size=8) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), chunk_tokens=40)
        for warm in (Request("warm", scored.tokens[:50], 1), Request("other", prompt(30, seed=3), 1)):
            scheduler.run([warm])
        scheduler.submit(Request("beside", prompt(30, seed=4), 40))
        scheduler.submit(scored, logprobs=found["scored"])
        while len(found["scored"]) < 30:
            scheduler.step()
        scheduler.submit(high, logprobs=found["high"])
        outputs = _drain(scheduler)
        assert_released(engine)
    assert outputs["scored"].cached_len == 0 and outputs["scored"].preemptions == 1
    assert outputs["high"].cached_len >= 16
    assert found["scored"].pop(0) == TokenLogprobs(int(scored.tokens[0]), None)
    for request, first in ((scored, 1), (high, len(high.tokens))):
        sequence = [*request.tokens, *outputs[request.request_id].tokens]
        expected = plain_logits(model, sequence).log_softmax(-1)[first - 1 : -1]
        entries = found[request.request_id]
        assert [entry.token for entry in entries] == sequence[first:]
        got = torch.tensor([[entry.logprob, *(value for _, value in entry.top)] for entry in entries])
        values, ids = expected.topk(request.num_logprobs or 0, -1)
        chosen = expected.gather(-1, torch.tensor(sequence[first:])[:, None])
        torch.testing.assert_close(got, torch.cat([chosen, values], -1), rtol=1e-3, atol=1e-3)
        assert [[token for token, _ in entry.top] for entry in entries] == ids.tolist()


def test_a_failed_load_concerns_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request decodes, the load of a second fails twice, which ends the second. The load of a third fails
    once, and it is served after a retry. All other requests get the same tokens as without failures."""
    model = shared(tiny_llama, device="cpu")
    cached = {name: prompt(100, seed=i) for i, name in enumerate(["fails", "retries"])}
    scatter, failures = PageMover.scatter, [0]

    def failing(*args: object, **kwargs: object) -> None:
        if failures[0] > 0:
            failures[0] -= 1
            raise RuntimeError("the link is down")
        scatter(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(PageMover, "scatter", failing)
    with tiny_engine(model, device_tokens=320, host_bytes=1024 * token_bytes(model)) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        for name, tokens in cached.items():
            scheduler.run([Request(f"warm {name}", tokens, 1)])
        scheduler.run([Request("filler", prompt(300, seed=5), 1)])
        engine.flush()
        scheduler.submit(Request("decodes", prompt(20, seed=6), 60))
        scheduler.step()
        outputs = {}
        for name, num_failures in (("fails", 2), ("retries", 1)):
            failures[0] = num_failures
            scheduler.submit(Request(name, cached[name], 5))
            while scheduler.num_unfinished > 1:
                outputs |= {output.request_id: output for output in scheduler.step()}
                engine.check()
            assert failures[0] == 0
        outputs |= _drain(scheduler)
        assert_released(engine)
    assert isinstance(outputs["fails"].error, TransferError)
    assert outputs["retries"].tokens == plain_greedy(model, cached["retries"], 5)
    assert outputs["decodes"].tokens == plain_greedy(model, prompt(20, seed=6), 60, outputs["decodes"].tokens)
    assert [outputs[name].preemptions for name in ("retries", "decodes")] == [0, 0]


def test_a_request_that_ended_before_its_deadline_is_forgotten() -> None:
    """The tokens and the callback of a request are freed when it ends, also long before its deadline."""
    model, stream = shared(tiny_llama), _Stream()
    forgotten = weakref.ref(stream)
    with tiny_engine(model) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        scheduler.submit(Request("r", prompt(10, seed=1), 3, deadline_s=600.0), stream)
        del stream
        assert len(scheduler.run()) == 1
        gc.collect()
        assert forgotten() is None


class _Stream:
    def __call__(self, token: int) -> None:
        """Take a token."""


def test_a_finished_answer_stays_in_the_cache_and_an_aborted_one_does_not() -> None:
    """If a caller finishes a request early, the next turn also hits the pages of its answer. If the caller aborts it,
    only those of the prompt."""
    model = shared(tiny_llama)
    with tiny_engine(model) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        hits = {}
        for seed, end in enumerate((scheduler.finish, scheduler.abort)):
            tokens: list[int] = []

            def on_token(token: int, end: Callable[[str], bool] = end, tokens: list[int] = tokens) -> None:
                tokens.append(token)
                if len(tokens) == 40:
                    assert end("r")

            scheduler.submit(Request("r", prompt(32, seed=seed), 100), on_token)
            output = _drain(scheduler)["r"]
            assert output.tokens == tuple(tokens) and output.finish_reason == ("abort" if seed else "stop")
            turn = np.concatenate([prompt(32, seed=seed), np.array(tokens)])
            hits[output.finish_reason] = scheduler.run([Request("next", turn, 1)])[0].hit.device
        assert_released(engine)
    assert hits == {"stop": 68, "abort": 32}  # complete pages of 71 tokens with KV, and of the prompt alone


WRONG: list[tuple[type, dict[str, Any]]] = [
    *((Request, {"deadline_s": value}) for value in (0.0, -1.0, float("nan"))),
    *(
        (Request, fields)
        for fields in (
            {"priority": "high"},
            {"priority": 1 << 32},
            {"max_new_tokens": 0},
            {"tokens": prompt(0, seed=0)},
        )
    ),
    *((SamplingParams, fields) for fields in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"seed": -1})),
    *((SamplingParams, fields) for fields in ({"min_p": 1.5}, {"min_tokens": -1}, {"repetition_penalty": 0.0})),
    *((SamplingParams, fields) for fields in ({"presence_penalty": float("nan")}, {"logit_bias": ((-1, 0.0),)})),
]


@pytest.mark.parametrize(("kind", "wrong"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)))
def test_wrong_settings_of_a_request_are_refused(kind: type, wrong: dict[str, Any]) -> None:
    """ConfigError names the wrong field: an empty prompt, nothing to generate, a deadline that has passed or is no
    number, a priority that is no integer, sampling out of range."""
    fields = {"request_id": "r", "tokens": prompt(3, seed=0), "max_new_tokens": 1} if kind is Request else {}
    (name,) = wrong
    with pytest.raises(ConfigError, match="prompt" if name == "tokens" else name):
        kind(**{**fields, **wrong})


def test_a_request_that_cannot_be_served_is_refused_at_once() -> None:
    """An invalid token raises InvalidTokens at submission. An id in use, and a scheduler that could compute nothing,
    raise ConfigError. Nothing is queued, and the next request is served."""
    model = shared(tiny_llama)
    with tiny_engine(model) as engine:
        with pytest.raises(ConfigError, match="chunk_tokens"):
            Scheduler(engine, tiny_runner(model, engine), chunk_tokens=0)
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        with pytest.raises(InvalidTokens):
            scheduler.submit(Request("r", np.array([3, -1]), 2))
        assert scheduler.num_unfinished == 0 and not scheduler.step()
        scheduler.submit(Request("r", prompt(20, seed=1), 2))
        with pytest.raises(ConfigError, match="'r'"):
            scheduler.submit(Request("r", prompt(3, seed=0), 1))
        assert _drain(scheduler)["r"].tokens == plain_greedy(model, prompt(20, seed=1), 2)
        assert_released(engine)
