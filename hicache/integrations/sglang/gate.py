"""Whether what the disk holds of a prompt is worth waiting for, by the speeds that this server and its disk have shown.

    looked up | weighed | read    <- declined: the disk says nothing, and SGLang computes
              | computed, copied to the host, offered for storing    <- the speed of prefill, a little too low

SGLang tells a backend nothing of its passes. So a prompt is timed of which nothing is loaded, from its look-up until
pages of it are to be stored, where no other prompt and no earlier write delayed that. With the copy to the host that is
somewhat too long, and computing looks slower than it is: what loads slowly is loaded rather than computed. With
`prefill_tokens_per_s` nothing is timed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hicache.flow.cost import CostModel
from hicache.integrations.load_gate import KeepsNote, PrefillNote, ServerLoadDecisions
from hicache.metrics import Metrics
from hicache.tiers import DISK

_MIN_TOKENS = 1024  # of less, the time is mostly overhead
_FORGET_S = 10.0  # after which a prompt does not delay another any more
_IDLE_S = 0.002  # a write that begins so long after the last one did not wait for it
_MIN_WAIT_S = 0.5  # a disk that works hesitates now and then


@dataclass(slots=True)
class _Prompt:
    """Pages that are computed, `places` by key; the first `num_done` were, by `since_s`. `is_timed`: nothing else
    delayed them."""

    places: dict[str, int]
    since_s: float
    is_timed: bool
    num_done: int = 0


class LoadGate(ServerLoadDecisions):
    """Any thread. `page_tokens`: of a page. `clock`: seconds. `store`: keeps the speed of prefill."""

    def __init__(
        self,
        tokens_per_s: float | Literal["auto"],
        page_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float],
        store: KeepsNote,
    ) -> None:
        super().__init__(metrics)
        self._page_tokens, self._clock = page_tokens, clock
        # A call's reads go on side by side and are timed as one.
        self._cost = CostModel(tokens_per_s, {DISK: 1}, metrics, clock)
        self._note = PrefillNote(self._cost.prefill, store)
        self._lock = threading.Lock()
        self._prompt = _Prompt({}, -math.inf, is_timed=False)  # that was looked up last
        self._looked_up_s = self._written_s = -math.inf

    def weigh(self, keys: Sequence[str], num_held: int, page_bytes: int) -> bool:
        """Whether to load the pages that the disk holds of a prompt's `keys`, `num_held` from the first on."""
        with self._lock:
            self._note.step()
            loads = num_held > 0 and self.decide(
                self._cost.read_s(num_held * page_bytes, 1), self._cost.prefill_s(0, num_held * self._page_tokens)
            )
            before, now_s = self._prompt, self._clock()
            is_alone = before.num_done == len(before.places) or now_s - self._looked_up_s > _FORGET_S
            places = {key: place for place, key in enumerate(keys[num_held:] if loads else keys)}
            self._prompt, self._looked_up_s = _Prompt(places, now_s, is_alone and not loads), now_s
        return loads

    def wait_s(self, num_pages: int) -> float:
        """How long to wait at most for the next of so many pages: as long as computing all would take."""
        with self._lock:
            return max(_MIN_WAIT_S, self._cost.longest_wait_s(0, num_pages * self._page_tokens))

    def read(self, num_bytes: int, seconds: float) -> None:
        """A call has read so much in that time."""
        with self._lock:
            self._cost.observe_read(num_bytes, seconds)

    def gave_up(self) -> None:
        """Pages did not come in time."""
        with self._lock:
            self.abandon()

    def offered(self, keys: Sequence[str]) -> None:
        """Pages are to be stored: they were computed, unless they were loaded."""
        with self._lock:
            now_s, prompt = self._clock(), self._prompt
            end = 1 + max((prompt.places.get(key, -1) for key in keys), default=-1)
            if end <= prompt.num_done:
                return
            start, seconds = prompt.num_done * self._page_tokens, now_s - prompt.since_s
            prompt.num_done, prompt.since_s = end, now_s
            num_tokens, is_due = end * self._page_tokens - start, now_s - self._written_s >= _IDLE_S
            if prompt.is_timed and is_due and num_tokens >= _MIN_TOKENS:
                self._cost.observe_prefill(num_tokens, seconds, start + num_tokens / 2)
                self._note.step()

    def written(self) -> None:
        """What was offered last is stored, or failed."""
        with self._lock:
            self._written_s = self._clock()
