"""The most that any order of eviction could hit, and what LRU hits in one tier of every size.

Both go by pieces of prompts, not by blocks. Prompts are ids of prefixes, see `hicache.replay.trace.prefix_ids`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.pages.key import Tokens


class _Piece(NamedTuple):
    """Blocks [start, end) of a prompt, which the request `at` is the next, or the last, to ask for."""

    at: int
    start: int
    end: int


def optimal_hits(prompts: Sequence[Tokens], capacity: int | None) -> npt.NDArray[np.int64]:
    """The most blocks of each prompt that could have been held when it came, int64 `[prompts]`. None: no limit.

    A prompt is held whole while it runs, so none may be longer than `capacity`. Of the others those stay that are asked
    for soonest (Belady), of equals those nearer to the root: a block is asked for whenever one behind it is.
    """
    held: dict[int, deque[_Piece]] = {}  # by next use; of one use the deepest first
    latest: list[int] = []  # a heap of the keys of `held`, negative
    hits, num_held = np.zeros(len(prompts), np.int64), 0
    for at, pieces in enumerate(_next_uses(prompts)):
        hits[at] = sum(piece.end - piece.start for piece in held.pop(at, ()))
        num_held -= int(hits[at])
        length = len(prompts[at])
        while capacity is not None and num_held + length > capacity:
            others = held.get(-latest[0])
            if not others:
                held.pop(-heapq.heappop(latest), None)
                continue
            use, start, end = others.popleft()
            kept = max(start, end - (num_held + length - capacity))
            num_held -= end - kept
            if kept > start:
                others.appendleft(_Piece(use, start, kept))
        for piece in pieces:
            if piece.at not in held:
                held[piece.at] = deque()
                heapq.heappush(latest, -piece.at)
            held[piece.at].append(piece)
        num_held += length
    return hits


def lru_hits_by_size(prompts: Sequence[Tokens], num_warm_up: int = 0) -> npt.NDArray[np.int64]:
    """Blocks that one tier of 0, 1, 2, ... blocks under `lru` hits, int64 `[sizes]`, those of the first `num_warm_up`
    prompts not counted; the last size hits as many as any larger one.

    By stack distance (Mattson et al., IBM Systems Journal 9(2), 1970): a block is hit where the tier has room for all
    that was used since, and for the prompt's blocks above it. What one prompt was the last to use is the end of it.
    """
    owner = np.full(_num_ids(prompts), -1, np.int64)  # by id: who used it last
    used = _Sums(len(prompts))
    steps = np.zeros(len(owner) + 2, np.int64)  # of hits, from one size to the next
    for at, ids in enumerate(prompts):
        for piece in _alike(owner[ids]):
            if piece.at < 0:
                break
            if at >= num_warm_up:
                nearest = used.after(piece.at) + piece.start + 1  # what is above it in the prompt was taken out
                steps[nearest : nearest + piece.end - piece.start] += 1
            used.add(piece.at, piece.start - piece.end)
        owner[ids] = at
        used.add(at, len(ids))
    return np.cumsum(steps)


def _next_uses(prompts: Sequence[Tokens]) -> list[list[_Piece]]:
    """Of each prompt the pieces with the same next use; `len(prompts)`: none."""
    next_use = np.full(_num_ids(prompts), len(prompts), np.int64)
    found = []
    for at in reversed(range(len(prompts))):
        found.append(_alike(next_use[prompts[at]]))
        next_use[prompts[at]] = at
    return found[::-1]


def _alike(uses: npt.NDArray[np.int64]) -> list[_Piece]:
    """A prompt in pieces of equal `uses`."""
    if not len(uses):
        return []
    starts = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist()]
    return [_Piece(int(uses[start]), start, end) for start, end in zip(starts, [*starts[1:], len(uses)], strict=True)]


def _num_ids(prompts: Sequence[Tokens]) -> int:
    return 1 + max((int(ids.max()) for ids in prompts if len(ids)), default=-1)


class _Sums:
    """Numbers at [0, size) and the sums of those behind one: a Fenwick tree."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self._total = 0

    def add(self, at: int, change: int) -> None:
        self._total += change
        at += 1
        while at < len(self._sums):
            self._sums[at] += change
            at += at & -at

    def after(self, at: int) -> int:
        """The sum of those behind `at`."""
        before, at = 0, at + 1
        while at:
            before += self._sums[at]
            at -= at & -at
        return self._total - before
