"""Whether what the disk holds of a prompt is worth waiting for, by the speeds that this server and its disk have shown.

    looked up | loads                  | computes the rest   | stored
              ^ the disk is busy       ^ waits for the GPU, or has it: other prompts that compute delay it

SGLang tells a backend nothing of its requests or passes. What can be known of others is which prompts were looked up
and did not come: of each, the keys that are still to be read, and those that are still to be computed. Requests that
generate their answer are not seen, so fewer are counted than wait.

The speed of prefill follows from the copies to the host that SGLang makes of what it has computed (with
`write_through`): their tokens, by the seconds since the copy before, or since a prompt began to wait where none did. A
copy of what no prompt waited for counts as nothing, and of two neighbours the faster one counts twice: what makes the
other slow (compilers, a full GPU) is no computing. With `prefill_tokens_per_s` nothing is measured.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hicache.flow.cost import CostModel
from hicache.integrations.load_gate import KeepsNote, PrefillNote, ServerLoadPolicy
from hicache.metrics import Metrics
from hicache.tiers import DISK

_MIN_TOKENS = 1024  # of less, the time is mostly overhead
_FORGET_S = 30.0  # after which a prompt counts as gone: SGLang does not say which requests were aborted
_MIN_WAIT_S = 0.5  # a disk that works hesitates now and then


@dataclass(slots=True, eq=False)
class _Prompt:
    """Pages that are still to come: those of `to_load`, and then `to_compute`, keys by their place behind `start`
    tokens, of which `num_done` tokens are computed. `last`: the key that tells it from others, also when it is looked
    up again."""

    last: str
    looked_up_s: float
    to_load: set[str]
    to_compute: dict[str, int]
    start: int
    num_done: int = 0


class _Computed(NamedTuple):
    num_tokens: int
    seconds: float
    mean_position: float

    @property
    def token_s(self) -> float:
        return self.seconds / self.num_tokens


class LoadGate(ServerLoadPolicy):
    """Any thread. `page_tokens`: of a page. `clock`: seconds. `store`: keeps the speed of prefill."""

    def __init__(
        self,
        tokens_per_s: float | Literal["auto"],
        page_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float],
        store: KeepsNote,
    ) -> None:
        # The parallel reads of a call are timed as one.
        super().__init__(CostModel(tokens_per_s, {DISK: 1}, metrics, clock), metrics)
        self._page_tokens = page_tokens
        self._clock = clock
        self._note = PrefillNote(self.cost.prefill, store)
        self._lock = threading.Lock()
        self._prompts: list[_Prompt] = []  # that did not come yet, in the order of their look-up
        self._since_s = math.inf  # of what the next copy to the host brings; inf: no prompt waits
        self._copied = 0  # tokens since then
        self._pairs = 0.0  # the sum of these tokens times their position
        self._before: _Computed | None = None

    def weigh(self, keys: Sequence[str], num_held: int, page_bytes: int) -> bool:
        """Whether to load the pages that the disk holds of a prompt's `keys`, `num_held` from the first on."""
        if not keys:
            return False
        with self._lock:
            self._note.step()
            now_s = self._clock()
            others = [
                prompt
                for prompt in self._prompts
                if prompt.last != keys[-1] and now_s - prompt.looked_up_s <= _FORGET_S
            ]
            loads = num_held > 0 and self._is_worth_loading(others, num_held, page_bytes)
            held = num_held if loads else 0
            to_compute = {key: place for place, key in enumerate(keys[held:])}
            prompt = _Prompt(keys[-1], now_s, {*keys[:held]}, to_compute, held * self._page_tokens)
            self._prompts = [*others, prompt]
            self._settle()
        return loads

    def wait_s(self, num_pages: int) -> float:
        """How long to wait at most for the next of so many pages: as long as computing all would take."""
        with self._lock:
            return max(_MIN_WAIT_S, self.cost.longest_wait_s(0, num_pages * self._page_tokens))

    def read(self, keys: Sequence[str], num_read: int, page_bytes: int, seconds: float) -> None:
        """A call has read the first `num_read` pages of `keys` in that time; SGLang reads no more of the prompt where
        that is not all."""
        with self._lock:
            self.cost.observe_read(num_read * page_bytes, seconds)
            for prompt in self._prompts:
                if prompt.to_load & {*keys[:1]}:
                    prompt.to_load -= prompt.to_load if num_read < len(keys) else {*keys}
            self._settle()

    def abandon_read(self) -> None:
        """Pages did not come in time."""
        with self._lock:
            self.abandon()

    def computed(self, num_tokens: int) -> None:
        """SGLang copies the state of so many tokens to the host. Its scheduler calls this: the store is not asked."""
        with self._lock:
            for prompt in self._waiting():  # in their order, as SGLang serves them as a rule
                done = min(num_tokens, len(prompt.to_compute) * self._page_tokens - prompt.num_done)
                self._copied += done
                self._pairs += done * (prompt.start + prompt.num_done + done / 2)
                prompt.num_done, num_tokens = prompt.num_done + done, num_tokens - done
            if self._copied >= _MIN_TOKENS:
                now_s = self._clock()
                self._observe(_Computed(self._copied, now_s - self._since_s, self._pairs / self._copied))
                self._since_s = now_s
                self._copied = 0
                self._pairs = 0.0
            self._settle()

    def offered(self, keys: Sequence[str]) -> None:
        """Pages are to be stored: they were computed, unless they were loaded."""
        with self._lock:
            self._note.step()
            for prompt in self._prompts:
                if not prompt.to_load.isdisjoint(keys):  # what SGLang found too little to load
                    prompt.to_load.clear()
                end = 1 + max((prompt.to_compute.get(key, -1) for key in keys), default=-1)
                prompt.num_done = max(prompt.num_done, end * self._page_tokens)
            self._settle()

    def _is_worth_loading(self, others: Sequence[_Prompt], num_pages: int, page_bytes: int) -> bool:
        queued = sum(len(prompt.to_load) for prompt in others)
        load_s = self.cost.read_s((queued + num_pages) * page_bytes, 1)
        num_delayed = sum(not prompt.to_load for prompt in others)
        return self.choose(self.compare(load_s, 0, num_pages * self._page_tokens, num_delayed))

    def _waiting(self) -> Iterable[_Prompt]:
        return (prompt for prompt in self._prompts if not prompt.to_load)

    def _settle(self) -> None:
        """Leave out the prompts that have come, and know since when one waits for the GPU."""
        self._prompts = [
            prompt
            for prompt in self._prompts
            if prompt.to_load or prompt.num_done < len(prompt.to_compute) * self._page_tokens
        ]
        if not any(True for _ in self._waiting()):
            self._since_s = math.inf
            self._copied = 0
            self._pairs = 0.0
        elif self._since_s == math.inf:
            self._since_s = self._clock()

    def _observe(self, latest: _Computed) -> None:
        before, self._before = self._before, latest
        if before is not None:
            self.cost.observe_prefill(*min(before, latest, key=lambda each: each.token_s))
