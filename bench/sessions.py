"""Sessions of coding agents as a workload: from a trace, or generated in the shape of one.

A turn of a session is its last prompt and more behind it; all sessions begin with one of a few system prompts. A prompt
is blocks, each the id of a few tokens, so that its length can be scaled: a trace of 64 tokens a block makes prompts of
an eighth of theirs with 8. The tokens of a block follow from its id alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.replay.trace import read_trace

_AT_ONCE = 16  # generated sessions that go on side by side
_MEAN_TURNS = 20
_HEADS = 2
_AHEAD = 64  # turns among which a client looks for one whose session waits for nothing
_TOKENS = range(10, 250)  # ids that any vocabulary has


@dataclass(frozen=True)
class Turn:
    """One request: what it asks is the blocks of its prompt, by their ids."""

    session: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many turns there are, and how long, in tokens; turns of other lengths are left out."""

    requests: int
    block_tokens: int
    shortest: int = 200
    longest: int = 60_000

    def has(self, num_blocks: int) -> bool:
        return self.shortest <= num_blocks * self.block_tokens <= self.longest


class Prompts:
    """Token ids of turns. Those of another `salt` have no block in common."""

    def __init__(self, block_tokens: int, salt: int) -> None:
        self._block_tokens, self._salt = block_tokens, salt
        self._known: dict[int, list[int]] = {}

    def of(self, turn: Turn) -> list[int]:
        return [token for block in turn.blocks for token in self._block(block)]

    def _block(self, block: int) -> list[int]:
        if block not in self._known:
            generator = random.Random(f"{self._salt} {block}")
            self._known[block] = generator.choices(_TOKENS, k=self._block_tokens)
        return self._known[block]


def read_turns(path: Path, scale: Scale) -> list[Turn]:
    """The first turns of a trace (`hicache.replay.trace`) that are long enough and not too long."""
    requests = enumerate(read_trace(path).requests)
    turns = (
        Turn(request.session or f"request {number}", tuple(request.blocks.tolist()))
        for number, request in requests
        if scale.has(len(request.blocks))
    )
    return list(itertools.islice(turns, scale.requests))


def generated_turns(scale: Scale, seed: int = 0) -> list[Turn]:
    """Sessions begin with an eighth of the longest prompt, more or less, and grow by a four hundredth a turn."""
    generator, ids, names = random.Random(seed), itertools.count(), itertools.count()
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


def describe_turns(turns: Sequence[Turn], block_tokens: int) -> str:
    """One line: how many turns, sessions and tokens."""
    tokens = sorted(len(turn.blocks) * block_tokens for turn in turns)
    different = len({block for turn in turns for block in turn.blocks}) * block_tokens
    sessions = len({turn.session for turn in turns})
    return (
        f"{len(turns)} requests of {sessions} sessions, {tokens[0]} to {tokens[-1]} tokens, {sum(tokens)} in all, "
        f"{different} of them different"
    )


class TurnQueue:
    """Turns that are not sent, in order, and the sessions whose last one is not answered."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._left = list(enumerate(turns))
        self._under_way: dict[str, int] = {}

    def take(self) -> tuple[int, Turn] | None:
        """The first turn whose session waits for no answer. Where none of the next ones is such, the first: an agent
        asks several things at once."""
        if not self._left:
            return None
        ahead = range(min(_AHEAD, len(self._left)))
        place = next((n for n in ahead if not self._under_way.get(self._left[n][1].session)), 0)
        number, turn = self._left.pop(place)
        self._under_way[turn.session] = self._under_way.get(turn.session, 0) + 1
        return number, turn

    def answered(self, turn: Turn) -> None:
        self._under_way[turn.session] -= 1
