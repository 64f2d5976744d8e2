"""Traces of requests for tests of the replay."""

from __future__ import annotations

import numpy as np

from hicache.pages.key import Tokens
from hicache.replay.trace import Trace, TraceRequest


def synthetic_trace(num_requests: int = 2_000) -> list[Tokens]:
    """Chats over a few system prompts. A turn repeats the chat and adds blocks. Some turns repeat or replace the turn
    before, and some continue a chat after a long pause."""
    dice = np.random.default_rng(0)
    next_id = 0

    def fresh(most: int) -> Tokens:
        nonlocal next_id
        start, next_id = next_id, next_id + int(dice.integers(1, most + 1))
        return np.arange(start, next_id)

    systems = [fresh(8) for _ in range(20)]
    chats: list[list[Tokens]] = []
    requests = []
    for _ in range(num_requests):
        turn = dice.random()
        if turn < 0.4 or not chats:
            chats.append([systems[min(int(dice.zipf(1.5)), len(systems)) - 1]])
            chat = chats[-1]
        else:
            chat = chats[-1 - int(dice.exponential(150)) % len(chats)]
            if turn < 0.5 and len(chat) > 1:
                chat.pop()
        if turn < 0.9:
            chat.append(fresh(32))
        requests.append(np.concatenate(chat))
    return requests


def trace_of(*prompts: list[int] | Tokens, block_tokens: int = 4) -> Trace:
    """A trace with one request a second; all blocks of its prompts are complete."""
    requests = [
        TraceRequest(float(at), np.array(ids, np.int64), len(ids) * block_tokens, 1) for at, ids in enumerate(prompts)
    ]
    return Trace("generated", block_tokens, tuple(requests))
