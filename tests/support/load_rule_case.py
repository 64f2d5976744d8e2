"""A server on a virtual clock, small enough to try rules of loading or computing on it: one device, one disk.

Requests are the turns of sessions: each repeats the prompt before it and adds to it. What was computed is on the disk
from then on; memory, of device and host together, holds the sessions used last. A step computes the next token of each
request that decodes, and 8192 tokens of prompts. The disk reads one job after the other, while steps go on.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Rule: TypeAlias = Callable[[float, float, int], bool]
PAGE = 64


@dataclass(frozen=True)
class Machine:
    """About one H200 with an 8B model in packed pages. A prompt costs `token_s` a token, and `pair_s` a token and
    position; a pass `pass_s` at least; a step `step_s`, and `context_s` a token of what decodes."""

    disk_bytes_per_s: float
    token_s: float = 18e-6
    pair_s: float = 0.8e-9
    pass_s: float = 0.012
    step_s: float = 0.008
    context_s: float = 3.3e-8
    token_bytes: int = 97 << 10
    memory_tokens: int = 100_000
    device_tokens: int = 82_000
    answer_tokens: int = 24
    client_s: float = 0.09

    def compute_s(self, start: int, end: int) -> float:
        return (end - start) * (self.token_s + self.pair_s * (start + end) / 2)

    def read_s(self, num_tokens: float) -> float:
        return num_tokens * self.token_bytes / self.disk_bytes_per_s


@dataclass(eq=False)
class Turn:
    """[0, shared) were tokens of the session before, [0, computed) need not be computed any more."""

    session: int
    num_tokens: int
    shared: int
    computed: int = 0
    num_generated: int = 0
    is_weighed: bool = False
    is_reading: bool = False


@dataclass
class _Session:
    number: int
    num_tokens: int
    turns_left: int
    shared: int = 0

    def next_turn(self, num_new: int) -> Turn:
        turn = Turn(self.number, self.num_tokens, self.shared // PAGE * PAGE)
        self.shared, self.num_tokens, self.turns_left = self.num_tokens, self.num_tokens + num_new, self.turns_left - 1
        return turn


def agents(seed: int, num_turns: int) -> list[Turn]:
    """Sessions of 5 to 40 turns that begin with 1k to 40k tokens, most with few, each turn adding 30 to 400; seven are
    open at a time, and any of them goes on."""
    rng, opened, turns = random.Random(seed), list[_Session](), list[Turn]()
    for number in range(num_turns):
        if len(opened) < 7:
            opened.append(_Session(number, int(1_000 * 40 ** rng.random()), rng.randint(5, 40)))
        session = rng.choice(opened)
        turns.append(session.next_turn(rng.randint(30, 400)))
        opened = [session for session in opened if session.turns_left]
    return turns


def chats(seed: int, num_turns: int) -> list[Turn]:
    """Sixty conversations of 1k to 30k tokens, which a disk holds from yesterday: each turn adds 100 to 800 to one."""
    rng = random.Random(seed)
    sessions = [_Session(number, rng.randint(1_000, 30_000), num_turns) for number in range(60)]
    for session in sessions:
        session.next_turn(0)
    return [rng.choice(sessions).next_turn(rng.randint(100, 800)) for _ in range(num_turns)]


class Server:
    """`num_clients`: each sends its next turn when the last is answered, and of a session one at a time.
    `requests_per_s`: instead, turns come at random, so many in a second."""

    def __init__(
        self, machine: Machine, turns: Sequence[Turn], rule: Rule, num_clients: int = 0, requests_per_s: float = 0.0
    ) -> None:
        self._machine, self._rule, self._now_s = machine, rule, 0.0
        self._coming: list[tuple[float, int, Turn]] = []  # a heap
        self._waiting, self._running = list[Turn](), list[Turn]()
        self._reads = deque[list[float]]()  # tokens left, of each job
        self._readers = deque[Turn]()
        self._claims = dict[Turn, int]()  # tokens that were read, or are, for turns that were not admitted
        self._memory = OrderedDict[int, int]()  # tokens of each session, the one used last behind all others
        self._in_use = dict.fromkeys((turn.session for turn in turns), 0)
        self._todo, self._free_clients = deque(turns), 0
        rng, at_s = random.Random(1), 0.0
        while requests_per_s and self._todo:
            at_s += rng.expovariate(requests_per_s)
            self._send(self._todo.popleft(), at_s)
        for _ in range(num_clients):
            self._send_next()

    def run(self) -> float:
        """Serve all turns; how long that took."""
        while self._coming or self._waiting or self._running:
            while self._coming and self._coming[0][0] <= self._now_s:
                self._waiting.append(heapq.heappop(self._coming)[2])
            self._admit()
            step_s = self._step() if self._running else self._idle_s()
            self._now_s += step_s
            self._read(step_s)
        return self._now_s

    def _send(self, turn: Turn, at_s: float) -> None:
        heapq.heappush(self._coming, (at_s, len(self._todo), turn))

    def _send_next(self) -> None:
        self._free_clients += 1
        while self._free_clients and self._todo and not self._in_use[self._todo[0].session]:
            turn = self._todo.popleft()
            self._free_clients -= 1
            self._in_use[turn.session] += 1
            self._send(turn, self._now_s + self._machine.client_s)

    def _admit(self) -> None:
        """In order of arrival, as far as the device has room. Who waits for the disk lets others pass."""
        free_tokens = self._machine.device_tokens - sum(turn.num_tokens for turn in self._running)
        for turn in tuple(self._waiting):
            if turn.is_reading or self._waits_for_the_disk(turn):
                continue
            free_tokens -= turn.num_tokens
            if free_tokens < 0:
                continue
            turn.computed = min(turn.shared, self._memory.get(turn.session, 0))
            self._claims.pop(turn, None)
            self._waiting.remove(turn)
            self._running.append(turn)

    def _waits_for_the_disk(self, turn: Turn) -> bool:
        """Whether it does from now on. What is read for those that were not admitted takes half of memory at most."""
        start, machine = self._memory.get(turn.session, 0), self._machine
        if turn.is_weighed or start >= turn.shared:
            return False
        num_tokens = sum(left for (left,) in self._reads) + turn.shared - start
        num_delayed = len(self._running) + sum(not other.is_reading for other in self._waiting if other is not turn)
        turn.is_weighed = not self._rule(machine.read_s(num_tokens), machine.compute_s(start, turn.shared), num_delayed)
        if turn.is_weighed:
            return False
        if not self._claims or sum(self._claims.values()) + turn.shared <= machine.memory_tokens / 2:
            turn.is_weighed = turn.is_reading = True
            self._claims[turn] = turn.shared
            self._reads.append([turn.shared - start])
            self._readers.append(turn)
        return True

    def _step(self) -> float:
        machine, budget, compute_s = self._machine, 8192, 0.0
        context = sum(turn.num_tokens for turn in self._running if turn.computed == turn.num_tokens)
        for turn in tuple(self._running):
            if turn.computed == turn.num_tokens:
                turn.num_generated += 1
                if turn.num_generated >= machine.answer_tokens:
                    self._end(turn)
            elif budget:
                end = min(turn.num_tokens, turn.computed + budget)
                budget, compute_s = budget - end + turn.computed, compute_s + machine.compute_s(turn.computed, end)
                turn.computed = end
        return machine.step_s + context * machine.context_s + max(machine.pass_s if budget < 8192 else 0.0, compute_s)

    def _end(self, turn: Turn) -> None:
        self._running.remove(turn)
        self._keep(turn.session, turn.num_tokens // PAGE * PAGE)
        if self._in_use[turn.session]:
            self._in_use[turn.session] -= 1
            self._send_next()

    def _keep(self, session: int, num_tokens: int) -> None:
        """Sessions used long ago leave memory, their last tokens first."""
        memory = self._memory
        memory[session] = max(num_tokens, memory.get(session, 0))
        memory.move_to_end(session)
        excess = sum(memory.values()) - self._machine.memory_tokens
        kept = {turn.session for turn in (*self._claims, *self._running)}
        for oldest in [other for other in memory if other != session and other not in kept]:
            gone = min(max(0, excess), memory[oldest])
            memory[oldest], excess = memory[oldest] - gone, excess - gone
            if not memory[oldest]:
                del memory[oldest]

    def _idle_s(self) -> float:
        """Nobody runs: until a job of the disk ends, or a turn comes."""
        ends = [self._machine.read_s(self._reads[0][0])] if self._reads else []
        comes = [self._coming[0][0] - self._now_s] if self._coming else []
        return min([*ends, *comes]) + 1e-9

    def _read(self, seconds: float) -> None:
        while self._reads:
            read_s = self._machine.read_s(self._reads[0][0])
            if read_s > seconds:
                self._reads[0][0] -= seconds / read_s * self._reads[0][0]
                return
            seconds -= read_s
            self._reads.popleft()
            turn = self._readers.popleft()
            turn.is_reading = False
            self._keep(turn.session, turn.shared)
