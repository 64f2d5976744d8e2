"""Workloads of sessions of coding agents. They are generated to resemble a trace, or as traffic of a given size.

Each turn of a session extends the previous prompt of this session. All sessions begin with one of a few system prompts.
A prompt is a list of block ids, and each id stands for a few tokens, so the length of prompts can be scaled. For
example, if 64 tokens of a trace become 8 tokens, prompts have an eighth of their length. The id of a block determines
the block's tokens.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from hicache.replay.trace import Trace, TraceRequest

_AT_ONCE = 16  # number of concurrent generated sessions
_MEAN_TURNS = 20
_HEADS = 2
_PAUSE_TAIL, _TURNS_TAIL = 1.2, 1.5
_SYSTEM_PROMPTS = 4
_AHEAD = 64  # number of next turns among which a client searches for a session without an open request
_TOKENS = range(10, 250)  # token ids that every vocabulary has


@dataclass(frozen=True)
class Turn:
    """One request. It has a session, and the block ids of the prompt."""

    session: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The number of turns, and the bounds of prompt lengths in tokens. Turns with other lengths are left out."""

    requests: int
    block_tokens: int
    shortest: int = 200
    longest: int = 60_000

    def has(self, num_blocks: int) -> bool:
        return self.shortest <= num_blocks * self.block_tokens <= self.longest


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic of `num_sessions` concurrent sessions. When a session ends, a new session begins.

    All values are drawn from one seeded generator.

        turns of a session  ceil(mean_turns / 3 * Pareto(1.5)): `mean_turns` on average, and many more in a few sessions
        pause before a turn Pareto(1.2), in units of the shortest pause; pauses order the turns of all sessions.
        first prompt        one of 4 system prompts of `system` tokens, the nth with weight 1 / n, followed by
                            LogNormal(ln first, 0.8) new tokens
        each next prompt    the previous prompt and LogNormal(ln more, 1.0) tokens: an answer and the next question

    Pareto(a) exceeds x >= 1 with probability x ** -a. Pauses and lengths of web sessions have such tails, with
    exponents from 1 to 1.5 (Crovella and Bestavros 1997, doi:10.1109/90.650143). The pauses of the agent sessions that
    `docs/replay.md` names have 0.9 to 1.2 by Hill's estimate, from the highest tenth and fiftieth. A prompt that
    reaches the scale's `longest` ends its session; the scale's `shortest` is ignored.
    """

    scale: Scale
    num_sessions: int
    system: int
    first: int
    more: int
    mean_turns: int = 24


@dataclass(frozen=True)
class Workload:
    """Turns in order. `working_set`: mean total number of tokens in the last prompts of all open sessions. A cache of
    this size avoids all recomputation."""

    turns: Sequence[Turn]
    working_set: int


class Prompts:
    """Generates the token ids of turns. Prompts with different `salt` share no block."""

    def __init__(self, block_tokens: int, salt: int) -> None:
        self._block_tokens = block_tokens
        self._salt = salt
        self._known: dict[int, list[int]] = {}

    def of(self, turn: Turn) -> list[int]:
        return [token for block in turn.blocks for token in self._block(block)]

    def _block(self, block: int) -> list[int]:
        if block not in self._known:
            generator = random.Random(f"{self._salt} {block}")
            self._known[block] = generator.choices(_TOKENS, k=self._block_tokens)
        return self._known[block]


def generated_turns(scale: Scale) -> list[Turn]:
    """Generate turns. A session begins with about 1/8 of the tokens of the longest prompt, and each turn adds about
    1/400 of them."""
    generator, ids, names = random.Random(0), itertools.count(), itertools.count()
    longest, shortest = scale.longest // scale.block_tokens, -(-scale.shortest // scale.block_tokens)

    def new_blocks(median: float, spread: float) -> list[int]:
        count = max(1, round(generator.lognormvariate(math.log(median), spread)))
        return list(itertools.islice(ids, count))

    heads = [new_blocks(max(1, longest / 40), 0.3) for _ in range(_HEADS)]
    active: list[tuple[str, list[int]]] = []
    turns: list[Turn] = []
    while len(turns) < scale.requests:
        while len(active) < _AT_ONCE:
            begin = generator.choice(heads) + new_blocks(max(1, longest / 8), 0.9)
            active.append((f"session {next(names)}", begin[: longest // 2] + new_blocks(shortest, 0.1)))
        place = generator.randrange(len(active))
        session, blocks = active[place]
        turns.append(Turn(session, tuple(blocks)))
        active[place] = (session, blocks + new_blocks(max(1, longest / 400), 1.0))
        if generator.random() < 1 / _MEAN_TURNS or not scale.has(len(active[place][1])):
            del active[place]
    return turns


def traffic_of(traffic: Traffic) -> Workload:
    """Generate the first `scale.requests` turns of `traffic`."""
    generator, ids, names = random.Random(0), itertools.count(), itertools.count()
    block_tokens, longest = traffic.scale.block_tokens, traffic.scale.longest // traffic.scale.block_tokens

    def new_blocks(median: int, spread: float) -> tuple[int, ...]:
        count = max(1, round(generator.lognormvariate(math.log(median / block_tokens), spread)))
        return tuple(itertools.islice(ids, count))

    def pause() -> float:
        return generator.paretovariate(_PAUSE_TAIL)

    def begin(at: float) -> tuple[float, int, tuple[int, ...], int]:
        (head,) = generator.choices(heads, [1 / n for n in range(1, _SYSTEM_PROMPTS + 1)])
        shortest = traffic.mean_turns * (_TURNS_TAIL - 1) / _TURNS_TAIL
        num_turns = math.ceil(shortest * generator.paretovariate(_TURNS_TAIL))
        return at, next(names), (head + new_blocks(traffic.first, 0.8))[:longest], num_turns

    heads = [new_blocks(traffic.system, 0.3) for _ in range(_SYSTEM_PROMPTS)]
    open_sessions = [begin(pause()) for _ in range(traffic.num_sessions)]
    heapq.heapify(open_sessions)
    turns, num_blocks = list[Turn](), 0
    while len(turns) < traffic.scale.requests:
        num_blocks += sum(len(blocks) for _, _, blocks, _ in open_sessions)
        at, name, blocks, num_left = open_sessions[0]
        turns.append(Turn(f"session {name}", blocks))
        at += pause()
        if num_left > 1 and len(blocks) < longest:
            heapq.heapreplace(
                open_sessions, (at, name, (blocks + new_blocks(traffic.more, 1.0))[:longest], num_left - 1)
            )
        else:
            heapq.heapreplace(open_sessions, begin(at))
    return Workload(turns, num_blocks * block_tokens // len(turns))


def trace_of(turns: Sequence[Turn], block_tokens: int, num_warm_up: int = 0) -> Trace:
    """Convert turns to a trace for `hicache replay`, with one second between two turns."""
    requests = (
        TraceRequest(float(at), np.array(turn.blocks, np.int64), len(turn.blocks) * block_tokens, 1, turn.session)
        for at, turn in enumerate(turns)
    )
    return Trace("generated", block_tokens, tuple(requests), num_warm_up)


def describe_turns(turns: Sequence[Turn], block_tokens: int) -> str:
    """Describe turns in one line: the numbers of turns, sessions and tokens."""
    tokens = sorted(len(turn.blocks) * block_tokens for turn in turns)
    different = len({block for turn in turns for block in turn.blocks}) * block_tokens
    sessions = len({turn.session for turn in turns})
    return (
        f"{len(turns)} requests of {sessions} sessions, {tokens[0]} to {tokens[-1]} tokens, {sum(tokens)} in all, "
        f"{different} of them different"
    )


class OfSession(Protocol):
    """A request of a session."""

    @property
    def session(self) -> str: ...


T = TypeVar("T", bound=OfSession)


class TurnQueue(Generic[T]):
    """The turns that were not sent yet, in order, and the number of open requests of each session."""

    def __init__(self, turns: Sequence[T]) -> None:
        self._left = list(enumerate(turns))
        self._num_open: dict[str, int] = {}

    def take(self) -> tuple[int, T] | None:
        """Take the first of the next turns whose session has no open request. If every session among them has an open
        request, take the first turn, because an agent may send several requests concurrently."""
        if not self._left:
            return None
        ahead = range(min(_AHEAD, len(self._left)))
        place = next((n for n in ahead if not self._num_open.get(self._left[n][1].session)), 0)
        number, turn = self._left.pop(place)
        self._num_open[turn.session] = self._num_open.get(turn.session, 0) + 1
        return number, turn

    def answered(self, turn: T) -> None:
        self._num_open[turn.session] -= 1
