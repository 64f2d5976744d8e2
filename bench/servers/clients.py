"""Clients of a server that send the prompts of sessions. A client sends its next prompt when its previous prompt is
answered.

The module does not depend on a server, because the caller passes a function that sends a prompt. Times are in seconds
of the client's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hicache.bench.servers.workload import Request
from hicache.bench.sessions import TurnQueue


@dataclass(frozen=True)
class Answer:
    """The answer to prompt `number`. `first_s`: seconds from sending the prompt to the first token. `between_s`:
    seconds between two outputs of the server, which have one token each unless the client is slower than the server."""

    number: int
    first_s: float
    between_s: list[float]
    prompt_tokens: int
    cached: int  # prompt tokens that the server reports as cached
    tokens: list[int]


Client = Callable[[int], Awaitable[Answer]]


async def send(
    ask: Client, requests: Sequence[Request], num_clients: int, limit_s: float
) -> tuple[float, list[Answer]]:
    """Send all prompts until all are answered or `limit_s` has passed. Each client sends one prompt at a time. `ask`:
    sends the prompt with the given number. Returns the total seconds, and the answers."""
    answers: list[Answer] = []
    begin_s, left = time.perf_counter(), TurnQueue(requests)
    with contextlib.suppress(TimeoutError):  # of the limit; requests raise theirs in an ExceptionGroup
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(_client(ask, left, answers))
    return time.perf_counter() - begin_s, answers


async def _client(ask: Client, left: TurnQueue[Request], answers: list[Answer]) -> None:
    while (taken := left.take()) is not None:
        number, request = taken
        answers.append(await ask(number))
        left.answered(request)
