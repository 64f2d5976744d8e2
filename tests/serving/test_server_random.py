"""Hundreds of random requests against tiny pools, many cut off: afterwards everything is where it began."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from server_case import SECRET, TINY, serving

if TYPE_CHECKING:
    import openai

NUM_CLIENTS = 8
STEMS = [f"{SECRET} {stem} " * 6 for stem in "abcd"]


async def one(client: openai.AsyncOpenAI, choice: random.Random) -> str:
    """A random request; returns how it ended. A third of the clients go away at some moment."""
    import openai

    prompt = choice.choice(STEMS)[: choice.randint(1, 90)] + str(choice.randint(0, 3))
    arguments: dict[str, Any] = {
        "model": "random",
        "max_tokens": choice.choice([1, 4, 20, 60, 120, 5000]),
        "temperature": choice.choice([0, 1]),
        "stream": choice.random() < 0.6,
        "stop": choice.choice([None, None, ["a", "\x10"]]),
        "n": choice.choice([1, 1, 3]),
        "frequency_penalty": choice.choice([0, 1]),
        "extra_body": {"priority": choice.randint(-2, 2), "cache_salt": choice.choice(["a", "b"])},
    }
    if choice.random() < 0.5:
        call: Any = client.completions.create(prompt=[prompt] * choice.randint(1, 3), **arguments)
    else:
        call = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **arguments)
    patience_s = choice.choice([None, None, choice.uniform(0, 0.5)])
    try:
        return await asyncio.wait_for(_read(call, arguments["stream"], choice.randint(1, 30)), patience_s)
    except asyncio.TimeoutError:
        return "cancelled"
    except openai.APIError as error:
        return str(error.code)


async def _read(call: Any, streams: bool, num_events: int) -> str:
    answer = await call
    if streams:
        async for event in answer:
            num_events -= 1
            if not num_events:
                await answer.close()
                return "closed"
            answer_reason = event.choices[0].finish_reason if event.choices else None
        return f"stream {answer_reason}"
    return str(answer.choices[0].finish_reason)


@pytest.mark.parametrize("num_requests", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_random_requests(num_requests: int, tmp_path: Path) -> None:
    """Ended, aborted, cut off, timed out or refused: at the end nothing runs, nothing waits, no slot is held, and the
    check of the engine finds nothing."""
    import openai

    sizes = ("--device-tokens", "256", "--host-bytes", "1MiB", "--max-context-len", "8192")
    limits = ("--max-running", "4", "--max-queued", "12", "--request-timeout-s", "1")
    disk = ("--disk-path", str(tmp_path / "disk"), "--model-id", "tiny")

    async def clients(url: str) -> Counter[str]:
        ends: Counter[str] = Counter()
        numbers = iter(range(num_requests))

        async def work() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
                for number in numbers:
                    ends[await one(client, random.Random(number))] += 1

        await asyncio.gather(*(work() for _ in range(NUM_CLIENTS)))
        return ends

    with serving(tmp_path, *TINY, *sizes, *limits, *disk) as server:
        free_tokens = server.metric("hicache_device_free_tokens")
        ends = asyncio.run(clients(server.url))
        assert sum(ends.values()) == num_requests
        server.wait_idle()
        server.wait_for("hicache_engine_leases", 0)
        server.wait_for("hicache_device_protected_tokens", 0)
        evictable_tokens = server.metric('hicache_tier_evictable_tokens{tier="device"}')
        assert server.metric("hicache_device_free_tokens") + evictable_tokens == free_tokens
        assert not {"internal_error", "engine_failed"} & ends.keys(), ends
        assert server.metric("hicache_generation_tokens_total")
        with pytest.raises(openai.BadRequestError) as too_long:
            server.client().completions.create(model="random", prompt=SECRET, max_tokens=5000)
        assert too_long.value.code == "context_length_exceeded"
