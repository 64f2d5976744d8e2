"""The most that any order of eviction could hit."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache.tree.key import Tokens


def optimal_hits(requests: Sequence[Tokens], capacity: int | None) -> npt.NDArray[np.int64]:
    """The most blocks of each request that could have been held when it came, int64 `[requests]`. None: no limit.

    Of what is held and what a request has brought, that stays which is asked for soonest (Belady); of equals what is
    nearer to the root, so that what is held stays prefixes: a block is asked for whenever one behind it is. It may drop
    what was just computed, so no order hits more in all.
    """
    prompts = _prefix_ids(requests)
    never = len(prompts)
    next_use = dict.fromkeys((block for prompt in prompts for block in prompt), never)
    uses: list[list[int]] = []
    for at in reversed(range(never)):
        uses.append([next_use[block] for block in prompts[at]])
        next_use.update(dict.fromkeys(prompts[at], at))
    held: dict[int, int] = {}  # block -> next use
    heap: list[tuple[int, int, int]] = []
    hits = np.zeros(never, np.int64)
    for at, (prompt, next_uses) in enumerate(zip(prompts, reversed(uses), strict=True)):
        hits[at] = sum(block in held for block in prompt)
        held.update(zip(prompt, next_uses, strict=True))
        if capacity is None:
            continue
        for depth, (block, use) in enumerate(zip(prompt, next_uses, strict=True)):
            heapq.heappush(heap, (-use, -depth, block))
        while len(held) > capacity:
            use, _, block = heapq.heappop(heap)
            if held.get(block) == -use:
                del held[block]
    return hits


def _prefix_ids(requests: Sequence[Tokens]) -> list[list[int]]:
    """The requests with ids that stand for a block and all before it."""
    known: dict[tuple[int, int], int] = {}
    prompts = []
    for request in requests:
        above, prompt = -1, []
        for block in request.tolist():
            above = known.setdefault((above, block), len(known))
            prompt.append(above)
        prompts.append(prompt)
    return prompts
