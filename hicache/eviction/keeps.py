"""Until when prompts are kept whose next turn was announced. Knows no clock: whoever asks says what time it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hicache.eviction.orders import Keep

KEPT_SHARE = 0.9  # of a tier, that a namespace may have kept: so much is left to its prompts that say nothing
_PATIENCE = 4.0  # times the time that was told: one that comes later than told would be evicted before all others


class _Prompt(NamedTuple):
    """`keeps`: of each component."""

    until_s: float
    num_tokens: int
    keeps: Sequence[Keep]

    @property
    def is_over(self) -> bool:
        return all(keep.is_over for keep in self.keeps)

    def end(self) -> None:
        for keep in self.keeps:
            keep.end()


class Keeps:
    """Of one tier. `most_tokens`: of a namespace that are kept, those of the prompts that ended last."""

    def __init__(self, most_tokens: float) -> None:
        self._most_tokens = most_tokens
        self._prompts: dict[str, list[_Prompt]] = {}  # by namespace
        self._next_s = math.inf  # when the first of them ends, or earlier

    @property
    def num_tokens(self) -> int:
        """Of all prompts that are kept."""
        kept = (prompt for prompts in self._prompts.values() for prompt in prompts if not prompt.is_over)
        return sum(prompt.num_tokens for prompt in kept)

    def add(self, namespace: str, now_s: float, within_s: float, num_tokens: int, keeps: Sequence[Keep]) -> None:
        """A prompt of so many tokens is kept, whose next turn was announced within a time that may be wrong. Where that
        is too much, the oldest keep of the namespace ends."""
        until_s = now_s + _PATIENCE * within_s
        kept = [prompt for prompt in self._prompts.get(namespace, ()) if not prompt.is_over]
        kept.append(_Prompt(until_s, num_tokens, keeps))
        excess = sum(prompt.num_tokens for prompt in kept) - self._most_tokens
        while excess > 0:
            excess -= kept[0].num_tokens
            kept.pop(0).end()
        self._prompts[namespace] = kept
        self._next_s = min(self._next_s, until_s)

    def expire(self, now_s: float) -> None:
        """End what was kept until now."""
        if now_s < self._next_s:
            return
        for namespace, prompts in list(self._prompts.items()):
            for prompt in prompts:
                if prompt.until_s <= now_s:
                    prompt.end()
            left = [prompt for prompt in prompts if not prompt.is_over]
            if left:
                self._prompts[namespace] = left
            else:
                del self._prompts[namespace]
        ends = (prompt.until_s for prompts in self._prompts.values() for prompt in prompts)
        self._next_s = min(ends, default=math.inf)
