"""Hints of requests (`kv_transfer_params`, `kv_hints`) under vLLM's own scheduler, with both plug-ins."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

from hicache.integrations.vllm import hints
from hicache.integrations.vllm.hints import Continuations, Hints, hints_of
from vllm_prompts_case import BLOCK_TOKENS, COMPLETE, CONNECTORS, NUM_CHUNKS, PROMPT_CHUNKS, prompt_of
from vllm_tier_case import key

KEEP = {"keep_s": 3600}


@pytest.mark.smoke
@pytest.mark.parametrize("connector", CONNECTORS)
def test_kept_chunks_stay_in_the_cpu_tier_until_their_deadline(servers: Any, connector: str) -> None:
    """Other prompts of three times the tier's size evict a prompt without a hint, but not one with a deadline. After
    the deadline other prompts evict it too."""
    server = servers(connector)
    server.ask(prompt_of(1), **KEEP)
    server.ask(prompt_of(2))
    server.ask_others(15)
    assert server.ask(prompt_of(1)) == COMPLETE
    assert server.ask(prompt_of(2)) == 0
    now_s = server.policy.clock()
    server.policy.clock = lambda: now_s + 3601
    server.ask_others(15)
    assert server.ask(prompt_of(1)) == 0
    assert not server.policy._expected


@pytest.mark.parametrize("connector", CONNECTORS)
def test_hints_keep_nine_tenths_of_the_tier_and_the_lowest_priority_ends_first(servers: Any, connector: str) -> None:
    """Six prompts with deadlines have more chunks than the tier. The prompts that were sent last stay, and so does the
    first, which has a higher priority."""
    server = servers(connector)
    for seed in range(6):
        server.ask(prompt_of(seed), **KEEP, priority=1 if seed == 0 else 0)
    server.ask_others(8)
    assert server.policy._order.num_kept <= 0.9 * NUM_CHUNKS
    assert [server.ask(prompt_of(seed)) for seed in range(6)] == [COMPLETE, 0, 0, *[COMPLETE] * 3]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_an_ended_session_is_evicted_first_without_what_others_share(servers: Any, connector: str) -> None:
    """Two sessions share a system prompt. The chunks of the session that has ended are evicted first. The system prompt
    and the other session stay, although they were used earlier."""
    server = servers(connector)
    system = prompt_of(1, 3)[: 3 * BLOCK_TOKENS]
    first, second = (prompt_of(seed, PROMPT_CHUNKS, system) for seed in (2, 3))
    server.ask(first)
    server.ask(second, session_end=True)
    server.ask_others(4)
    assert server.ask(first) == COMPLETE
    assert server.ask(second) == len(system)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_disk_keeps_chunks_until_their_deadline_and_writes_nothing_of_an_ended_session(
    servers: Any, connector: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A prompt with a deadline is loaded from the disk, after the disk has stored four times its budget, and the GPU
    and the CPU tier were emptied. Chunks of an ended session are not written."""
    path = tmp_path_factory.mktemp("disk")
    # The bytes of the worker are random and do not compress. A row takes 4 KiB more in the file.
    disk = {"path": str(path), "budget": "1MiB", "level": 0, "prefill_tokens_per_s": 0}
    server = servers(connector, disk=disk)
    [tier] = server.engine.connector.manager.secondary_tiers
    server.ask(prompt_of(1), **KEEP)
    server.ask(prompt_of(2))
    puts = tier._backend.stats().puts
    server.ask(prompt_of(3), session_end=True)
    server.engine.finish()
    assert tier._backend.stats().puts == puts
    server.ask_others(20)
    assert tier._backend.stats().evicted > 2 * tier._backend.stats().entries
    server.reset()
    assert server.ask(prompt_of(1)) == COMPLETE
    assert server.ask(prompt_of(2)) == 0


def context_of(params: Any = None, **payload: Any) -> ReqContext:
    envelope = None
    if payload:
        envelope = KvHintsEnvelope("0.1", "message", [KvHintAction("action", "agent_hint", "1", payload)])
    return ReqContext("request", kv_transfer_params={"hicache": params}, kv_hints=envelope)


def agent_hint(**given: Any) -> ReqContext:
    return ReqContext("request", kv_transfer_params={"agent_hint": given})


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Hints()),
        ({}, Hints()),
        ({"keep_s": 60}, Hints(60)),
        ({"keep_s": 0.5, "priority": 3}, Hints(0.5, 3)),
        ({"priority": 3}, Hints(float("inf"), 3)),
        ({"priority": 0}, Hints()),
        ({"session_end": True}, Hints(session_end=True)),
        ({"session_end": False, "keep_s": 2}, Hints(2)),
    ],
)
def test_hints_are_read(given: Any, expected: Hints, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hicache"):
        assert hints_of(context_of(given)) == expected
        assert hints_of(context_of(priority=2, lease=30)) == Hints(30, 2)
        assert hints_of(agent_hint(priority=2, lease=30)) == Hints(30, 2)
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "expected", "message"),
    [
        ([1], Hints(), "kv_transfer_params.hicache must be an object"),
        ({"keep_s": -1, "priority": 1}, Hints(float("inf"), 1), "keep_s must be seconds from 0 to 86400, got -1"),
        ({"keep_s": float("nan")}, Hints(), "keep_s must be seconds"),
        ({"keep_s": True}, Hints(), "keep_s must be seconds"),
        ({"priority": 1.5, "keep_s": 3}, Hints(3), "priority must be a whole number from 0 to 100, got 1.5"),
        ({"session_end": 1}, Hints(), "session_end must be true or false"),
        ({"kept_s": 1}, Hints(), "kept_s must be one of keep_s, priority, session_end"),
        ({"session_end": True, "keep_s": 5}, Hints(5), "session_end must be alone"),
    ],
)
def test_a_wrong_hint_is_ignored_with_one_warning(
    given: Any, expected: Hints, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong hint is ignored with one warning; valid hints of the same request are used."""
    monkeypatch.setattr(hints, "_warned", set())
    with caplog.at_level(logging.WARNING, "hicache"):
        for _ in range(2):
            assert hints_of(context_of(given)) == expected
    [warning] = {id(record): record.getMessage() for record in caplog.records}.values()
    assert message in warning


def test_what_other_prompts_share() -> None:
    """Shared chunks of a prompt are those up to the last chunk after which another prompt continues differently, or at
    which this prompt ends."""
    known, chunks = Continuations(100), [key(n) for n in range(10)]
    known.note(chunks[:6])
    assert known.num_shared(chunks[:6]) == 0
    known.note([*chunks[:3], key(20), key(21)])
    assert known.num_shared(chunks[:6]) == 3
    assert known.num_shared([*chunks[:3], key(20), key(21)]) == 3
    assert known.num_shared(chunks[:5]) == 5
    assert known.num_shared([key(30), key(31)]) == 0
    for first in range(1000, 2000, 10):
        known.note([key(n) for n in range(first, first + 10)])
    assert len(known._next) <= 100
