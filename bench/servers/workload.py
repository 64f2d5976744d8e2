"""Generates the prompts that a server answers: sessions of agents, or conversations, which share few tokens.

`agents`: All sessions begin with the same `common` tokens. The session of each turn is drawn uniformly from the
sessions with turns left. A turn extends the session's prompt by max(64, min(4 growth, Exp(growth))) new tokens, where
Exp is the exponential distribution with the mean `growth`. The prompt is cut at `longest` tokens.

`conversation`: The first `requests` prompts of a trace (`hicache.replay.trace`) that have at most `longest` tokens.
Each block of the trace becomes `block_tokens` tokens. Without a trace, a fourth of the prompts begin with the same
three blocks, and lengths have an exponential distribution.

Values are drawn from Python's generator with a seed, so they are equal on all machines.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hicache.bench.common import BenchUnavailable
from hicache.replay.trace import read_trace

_VOCABULARY = (3, 31_000)  # range of token ids
_TINY_VOCABULARY = 240  # token ids of a tiny model, from 10 on
_HEAD_BLOCKS, _HEADS_OF = 3, 4
_MEAN_BLOCKS = 20


@dataclass(frozen=True)
class Request:
    """A prompt of a session, as token ids."""

    session: str
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes of a workload. `sessions`, `turns`, `growth` and `common` apply to agents; `requests` and
    `block_tokens` apply to conversations. `growth`, `common`, `longest` and `block_tokens` are in tokens."""

    name: str
    sessions: int = 0
    turns: int = 0
    growth: int = 0
    common: int = 0
    requests: int = 0
    block_tokens: int = 0
    longest: int
    seed: int
    trace: str = ""  # path
    is_tiny: bool = False  # use a vocabulary of 256 token ids

    @property
    def label(self) -> str:
        """A text with the sizes that distinguish workloads of the same name."""
        if self.name == "agents":
            return f"{self.sessions}x{self.turns}x{self.growth}"
        return f"{Path(self.trace).stem or 'generated'}{self.requests}"

    def prompts(self) -> list[Request]:
        """Generate or read the prompts. Raises BenchUnavailable if the trace has no suitable prompt."""
        found = list(self._agents() if self.name == "agents" else self._conversations())
        if not found:
            raise BenchUnavailable(f"--trace {self.trace}: no prompt of at most {self.longest} tokens")
        return found

    def _agents(self) -> Iterator[Request]:
        generator = random.Random(self.seed)
        prompts = [self._tokens(generator, self.common)] * self.sessions
        left = [self.turns] * self.sessions
        while any(left):
            session = generator.choice([number for number, turns in enumerate(left) if turns])
            left[session] -= 1
            num_new = max(64, min(4 * self.growth, int(generator.expovariate(1 / self.growth))))
            prompts[session] = (prompts[session] + self._tokens(generator, num_new))[: self.longest]
            yield Request(f"session {session}", prompts[session])

    def _conversations(self) -> Iterator[Request]:
        fitting = (
            (session, blocks) for session, blocks in self._blocks() if len(blocks) * self.block_tokens <= self.longest
        )
        for session, blocks in itertools.islice(fitting, self.requests):
            tokens = [self._tokens(random.Random(block), self.block_tokens) for block in blocks]
            yield Request(session, list(itertools.chain.from_iterable(tokens)))

    def _blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the session and the block ids of each request."""
        if self.trace:
            for number, request in enumerate(read_trace(self.trace).requests):
                yield request.session or f"request {number}", request.blocks.tolist()
            return
        generator, ids = random.Random(self.seed), itertools.count(_HEAD_BLOCKS)
        for number in range(2 * self.requests):
            head = list(range(_HEAD_BLOCKS)) if generator.randrange(_HEADS_OF) == 0 else []
            num_new = 1 + int(generator.expovariate(1 / _MEAN_BLOCKS))
            yield f"request {number}", head + list(itertools.islice(ids, num_new))

    def _tokens(self, generator: random.Random, count: int) -> list[int]:
        tokens = [generator.randrange(*_VOCABULARY) for _ in range(count)]
        return [10 + token % _TINY_VOCABULARY for token in tokens] if self.is_tiny else tokens


def distinct_tokens(prompts: list[Request]) -> int:
    """Return the number of tokens that a cache of all prompts stores. The prefix that a prompt shares with an earlier
    prompt does not count again. Tokens are counted in pieces of 64."""
    known = set[int]()
    for request in prompts:
        key = 0
        for start in range(0, len(request.tokens), 64):
            key = hash((key, *request.tokens[start : start + 64]))
            known.add(key)
    return 64 * len(known)


def describe(prompts: list[Request]) -> str:
    """Describe prompts in one line."""
    sizes = sorted(len(request.tokens) for request in prompts)
    sessions = len({request.session for request in prompts})
    return (
        f"{len(prompts)} prompts of {sessions} sessions, {sizes[0]} to {sizes[-1]} tokens, {sum(sizes)} in all, "
        f"{distinct_tokens(prompts)} of them distinct"
    )
