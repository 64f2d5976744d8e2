"""Computes the hits of optimal eviction, which are an upper bound for every policy, and the hits of LRU for every size
of one tier.

Both computations handle pieces of prompts, not single blocks. A prompt is given as ids of its prefixes, see
`hicache.replay.trace.prefix_ids`.
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
    """Blocks [start, end) of a prompt that have the same next use, or the same last use: by the request with the index
    `at`."""

    at: int
    start: int
    end: int


def optimal_hits(prompts: Sequence[Tokens], capacity: int | None) -> npt.NDArray[np.int64]:
    """Return the number of blocks of each prompt that optimal eviction hits in one tier, int64 `[prompts]`. `capacity`:
    size of the tier in blocks; None: no limit.

    The tier holds all blocks of the running prompt, so no prompt may be longer than `capacity`. The block with the
    latest next use is evicted first (Belady). Of blocks with the same next use, the last one in the prompt is evicted
    first, because each use of a block also uses the blocks before it.
    """
    held: dict[int, deque[_Piece]] = {}  # pieces by next use; first the piece closest to the end of its prompt
    latest: list[int] = []  # a heap of the negated keys of `held`
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
    """Return the number of hits under `lru` in one tier, for each size of the tier. Element i of the result, int64
    `[sizes]`, is the number of requested blocks that a tier of i blocks hits.

    Hits of the first `num_warm_up` prompts are not counted. A tier that is larger than the last size has no more hits
    than the last size. Computed by stack distance (Mattson et al., IBM Systems Journal 9(2), 1970): a block is a hit if
    the tier can hold the block, the blocks before it in the prompt, and all blocks used since the block's last use.
    """
    owner = np.full(_num_ids(prompts), -1, np.int64)  # by block id: index of the prompt that used the block last
    used = _FenwickTree(len(prompts))
    steps = np.zeros(len(owner) + 2, np.int64)  # additional hits from one size to the next
    for at, ids in enumerate(prompts):
        for piece in _pieces_of(owner[ids]):
            if piece.at < 0:
                break
            if at >= num_warm_up:
                nearest = used.after(piece.at) + piece.start + 1  # `used` lacks the pieces before it
                steps[nearest : nearest + piece.end - piece.start] += 1
            used.add(piece.at, piece.start - piece.end)
        owner[ids] = at
        used.add(at, len(ids))
    return np.cumsum(steps)


def _next_uses(prompts: Sequence[Tokens]) -> list[list[_Piece]]:
    """Return each prompt as pieces of blocks with the same next use. The next use `len(prompts)` means that no later
    prompt uses the blocks."""
    next_use = np.full(_num_ids(prompts), len(prompts), np.int64)
    found = []
    for at in reversed(range(len(prompts))):
        found.append(_pieces_of(next_use[prompts[at]]))
        next_use[prompts[at]] = at
    return found[::-1]


def _pieces_of(uses: npt.NDArray[np.int64]) -> list[_Piece]:
    """Cut a prompt into pieces of equal `uses`."""
    if not len(uses):
        return []
    starts = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist()]
    return [_Piece(int(uses[start]), start, end) for start, end in zip(starts, [*starts[1:], len(uses)], strict=True)]


def _num_ids(prompts: Sequence[Tokens]) -> int:
    return 1 + max((int(ids.max()) for ids in prompts if len(ids)), default=-1)


class _FenwickTree:
    """A Fenwick tree: numbers at the indices [0, size), and sums of the numbers after an index."""

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
        """Return the sum of the numbers after the index `at`."""
        before, at = 0, at + 1
        while at:
            before += self._sums[at]
            at -= at & -at
        return self._total - before
