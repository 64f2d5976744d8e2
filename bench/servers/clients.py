"""Clients of a server that send the turns of sessions, each client its next turn when the previous one is answered.

The module knows no server: the caller passes a function that sends a turn. Times are seconds of the client's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache.bench.common import percentile
from hicache.bench.sessions import Turn, TurnQueue


@dataclass(frozen=True)
class Answer:
    """An answer to turn `number`. `first_s`, `total_s`: seconds from sending to the first and to the last token."""

    number: int
    first_s: float
    total_s: float
    prompt_tokens: int
    cached: int  # tokens of the prompt that were not computed, by the server's count
    tokens: list[int]


@dataclass(frozen=True)
class LoadRun:
    """The outcome of a load (turns sent by a number of clients). With fewer answers than `requests` it was cut off."""

    requests: int
    makespan_s: float
    answers: list[Answer]
    num_bytes: dict[str, int] = field(default_factory=dict)  # bytes moved, by the server's own metrics
    rates: dict[str, float] = field(default_factory=dict)  # of our gate: decisions so far, and rates at the end

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LoadRun:
        return cls(**{**values, "answers": [Answer(**answer) for answer in values["answers"]]})

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == self.requests

    @property
    def first_ms(self) -> list[float]:
        return [answer.first_s * 1e3 for answer in self.answers]

    @property
    def mean_first_ms(self) -> float:
        return sum(self.first_ms) / len(self.answers)

    @property
    def p99_first_ms(self) -> float:
        return percentile(self.first_ms, 99)

    @property
    def cached_share(self) -> float:
        return sum(answer.cached for answer in self.answers) / sum(answer.prompt_tokens for answer in self.answers)

    @property
    def first_text(self) -> str:
        """Mean and percentiles of the times to the first token, as text."""
        spread = ", ".join(f"p{percent} {percentile(self.first_ms, percent):.0f}" for percent in (50, 90, 99))
        return f"mean {self.mean_first_ms:.0f}, {spread} ms"

    def __str__(self) -> str:
        if not self.answers:
            return f"nothing was answered in {self.makespan_s:.1f} s"
        cut = "" if self.is_complete else f", cut off after {len(self.answers)} of {self.requests} requests"
        return f"{self.makespan_s:.1f} s{cut}, {self.cached_share:.3f} cached, to the first token {self.first_text}"

    def differing_share(self, other: LoadRun) -> float | None:
        """The share of turns with different tokens, among the turns that both answered; None without such turns."""
        theirs = {answer.number: answer.tokens for answer in other.answers}
        both = [answer.tokens != theirs[answer.number] for answer in self.answers if answer.number in theirs]
        return sum(both) / len(both) if both else None


Client = Callable[[int], Awaitable[Answer]]


def name_of(num_clients: int) -> str:
    """The name of a load."""
    return f"c{num_clients}"


async def send(ask: Client, turns: Sequence[Turn], num_clients: int, limit_s: float) -> LoadRun:
    """Send all turns, each client one at a time; cut off after `limit_s`. `ask` gets the number of a turn."""
    answers: list[Answer] = []
    begin_s, turns_left = time.perf_counter(), TurnQueue(turns)
    with contextlib.suppress(TimeoutError):  # a request's own TimeoutError is raised in an ExceptionGroup
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(_client(ask, turns_left, answers))
    return LoadRun(len(turns), time.perf_counter() - begin_s, answers)


async def _client(ask: Client, turns: TurnQueue, answers: list[Answer]) -> None:
    while (taken := turns.take()) is not None:
        number, turn = taken
        answers.append(await ask(number))
        turns.answered(turn)
