"""Decides whether the pages of a prompt that are on the disk are loaded or computed, by the measured speeds of disk and
server.

    looked up | loads                  | computes the rest   | stored
              ^ the disk is busy       ^ waits for the GPU or runs on it: other prompts that compute delay it

SGLang passes no information on its requests or forward passes to a storage backend. So for each prompt that was looked
up and is not complete, the gate records the keys of pages that are still to be read, and of pages that are still to be
computed. The gate does not know of requests that decode, so it underestimates the number of requests that a prefill
delays.

With `write_through`, SGLang copies computed tokens to the host, and the gate measures the prefill speed by these
copies. The speed is the number of copied tokens, divided by the time since the previous copies. If no prompt waited
before, the measured time begins when a prompt begins to wait. Copies of tokens that no waiting prompt needs are not
counted. Of two successive measurements the faster one is used, because compilation or a busy GPU slows single
measurements. If `prefill_tokens_per_s` is set, no speed is measured.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from hicache.flow.cost import CostModel
from hicache.integrations.load_gate import NoteStore, PrefillNote, ServerLoadPolicy
from hicache.metrics import Metrics
from hicache.stores.disk_and_remote import answer_limit_s
from hicache.tiers import Store

_MIN_TOKENS = 1024  # minimum tokens of a measurement; the time for fewer tokens is mostly overhead
_FORGET_S = 30.0  # age in seconds at which a prompt is dropped, because SGLang does not report aborted requests
_MAX_COSTLY_KEYS = 1 << 16
_MIN_WAIT_S = 0.5  # minimum wait in seconds, longer than the pauses of a working disk


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that is not complete. `to_load`: keys of pages that are still to be loaded. `to_compute`: keys of pages
    that are computed after the loads.

    `to_compute` maps each key to the index of its page, counted from token `start`. `num_done`: number of tokens of
    these pages that are already computed. `last`: the last key, which identifies the prompt when it is looked up again.
    """

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
    """Decides for each prompt that SGLang looks up whether its pages are loaded from the disk or computed. Any thread
    may call its methods. `tokens_per_s`: prefill speed in tokens per second; "auto": measured. `page_tokens`: tokens of
    a page. `clock`: returns the current time in seconds. `store`: stores the measured prefill speed for the next start.
    `stores`: the stores from which pages are read."""

    def __init__(
        self,
        tokens_per_s: float | Literal["auto"],
        page_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float],
        store: NoteStore,
        stores: Iterable[Store],
    ) -> None:
        # One reader for each store, because the parallel reads of one call are timed as one read.
        super().__init__(CostModel(tokens_per_s, dict.fromkeys(stores, 1), metrics, clock), metrics)
        self._page_tokens = page_tokens
        self._clock = clock
        self._note = PrefillNote(self.cost.prefill, store)
        self._lock = threading.Lock()
        self._costly: dict[str, None] = {}  # the last pages of prompts that take long to compute
        self._prompts: list[_Prompt] = []  # incomplete prompts, in the order of their look-up
        # time at which the GPU began to compute the tokens of the next measurement; inf if no prompt waits
        self._since_s = math.inf
        self._copied = 0  # tokens copied since `_since_s`
        self._pairs = 0.0  # sum of the positions of these tokens
        self._before: _Computed | None = None

    def decide(self, keys: Sequence[str], held: Sequence[Store], page_bytes: int) -> bool:
        """Return whether to load the first `len(held)` pages of a prompt. `held`: the store of each of these pages."""
        num_held = len(held)
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
            loads = num_held > 0 and self._is_worth_loading(others, held, page_bytes)
            num_loaded = num_held if loads else 0
            to_compute = {key: place for place, key in enumerate(keys[num_loaded:])}
            prompt = _Prompt(keys[-1], now_s, {*keys[:num_loaded]}, to_compute, num_loaded * self._page_tokens)
            self._prompts = [*others, prompt]
            if self.cost.is_costly(len(keys) * self._page_tokens):
                self._costly |= dict.fromkeys(keys)
            for key in [*islice(self._costly, max(0, len(self._costly) - _MAX_COSTLY_KEYS))]:
                del self._costly[key]
            self._settle()
        return loads

    def wait_s(self, num_pages: int) -> float:
        """Return the maximum wait for the next of `num_pages` pages, in seconds. The maximum wait is the time that
        computing all these pages would take, but at least `_MIN_WAIT_S`."""
        with self._lock:
            return max(_MIN_WAIT_S, self.cost.longest_wait_s(0, num_pages * self._page_tokens))

    def answer_s(self, num_pages: int) -> float:
        """Return the time in seconds for which a prompt of `num_pages` waits until the remote store has answered its
        look-up."""
        with self._lock:
            return answer_limit_s(self.cost.longest_wait_s(0, num_pages * self._page_tokens))

    def are_costly(self, keys: Sequence[str]) -> bool:
        """Return whether these pages belong to a prompt that takes long to compute. Returns False if the prefill speed
        is unknown, and may return False if the length of the prompt is unknown."""
        with self._lock:
            return keys[0] in self._costly or self.cost.is_costly(len(keys) * self._page_tokens)

    def read(self, keys: Sequence[str], read: Sequence[Store], page_bytes: int, seconds: float) -> None:
        """Record that a call has read the first `len(read)` pages of `keys` in `seconds`. `read`: the store of each of
        these pages. If pages were missing, SGLang reads no further pages of the prompt."""
        num_read = len(read)
        with self._lock:
            for store in {*read}:
                self.cost.observe_reads([(read.count(store) * page_bytes, seconds)], store)
            for prompt in self._prompts:
                if prompt.to_load & {*keys[:1]}:
                    prompt.to_load -= prompt.to_load if num_read < len(keys) else {*keys}
            self._settle()

    def abandon_read(self) -> None:
        """Count a read that ended because a page did not arrive in time."""
        with self._lock:
            self.abandon()

    def computed(self, num_tokens: int) -> None:
        """Record that SGLang copies the KV of `num_tokens` tokens to the host. SGLang's scheduler thread calls this
        method, so it does not access the store."""
        with self._lock:
            for prompt in self._waiting():  # SGLang usually serves prompts in the order of look-up
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
        """Record that SGLang offers pages to be stored. SGLang has computed or loaded these pages before."""
        with self._lock:
            self._note.step()
            for prompt in self._prompts:
                # SGLang has computed pages that the gate expected to be loaded, because SGLang found too few pages to
                # load.
                if not prompt.to_load.isdisjoint(keys):
                    prompt.to_load.clear()
                end = 1 + max((prompt.to_compute.get(key, -1) for key in keys), default=-1)
                prompt.num_done = max(prompt.num_done, end * self._page_tokens)
            self._settle()

    def _is_worth_loading(self, others: Sequence[_Prompt], held: Sequence[Store], page_bytes: int) -> bool:
        """Return whether loading takes less time than computing. The stores are read concurrently, so the slower store
        decides. For each store, all queued pages are counted."""
        queued, num_pages = sum(len(prompt.to_load) for prompt in others), len(held)
        loads_s = [self.cost.read_s((queued + held.count(store)) * page_bytes, 1, store) for store in {*held}]
        known_s = [load_s for load_s in loads_s if load_s is not None]
        load_s = max(known_s) if len(known_s) == len(loads_s) else None
        num_delayed = sum(not prompt.to_load for prompt in others)
        queued_s = sum(self._prompt_s(prompt) for prompt in others)
        return self.choose(self.compare(load_s, 0, num_pages * self._page_tokens, num_delayed, queued_s))

    def _prompt_s(self, prompt: _Prompt) -> float:
        """Return the seconds in which the GPU will compute the rest of a prompt, without the pages that are loaded."""
        start = prompt.start + prompt.num_done
        end = prompt.start + len(prompt.to_compute) * self._page_tokens
        return self.cost.prefill_s(start, max(start, end)) or 0.0

    def _waiting(self) -> Iterable[_Prompt]:
        return (prompt for prompt in self._prompts if not prompt.to_load)

    def _settle(self) -> None:
        """Remove completed prompts, and update `_since_s`, the time since which at least one prompt has waited for the
        GPU."""
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
