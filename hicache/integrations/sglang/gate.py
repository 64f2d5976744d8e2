"""Decides by the measured speeds of server and disk whether the pages of a prompt that are on the disk are loaded.

    looked up | loads                  | computes the rest   | stored
              ^ the disk is busy       ^ waits for the GPU or runs on it: other prompts that compute delay it

SGLang passes no information on its requests or forward passes to a backend. The gate therefore keeps, for each prompt
that was looked up and is not complete, the keys of pages still to be read and of pages still to be computed.
Requests that decode are not visible, so the gate counts fewer requests than wait.

The prefill speed is measured by SGLang's copies of computed tokens to the host (with `write_through`): the tokens of
copies, divided by the time since the copies before, or since a prompt began to wait if none waited before. Copies of
tokens that no waiting prompt needs are not counted. Of two successive measurements the faster one is used, because
compilation or a busy GPU slows single measurements. With `prefill_tokens_per_s` set, no speed is measured.
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
from hicache.stores.side_by_side import answer_limit_s
from hicache.tiers import Store

_MIN_TOKENS = 1024  # minimum tokens of a measurement; for fewer tokens, most of the time is overhead
_FORGET_S = 30.0  # age in seconds at which a prompt is dropped, because SGLang does not report aborted requests
_MAX_COSTLY_KEYS = 1 << 16
_MIN_WAIT_S = 0.5  # minimum wait in seconds, longer than the pauses of a working disk


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt with pages that are still to be loaded (`to_load`) and then computed (`to_compute`).

    `to_compute` maps each key to the index of its page, counted from token `start`; `num_done` of these pages' tokens
    are computed. `last`: the last key, which identifies the prompt when it is looked up again.
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
    a page. `clock`: returns the current time in seconds. `store`: stores the measured prefill speed for the next
    start. `stores`: those that pages are read from."""

    def __init__(
        self,
        tokens_per_s: float | Literal["auto"],
        page_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float],
        store: NoteStore,
        stores: Iterable[Store],
    ) -> None:
        # The parallel reads of one call are timed as one read.
        super().__init__(CostModel(tokens_per_s, dict.fromkeys(stores, 1), metrics, clock), metrics)
        self._page_tokens = page_tokens
        self._clock = clock
        self._note = PrefillNote(self.cost.prefill, store)
        self._lock = threading.Lock()
        self._costly: dict[str, None] = {}  # the last pages of prompts that take long to compute
        self._prompts: list[_Prompt] = []  # prompts that are not complete yet, in the order of their look-up
        # time at which computing the tokens of the next measurement began; inf: no prompt waits
        self._since_s = math.inf
        self._copied = 0  # tokens copied since then
        self._pairs = 0.0  # sum of the positions of these tokens
        self._before: _Computed | None = None

    def decide(self, keys: Sequence[str], held: Sequence[Store], page_bytes: int) -> bool:
        """Return whether to load the first `len(held)` pages of a prompt; `held`: the store of each."""
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
        """Return the maximum wait for the next of `num_pages` pages, in seconds: the time that computing them all would
        take."""
        with self._lock:
            return max(_MIN_WAIT_S, self.cost.longest_wait_s(0, num_pages * self._page_tokens))

    def answer_s(self, num_pages: int) -> float:
        """How long a prompt of `num_pages` waits for the remote store to look it up, in seconds."""
        with self._lock:
            return answer_limit_s(self.cost.longest_wait_s(0, num_pages * self._page_tokens))

    def are_costly(self, keys: Sequence[str]) -> bool:
        """Whether these pages are of a prompt that takes long to compute, as far as its length and the speed are
        known."""
        with self._lock:
            return keys[0] in self._costly or self.cost.is_costly(len(keys) * self._page_tokens)

    def read(self, keys: Sequence[str], read: Sequence[Store], page_bytes: int, seconds: float) -> None:
        """Note that a call has read the first `len(read)` pages of `keys` in `seconds`; `read`: the store of each. If
        pages were missing, SGLang reads no further pages of the prompt."""
        num_read = len(read)
        with self._lock:
            for store in {*read}:
                self.cost.observe_reads([(read.count(store) * page_bytes, seconds)], store)
            for prompt in self._prompts:
                if prompt.to_load & {*keys[:1]}:
                    prompt.to_load -= prompt.to_load if num_read < len(keys) else {*keys}
            self._settle()

    def abandon_read(self) -> None:
        """Count a read that was ended because a page did not arrive in time."""
        with self._lock:
            self.abandon()

    def computed(self, num_tokens: int) -> None:
        """Record that SGLang copies the KV of `num_tokens` tokens to the host. Called by SGLang's scheduler; does not
        access the store."""
        with self._lock:
            for prompt in self._waiting():  # prompts are in the order of look-up, in which SGLang usually serves them
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
        """Record that SGLang offers pages to be stored. The offered pages were computed, or loaded before."""
        with self._lock:
            self._note.step()
            for prompt in self._prompts:
                # SGLang computed these pages, because it found too few pages to load
                if not prompt.to_load.isdisjoint(keys):
                    prompt.to_load.clear()
                end = 1 + max((prompt.to_compute.get(key, -1) for key in keys), default=-1)
                prompt.num_done = max(prompt.num_done, end * self._page_tokens)
            self._settle()

    def _is_worth_loading(self, others: Sequence[_Prompt], held: Sequence[Store], page_bytes: int) -> bool:
        """The stores are read at once, so the slower one decides. Queued pages count for each store."""
        queued, num_pages = sum(len(prompt.to_load) for prompt in others), len(held)
        loads_s = [self.cost.read_s((queued + held.count(store)) * page_bytes, 1, store) for store in {*held}]
        known_s = [load_s for load_s in loads_s if load_s is not None]
        load_s = max(known_s) if len(known_s) == len(loads_s) else None
        num_delayed = sum(not prompt.to_load for prompt in others)
        return self.choose(self.compare(load_s, 0, num_pages * self._page_tokens, num_delayed))

    def _waiting(self) -> Iterable[_Prompt]:
        return (prompt for prompt in self._prompts if not prompt.to_load)

    def _settle(self) -> None:
        """Remove completed prompts, and update the time since which some prompt has waited for the GPU."""
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
